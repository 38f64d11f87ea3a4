"""What benchmarks/data.py loads: images decoded from disk, windows of a memory map, rows of tensors."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

WINDOW = 512


class Images(Dataset[Any]):
    def __init__(self, folder: Path) -> None:
        self.files = sorted(map(str, folder.glob("*.jpg")))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        from PIL import Image

        with Image.open(self.files[index]) as image:
            pixels = np.array(image.convert("RGB"))
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous(), index % 10


class Windows(Dataset[Any]):
    def __init__(self, file: Path) -> None:
        self.tokens = np.memmap(file, dtype=np.uint16, mode="r")

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // WINDOW

    def __getitem__(self, index: int) -> Any:
        window = torch.from_numpy(self.tokens[index * WINDOW : (index + 1) * WINDOW + 1].astype(np.int64))
        return window[:-1], window[1:]


def images(folder: Path) -> tuple[Any, int]:
    return Images(folder / "images"), 32


def text(folder: Path) -> tuple[Any, int]:
    return Windows(folder / "tokens.bin"), 64


def tabular(folder: Path) -> tuple[Any, int]:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(200_000, 32, generator=generator), torch.arange(200_000) % 10), 256


KINDS = {"images": images, "text": text, "tabular": tabular}


def write(folder: Path, quick: bool) -> dict[str, int]:
    """The files, and how much of each there is."""
    from PIL import Image

    sizes = {"images": 64 if quick else 2000, "tokens": 1 if quick else 20}
    draws = np.random.default_rng(0)
    (folder / "images").mkdir()
    for number in range(sizes["images"]):
        # Smooth shapes, as photographs have them: noise would be all there is to decode.
        small = Image.fromarray(draws.integers(0, 256, (20, 20, 3), dtype=np.uint8))
        file = io.BytesIO()
        small.resize((160, 160)).save(file, "JPEG", quality=90)
        (folder / "images" / f"{number:05d}.jpg").write_bytes(file.getvalue())
    draws.integers(0, 50_000, sizes["tokens"] * 1_000_000, dtype=np.uint16).tofile(folder / "tokens.bin")
    return sizes
