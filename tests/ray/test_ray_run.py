"""The Run on Ray's workers: the same answer as elsewhere, and after failures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import Project, summary
from ray_cluster import Fit, Nodes, make_fit, notes

pytest.importorskip("ray", reason="Ray is not installed: pip install 'lockstep-train[ray]'")

import ray_bodies as bodies

from lockstep.config.load import load

EVERY_STEP = {"checkpoint": {"every": "1 step", "keep": {"last": 3}}, "log": {"every": "1 step"}}


def newest(folder: Path) -> Path:
    return sorted((folder / "checkpoints").glob("step-*"))[-1]


def weights(folder: Path) -> bytes:
    return (newest(folder) / "model.safetensors").read_bytes()


def train(fit: Fit, folder: Path, name: str, workers: int = 2, max_failures: int = 0, **disturbance: Any) -> Any:
    """Run the loop of ray_bodies.py in a folder of its own: Ray's Result."""
    (folder / name).mkdir(exist_ok=True)
    # Short where a rank hangs; elsewhere a busy machine must not be taken for one.
    timeouts = {"timeouts": {"stall": "4s", "first_step": "60s"}} if disturbance.get("disturb") == "hang" else {}
    return fit(
        bodies.own_loop,
        workers=workers,
        name=f"ray-{name}-{workers}",
        loop_config={"notes": str(folder / name), **disturbance},
        max_failures=max_failures,
        folder=str(folder / name / "run"),
        settings={**EVERY_STEP, **timeouts},
        report_every_s=0,
    )


@pytest.fixture(scope="module")
def calm(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder and the result of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("calm")
    return folder / "calm", train(make_fit(folder), folder, "calm")


def test_metrics_and_the_checkpoint_reach_ray(calm: tuple[Path, Any]) -> None:
    folder, result = calm
    assert result.metrics["step"] == 15 and result.metrics["epoch"] == 3
    assert result.metrics["status"] == "completed" and result.metrics["loss"] > 0
    reported = Path(result.checkpoint.path)
    assert (reported / "model.safetensors").read_bytes() == weights(folder / "run")
    assert json.loads((reported / "manifest.json").read_text())["step"] == 15
    assert summary(folder / "run")["status"] == "completed"
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 16))


def test_a_killed_worker_is_replaced_and_the_weights_are_those_of_an_undisturbed_run(
    fit: Fit, tmp_path: Path, calm: tuple[Path, Any]
) -> None:
    result = train(fit, tmp_path, "killed", max_failures=1, disturb="kill", at=[1, 7])
    starts = [each for each in notes(tmp_path / "killed")[0] if "start" in each]
    assert len(starts) == 2 and starts[0]["start"] == 0
    assert 5 <= starts[1]["start"] <= 7 and starts[1]["restored"]
    assert weights(tmp_path / "killed" / "run") == weights(calm[0] / "run")
    assert result.metrics["step"] == 15


@pytest.mark.long
def test_a_worker_that_hangs_is_ended_by_the_watch_and_the_run_goes_on(
    fit: Fit, tmp_path: Path, calm: tuple[Path, Any]
) -> None:
    train(fit, tmp_path, "stuck", max_failures=1, disturb="hang", at=[0, 6])
    starts = [each for each in notes(tmp_path / "stuck")[1] if "start" in each]
    assert len(starts) == 2
    assert weights(tmp_path / "stuck" / "run") == weights(calm[0] / "run")
    assert "bodies.py" in (tmp_path / "stuck" / "run" / "logs" / "rank-0.log").read_text()


@pytest.mark.long
def test_a_run_that_was_asked_to_leave_goes_on_with_more_workers_and_sees_every_example_once(
    fit: Fit, tmp_path: Path
) -> None:
    train(fit, tmp_path, "elastic", disturb="leave", at=[1, 7])
    folder = tmp_path / "elastic"
    assert summary(folder / "run")["status"] == "preempted"
    left = json.loads((newest(folder / "run") / "manifest.json").read_text())["step"]
    assert 7 <= left < 15
    train(fit, tmp_path, "elastic", workers=3)
    assert summary(folder / "run")["status"] == "completed"
    found = notes(folder)
    assert [each["world"] for each in found[0] if "start" in each] == [2, 3]
    steps: dict[int, list[int]] = {}
    for rank in found:
        for each in found[rank]:
            if "step" in each:
                steps.setdefault(each["step"], []).extend(each["examples"])
    assert sorted(steps) == list(range(1, 16))
    for epoch in range(3):
        seen = [number for step in range(epoch * 5 + 1, epoch * 5 + 6) for number in steps[step]]
        assert sorted(seen) == list(range(bodies.EXAMPLES))


@pytest.mark.long
def test_a_config_trains_as_with_the_local_launcher(fit: Fit, tmp_path: Path, project: Project) -> None:
    local = project.train(data={"split": {"train": 0.8, "val": 0.2}})
    config = load(project.config(data={"split": {"train": 0.8, "val": 0.2}}))
    result = fit(bodies.task, loop_config={"config": config.plain()}, settings=config, folder=str(tmp_path / "on-ray"))
    assert weights(tmp_path / "on-ray") == weights(local)
    assert summary(tmp_path / "on-ray")["metrics"] == summary(local)["metrics"]
    assert result.metrics["val/loss"] == summary(local)["metrics"]["val/loss"]


@pytest.mark.long
def test_workers_on_several_nodes_know_their_places(fit: Fit, nodes: Nodes, tmp_path: Path) -> None:
    """Two on one node and one on another: a world that is not the same on every host."""
    added = [nodes.add(spread=2), nodes.add(spread=1)]
    try:
        scaling = {"resources_per_worker": {"CPU": 1, "spread": 1}}
        fit(bodies.look, workers=3, scaling=scaling, loop_config={"notes": str(tmp_path)})
    finally:
        for node in added:
            nodes.cluster.remove_node(node)
    found = [notes(tmp_path)[rank][0] for rank in range(3)]
    assert [each["rank"] for each in found] == [0, 1, 2]
    assert {each["world"] for each in found} == {3} and {each["sum"] for each in found} == {6}
    assert sorted(map(tuple, (each["local"] for each in found))) == [(0, 1), (0, 2), (1, 2)]
    assert {each["host"][1] for each in found} == {2} and {each["host"][0] for each in found} == {0, 1}
    assert {each["folder"] for each in found} == {str(tmp_path / "run" / "lockstep")}
    assert all(each["same"] and each["backend"] == "gloo" and each["device"] == "cpu" for each in found)
