"""`lockstep train --sweep`: trials over config paths, on a cluster of our own."""

from __future__ import annotations

import json
import re

import psutil
import pytest
import yaml
from click.testing import CliRunner

from conftest import ROOT, summary
from lockstep.cli import main
from lockstep.config.load import load, parse_yaml
from lockstep.config.sweep import Sweep
from ray_launching import LIMIT, OnRay

pytest.importorskip("ray", reason="Ray is not installed: pip install 'lockstep-train[ray]'")

from lockstep.record.trials import Trial, best_of, table

SWEEP = {"metric": "val/loss", "space": {"optimizer.lr": {"grid": [0.3, 1e-6]}}, "prune": {"grace": 1, "reduction": 2}}


@pytest.mark.long
@pytest.mark.requirement("D18")
def test_a_sweep_prunes_the_worse_trial_with_all_its_ranks_and_keeps_the_best(on_ray: OnRay) -> None:
    (on_ray.folder / "sweep.yaml").write_text(yaml.safe_dump(SWEEP))
    # Slow enough that a trial that is pruned after its first epoch is far from its end.
    task = {"type": "recorder.py:Recorder", "orders": str(on_ray.orders), "sleep": 0.1}
    config = on_ray.config(task=task, train={"epochs": 5, "batch_size": 12})
    finished = on_ray.start(config, "--sweep", "sweep.yaml").wait(2 * LIMIT)
    assert finished.code == 0, finished.text
    (folder,) = (on_ray.folder / "runs").iterdir()
    first, second = json.loads((folder / "sweep.json").read_text())
    assert (first["status"], first["epoch"]) == ("completed", 5)
    assert second["status"] == "pruned" and second["epoch"] < 5
    assert summary(folder / "trial-00001")["status"] == "pruned"
    seen = on_ray.seen()
    trained = {pid for pid, _, _ in seen}
    assert len(trained) == 4, "two ranks in each of two trials"
    assert not [pid for pid in trained if psutil.pid_exists(pid)], "no rank is left"
    assert load(folder / "best.yaml").optimizer.arguments["lr"] == 0.3  # type: ignore[union-attr]
    assert "best: trial 0, val/loss " in finished.err and "optimizer.lr=0.3" in finished.err
    assert "trial  optimizer.lr  epoch  val/loss  status" in finished.err
    assert "Traceback" not in finished.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"space": {"optimizer.lr": {"grid": []}}}, "space.optimizer.lr.grid: list should have at least 1 item"),
        ({"space": {"train.batchsize": {"choice": [8]}}}, "train.batchsize: unknown key, did you mean batch_size?"),
        ({"space": {"train.clip_norm": {"uniform": [2, 1]}}}, "the first number must be less than the second"),
        (
            {"space": {"train.clip_norm": {"uniform": [-1, 1]}}},
            "train.clip_norm: input should be greater than 0, got -1",
        ),
        ({"space": {"optimizer.lr": {"loguniform": [0, 1]}}}, "both numbers must be greater than 0"),
        ({"space": {"optimizer.lr": {"grid": [1], "choice": [1]}}}, "give one of grid, choice"),
        ({"space": {"launch.port": {"choice": [1]}}}, "all trials of a sweep run alike"),
        ({"metrics": "val/loss"}, "metrics: unknown key, did you mean metric?"),
    ],
)
def test_a_sweep_that_cannot_be(on_ray: OnRay, change: dict[str, object], message: str) -> None:
    file = on_ray.folder / "sweep.yaml"
    file.write_text(yaml.safe_dump({**SWEEP, **change}))
    result = CliRunner().invoke(main, ["train", str(on_ray.config()), "--sweep", str(file), "--dry-run"])
    assert result.exit_code == 2, result.output
    assert message in result.output and "sweep.yaml:" in result.output


def test_the_sweep_of_the_documentation_is_one(on_ray: OnRay) -> None:
    page = (ROOT / "docs" / "ray-cluster.md").read_text()
    (text,) = [block for block in re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S) if "space:" in block]
    assert Sweep.model_validate(parse_yaml(text)).prune is not None


def test_the_best_trial_is_one_that_was_trained_to_its_end() -> None:
    sweep = Sweep.model_validate({"space": {"seed": {"grid": [1, 2]}}, "mode": "max", "metric": "val/accuracy"})
    trials = [
        Trial(0, {"seed": 1}, "completed", 4, 0.8),
        Trial(1, {"seed": 2}, "stopped early", 3, 0.9),
        Trial(2, {"seed": 3}, "pruned", 1, 0.95),
        Trial(3, {"seed": 4}, "failed", None, None, "rank 1 failed"),
        Trial(4, {"seed": 5}, "completed", 4, float("nan")),
    ]
    assert best_of(trials, sweep) == trials[1]
    assert best_of(trials[2:4], sweep) is None
    lines = table(trials, sweep)
    assert lines[0].split() == ["trial", "seed", "epoch", "val/accuracy", "status"]
    assert lines[4].split() == ["3", "4", "failed:", "rank", "1", "failed"]
