"""float16 with a scaled loss: what it computes, what it skips, and that it goes on bit for bit. Needs a GPU."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import fp16_bodies
import numpy as np
import pytest
import torch

import lockstep

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

STRATEGIES: list[Any] = ["single", "ddp", "fsdp"]


def launched(folder: Path, strategy: Any, **how: Any) -> dict[str, Any]:
    """What rank 0 found; on one GPU, which two ranks share."""
    found: list[dict[str, Any]] = lockstep.launch(
        functools.partial(fp16_bodies.train, **how), processes=1 if strategy == "single" else 2, runtime="cuda",
        folder=folder, strategy=strategy, launch={"share_devices": True},
        log={"every": "1 step", "gradient_norm": True},
    )  # fmt: skip
    return found[0]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["single", "ddp", "fsdp"])
def test_training_in_float16_follows_float32(tmp_path: Path, strategy: Any) -> None:
    half = launched(tmp_path / "half", strategy, steps=40, share=0.01)
    whole = launched(tmp_path / "whole", strategy, steps=40, share=0.01, precision="float32")
    assert half["last_skipped"] == 0
    assert half["loss"] == pytest.approx(whole["loss"], rel=0.05)
    # Clipped and logged by the true norm, not by the scaled one.
    assert half["norm"] == pytest.approx(whole["norm"], rel=0.1)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["single", "ddp", "fsdp"])
def test_steps_that_overflow_are_skipped_on_all_ranks_until_the_scale_fits(tmp_path: Path, strategy: Any) -> None:
    found = launched(tmp_path / "run", strategy, boost=10.0)
    assert 1 <= found["last_skipped"] < 16
    assert found["scale"]["scale"] < 65536.0
    assert np.isfinite(found["weights"]).all()


def test_micro_batches_are_of_one_scale(tmp_path: Path) -> None:
    found = launched(tmp_path / "run", "ddp", boost=10.0, accumulate=2)
    assert 1 <= found["last_skipped"] < 16
    assert np.isfinite(found["weights"]).all()


# One process would be the one that runs the tests.
@pytest.mark.parametrize("strategy", STRATEGIES[1:], ids=["ddp", "fsdp"])
def test_killed_and_resumed_it_ends_bit_for_bit(tmp_path: Path, strategy: Any) -> None:
    whole = launched(tmp_path / "whole", strategy, boost=10.0)
    with pytest.raises(lockstep.WorkerFailed):
        launched(tmp_path / "killed", strategy, boost=10.0, kill_at=5)
    resumed = launched(tmp_path / "killed", strategy, boost=10.0)
    assert resumed["scale"] == whole["scale"]
    assert resumed["last_skipped"] == whole["last_skipped"]
    assert np.array_equal(resumed["weights"], whole["weights"])
    assert all(np.array_equal(one, other) for one, other in zip(resumed["average"], whole["average"], strict=True))


def test_tf32_sets_how_matrices_are_multiplied(tmp_path: Path) -> None:
    launched(tmp_path / "run", "single", steps=2, precision="tf32")
    before = torch.get_float32_matmul_precision()
    try:
        from lockstep.runtime.cuda import CudaRuntime

        CudaRuntime(0).use_precision("tf32")
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_weights_in_float16_are_refused(tmp_path: Path) -> None:
    with pytest.raises(lockstep.errors.ConfigError, match="make it in float32"):
        lockstep.launch(fp16_bodies.half_weights, processes=1, runtime="cuda", folder=tmp_path / "run")


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes_of_compile_train(tmp_path: Path, mode: str) -> None:
    lockstep.launch(
        functools.partial(fp16_bodies.compiled, mode=mode), processes=1, runtime="cuda", folder=tmp_path / "run"
    )


def test_batchnorm_over_ranks_that_share_a_gpu(tmp_path: Path) -> None:
    """Over gloo; torch's own kernels are for NCCL, which wants a GPU for each rank."""
    found: list[Any] = lockstep.launch(
        fp16_bodies.normalised, processes=2, runtime="cuda", folder=tmp_path / "run", launch={"share_devices": True},
        strategy={"type": "ddp", "sync_batchnorm": True},
    )  # fmt: skip
    assert np.array_equal(found[0], found[1])
