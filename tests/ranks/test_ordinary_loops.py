"""Loops as people write them give the numbers of plain torch under every strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ordinary_bodies
import pytest
import torch.distributed as dist

import lockstep

STRATEGIES: dict[str, tuple[int, Any]] = {
    "single": (1, "single"),
    "ddp": (2, {"type": "ddp", "sync_batchnorm": True}),
    "fsdp": (2, {"type": "fsdp", "sync_batchnorm": True}),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_loops_give_the_numbers_of_plain_torch(strategy: str, tmp_path: Path) -> None:
    processes, settings = STRATEGIES[strategy]
    ranks = lockstep.launch(
        ordinary_bodies.all_loops, processes=processes, runtime="cpu", out=tmp_path, strategy=settings,
        timeouts={"collective": "60 s"},
    )  # fmt: skip
    assert not dist.is_initialized(), "the process group of one process ends with its run"
    for rank, found in enumerate(ranks):
        assert (f"rank {rank} has [{3 + rank}] of torch.float32" if processes > 1 else "[2, 3]") in found["gathered"]
        assert found["dtype of norm"] == "torch.bfloat16"
        if strategy == "fsdp":
            assert "has a hook (register_post_accumulate_grad_hook), which would be lost" in found["hooks"]
        else:
            assert found["hooks"] == 0, "setting a model up fires no hook of the user"
        assert found["collective"] == 1
        for name, (_, plain) in ordinary_bodies.loops(strategy).items():
            expected = plain()
            assert found[name].keys() == expected.keys()
            for key, values in expected.items():
                assert found[name][key] == pytest.approx(values, rel=1e-4, abs=2e-6), (name, key)


def test_a_task_whose_optimizer_needs_a_closure(tmp_path: Path) -> None:
    config = {"task": ordinary_bodies.Line, "runtime": "cpu", "optimizer": {"type": "torch.optim.LBFGS"}}
    train = {"batch_size": 20, "steps": 3}
    first = lockstep.train(config, processes=1, out=tmp_path, train=train)
    assert first["metrics"]["train/epoch_loss"] < 1e-6
    with pytest.raises(lockstep.errors.ConfigError, match=r"LBFGS evaluates a closure .* accumulate: .* accumulate: 1"):
        lockstep.train(config, processes=1, out=tmp_path, train={**train, "accumulate": 2})
    both = lockstep.train(config, processes=2, out=tmp_path, train=train)
    assert both["metrics"]["train/epoch_loss"] < 1e-6
