"""The GPTs that are measured on a GPU, of 124 million and 1.3 billion parameters, and one to try a benchmark with."""

from __future__ import annotations

SMALL = {"layers": 12, "heads": 12, "width": 768, "context": 1024, "vocab": 50304}
LARGE = {"layers": 24, "heads": 16, "width": 2048, "context": 1024, "vocab": 50304}
TINY = {"layers": 2, "heads": 2, "width": 32, "context": 16, "vocab": 256}


def size_of(model: str, tiny: bool) -> dict[str, int]:
    """Of the small or the large model."""
    return TINY if tiny else SMALL if model == "small" else LARGE


def text_bytes(tiny: bool) -> int:
    """How much text they are trained on."""
    return 40_000 if tiny else 8_000_000
