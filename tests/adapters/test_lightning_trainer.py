"""What LightningModules, their data and callbacks find in their trainer: stages, states, metrics and lengths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lit_modules
import pytest
import torch
import yaml
from click.testing import CliRunner
from lit_modules import AutoEncoder, Digits
from test_lightning import by_lightning, fitted, quiet  # noqa: F401
from torch.utils.data import DataLoader, TensorDataset, random_split

import lockstep
from lockstep.cli import main

STAGED = '''
class Staged(Digits):
    """Has the data of the stages that it was set up for, and no others."""

    def setup(self, stage):
        inputs = TensorDataset(torch.randn(40, 6), torch.zeros(40).long())
        parts = random_split(inputs, [30, 10])
        if stage == "fit":
            self.train, self.val = parts
        if stage == "validate":
            self.val = parts[1]
        if stage in ("test", "predict"):
            setattr(self, stage, parts[1])

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size)

    def predict_dataloader(self):
        return DataLoader(self.predict, 4)
'''


def test_data_is_set_up_for_the_stage_that_is_about_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = Path(lit_modules.__file__).read_text() + "\n\nfrom torch.utils.data import random_split\n" + STAGED
    (tmp_path / "lit_staged.py").write_text(code)
    monkeypatch.chdir("/")
    config = {
        "task": {"type": "lockstep.adapters.lightning:Module", "module": "lit_staged.py:AutoEncoder",
                 "data": {"type": "lit_staged.py:Staged", "batch_size": 10}},
        "processes": 1, "runtime": "cpu", "train": {"epochs": 1, "batch_size": 10},
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    outcome = lockstep.train(tmp_path / "config.yaml", out=tmp_path / "runs")
    tested = outcome["metrics"]["test/loss"]
    assert tested == pytest.approx(outcome["metrics"]["val/loss"]), "the same random parts"
    folder = str(outcome["folder"])
    for data in ("test", "val"):
        result = CliRunner().invoke(main, ["evaluate", folder, "--data", data, "--json"])
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["metrics"][f"{data}/loss"] == pytest.approx(tested)
    found = str(tmp_path / "found.jsonl")
    result = CliRunner().invoke(main, ["predict", folder, "--input", "predict_dataloader", "--out", found])
    assert result.exit_code == 0, result.output
    assert len(Path(found).read_text().splitlines()) == 10


def test_stages_are_those_of_lightning(tmp_path: Path) -> None:
    stages: list[Any] = []

    class Noted(AutoEncoder):
        def setup(self, stage: str) -> None:
            stages.append(stage)

        def teardown(self, stage: str) -> None:
            stages.append(f"no {getattr(stage, 'value', stage)}")

    trainer, _ = by_lightning(Noted(), 1)
    trainer.test(Noted(), Digits(10), verbose=False)
    theirs = sorted(stages)
    stages.clear()
    fitted(Noted(), tmp_path, epochs=1)
    assert sorted(stages) == theirs and stages[:2] == ["fit", "test"]
