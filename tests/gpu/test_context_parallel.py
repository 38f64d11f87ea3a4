"""The axis `context` on a GPU: its attention kernels give the losses of one process, and activations are divided."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import text_program
import torch

import lockstep
from lockstep.errors import WorkerFailed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def launched(folder: Path, processes: int, **how: Any) -> dict[str, Any]:
    mesh = {"type": "fsdp", "mesh": {"data": 1, "context": processes}} if processes > 1 else "single"
    found: list[dict[str, Any]] = lockstep.launch(
        functools.partial(text_program.train, **how), processes=processes, runtime="cuda", folder=folder,
        strategy=mesh, launch={"share_devices": processes > 1},
    )  # fmt: skip
    return found[0]


@pytest.mark.parametrize(("precision", "near"), [("float32", 1e-4), ("bf16", 1e-2)])
def test_losses_of_one_process(tmp_path: Path, precision: str, near: float) -> None:
    alone = launched(tmp_path / "alone", 1, precision=precision)
    together = launched(tmp_path / "together", 2, precision=precision)
    assert together["losses"] == pytest.approx(alone["losses"], rel=near)


def test_activations_are_divided(tmp_path: Path) -> None:
    long = {"precision": "bf16", "length": 8192, "steps": 3, "layers": 8}
    alone, together = launched(tmp_path / "alone", 1, **long), launched(tmp_path / "together", 2, **long)
    print(f"peak {alone['peak'] / 2**30:.2f} GiB on one rank, {together['peak'] / 2**30:.2f} GiB on each of two")
    assert together["peak"] < 0.7 * alone["peak"]


def test_dropout_is_refused(tmp_path: Path) -> None:
    """What draws from the GPU's generator alone is found too."""
    with pytest.raises(WorkerFailed, match="draws random numbers"):
        launched(tmp_path, 2, precision="float32", dropout=0.1)
