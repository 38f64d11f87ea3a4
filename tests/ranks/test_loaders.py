"""DataLoaders on several ranks: what plain PyTorch computes with them on one process."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import loader_tasks
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import lockstep
from lockstep.cli import main
from lockstep.runtime.base import seed_generators
from lockstep.runtime.cpu import CpuRuntime


def trained(folder: Path, task: str, processes: int) -> dict[str, Any]:
    return lockstep.train(
        task=f"{loader_tasks.__file__}:{task}", processes=processes, runtime="cpu", out=folder,
        train={"epochs": 2, "batch_size": 16},
    )  # fmt: skip


def test_a_task_with_loaders_is_one_with_datasets(tmp_path: Path) -> None:
    datasets, loaders = trained(tmp_path, "WithDatasets", 1), trained(tmp_path, "WithLoaders", 2)
    assert loaders["metrics"] == pytest.approx(datasets["metrics"], rel=1e-5)
    result = CliRunner().invoke(main, ["evaluate", str(loaders["folder"]), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["metrics"]["val/loss"] == pytest.approx(datasets["metrics"]["val/loss"], rel=1e-5)
    split = lockstep.train(
        task=f"{loader_tasks.__file__}:OnlyTraining", processes=1, runtime="cpu", out=tmp_path,
        train={"epochs": 1, "batch_size": 16}, data={"split": {"train": 0.8, "val": 0.2}},
    )  # fmt: skip
    result = CliRunner().invoke(main, ["evaluate", str(split["folder"]), "--json"])
    assert json.loads(result.stdout)["metrics"]["val/loss"] == pytest.approx(split["metrics"]["val/loss"], rel=1e-5)
    out = tmp_path / "found.parquet"
    result = CliRunner().invoke(main, ["predict", str(loaders["folder"]), "--data", "train", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert pq.read_table(out).num_rows == 90


def test_a_loop_over_a_loader_is_that_of_plain_torch_also_resumed_on_other_ranks(tmp_path: Path) -> None:
    seed_generators(CpuRuntime(), 0)
    model = loader_tasks.WithDatasets().model()
    expected = loader_tasks.plain_loop(model)
    whole = lockstep.launch(loader_tasks.loop, processes=1, runtime="cpu", folder=tmp_path / "whole")
    assert whole[0] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    for processes, until in ((3, 5), (2, 9), (1, 12)):
        main = partial(loader_tasks.loop, until=until)
        found = lockstep.launch(main, processes=processes, runtime="cpu", folder=tmp_path / "parts")
    assert found[0] == pytest.approx(expected, rel=1e-4, abs=1e-5)
