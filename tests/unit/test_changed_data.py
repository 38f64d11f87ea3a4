"""A dataset of another length on resume: refused where that moves examples, said where it does not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # torch's first optimizer imports it, and it sets an environment variable
from torch.utils.data import Dataset, TensorDataset

from conftest import TASK_FILE
from lockstep.config.schema import RunConfig
from lockstep.engine.run import Run
from lockstep.errors import ConfigError
from lockstep.tasks import trainer

Runs = Callable[..., Run]
SPLIT = {"split": {"train": 0.8, "val": 0.2}}


def fit(new_run: Runs, examples: int, steps: int, data: dict[str, Any], task: str = "", **more: Any) -> Run:
    run = new_run()
    config = {
        "task": {"type": task or f"{TASK_FILE}:Tiny", "examples": examples, **more}, "data": data, "runtime": "cpu",
        "processes": 1, "train": {"steps": steps, "batch_size": 20}, "name": "mine",
        "optimizer": {"type": "torch.optim.SGD", "lr": 0.1},
    }  # fmt: skip
    trainer.fit(run, RunConfig.model_validate(config))
    return run


def test_a_random_split_of_another_length_is_refused_at_the_end_of_an_epoch_too(new_run: Runs) -> None:
    fit(new_run, 100, 4, SPLIT)  # a whole epoch
    with pytest.raises(ConfigError) as refused:
        fit(new_run, 120, 8, SPLIT)
    text = str(refused.value)
    assert "train_data() has 120 examples, and had 100 when the checkpoint was made" in text
    assert "data.split" in text and "validated" in text
    assert fit(new_run, 100, 8, SPLIT).progress.step == 8


@pytest.mark.parametrize("shuffle", [True, False])
def test_another_length_in_the_midst_of_an_epoch_is_refused(new_run: Runs, shuffle: bool) -> None:
    fit(new_run, 100, 3, {"shuffle": shuffle})
    with pytest.raises(ConfigError, match=r"3 batches of this pass over source 1 are done.* count 100 -> 120"):
        fit(new_run, 120, 8, {"shuffle": shuffle})


def test_another_length_at_the_end_of_an_epoch_is_said(new_run: Runs, caplog: pytest.LogCaptureFixture) -> None:
    fit(new_run, 100, 5, {})
    caplog.clear()
    assert fit(new_run, 120, 8, {}).progress.step == 8
    (line,) = [each for each in caplog.records if "count 100 -> 120" in each.getMessage()]
    assert line.levelno == logging.WARNING


def test_a_loop_of_ones_own_is_told_the_same(new_run: Runs, caplog: pytest.LogCaptureFixture) -> None:
    def train(run: Run, data: Dataset[Any], epochs: int) -> None:
        model = torch.nn.Linear(3, 1)
        run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run.restore()
        for _ in run.epochs(epochs):
            for (batch,) in run.batches(data, 4):
                run.backward(run.model(batch).square().mean())
                run.step()
            run.checkpoint()

    train(new_run(), TensorDataset(torch.randn(12, 3)), 1)
    train(new_run(), TensorDataset(torch.randn(16, 3)), 2)
    (line,) = [each for each in caplog.messages if "count 12 -> 16" in each]
    assert "a random part of other data" in line
