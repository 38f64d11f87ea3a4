"""strategy.offload on a GPU: parameters and optimizer state in host memory, with the losses of one process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import text_program
import torch

import lockstep

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


OFFLOAD = {"type": "fsdp", "offload": True}


def launched(folder: Path, processes: int, strategy: Any, fused: bool | None, stop: int = 0) -> list[float]:
    """Returns the loss of every step: the mean over ranks, which have other rows each."""
    train = functools.partial(text_program.train, precision="float32", fused=fused, stop=stop)
    found: list[dict[str, Any]] = lockstep.launch(
        train, processes=processes, runtime="cuda", folder=folder, strategy=strategy,
        launch={"share_devices": processes > 1},
    )  # fmt: skip
    return [sum(each) / processes for each in zip(*(one["losses"] for one in found), strict=True)]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("fused", [None, True])
def test_losses_of_one_process(tmp_path: Path, processes: int, fused: bool | None) -> None:
    alone = launched(tmp_path / "alone", 1, "single", fused)
    offloaded = launched(tmp_path / "offloaded", processes, OFFLOAD, fused)
    assert offloaded == pytest.approx(alone, rel=1e-4)


def test_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    whole = launched(tmp_path / "whole", 1, OFFLOAD, None)
    begun = launched(tmp_path / "in two", 1, OFFLOAD, None, stop=5)
    resumed = launched(tmp_path / "in two", 1, OFFLOAD, None)
    assert begun + resumed == whole
