"""A step that is compiled again after warm-up is told with what changed, and ended where the config says so."""

from __future__ import annotations

from typing import Any

import pytest
from xla_ways import needs_torch_xla, on_xla

from conftest import Project

pytestmark = needs_torch_xla

TASK = """
import torch
import lockstep
from torch import nn
from torch.utils.data import TensorDataset


class Restless(lockstep.Task):
    def __init__(self, how="value"):
        self.how, self.fetched, self.computed = how, 0, 0

    def model(self):
        return nn.Linear(8, 1)

    def train_data(self):
        return TensorDataset(torch.randn(256, 8))

    def collate(self, examples):
        rows = torch.stack([row for row, in examples])
        self.fetched += 1
        return rows[: 8 - self.fetched // 8] if self.how == "shape" else rows

    def loss(self, model, batch):
        self.computed += 1
        width = 8 - (min(7, max(0, self.computed - 8)) if self.how == "value" else 0)
        return model(batch).square().mean() + batch[:, :width].mean()
"""


@pytest.fixture
def restless(project: Project) -> Project:
    (project.folder / "restless.py").write_text(TASK)
    return project


def settings(how: str, **xla: Any) -> dict[str, Any]:
    task = {"type": "restless.py:Restless", "how": how}
    return {
        **on_xla("single", **xla),
        "task": task,
        "train": {"steps": 20, "batch_size": 8},
        "data": {"shuffle": False},
    }


@pytest.mark.requirement("P08")
def test_an_input_that_changes_its_shape_is_named_with_both_shapes(restless: Project) -> None:
    run = restless.train(**settings("shape"))
    log = (run / "logs" / "rank-0.log").read_text()
    assert "was compiled anew" in log
    assert "batch was float32[" in log and "and is float32[" in log


def test_a_python_value_in_the_step_is_named_with_its_line(restless: Project) -> None:
    run = restless.train(**settings("value"))
    log = (run / "logs" / "rank-0.log").read_text()
    assert "no input changed its shape, so a Python value became part of the program" in log
    assert "what the loss is computed by did" in log
    assert "loss@restless.py:" in log


def test_too_many_end_the_run_with_the_number_and_the_remedy(restless: Project) -> None:
    finished = restless.run("train", restless.config(**settings("value", max_recompiles=2)))
    assert finished.code == 5, finished.text
    assert "xla.max_recompiles is 2" in finished.err
    assert "Traceback" not in finished.err
