"""What happens to a run on a cluster when a worker, a node or a step goes wrong: it goes on, or says why not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recovery import Recovery, write

from conftest import losses, rank_pids, summary, wait_until
from ray_launching import LIMIT, OnRay, Places, assert_same_weights

pytest.importorskip("ray", reason="Ray is not installed: pip install 'lockstep-train[ray]'")

SLOW = 0.1
FSDP = {"type": "fsdp", "mesh": {"data": -1}}
Keep = Callable[[list[tuple[str, ...]]], None]


@pytest.fixture
def keep(request: pytest.FixtureRequest) -> Keep:
    """What becomes of measurements: shown, and with `make faults` written down."""

    def kept(rows: list[tuple[str, ...]]) -> None:
        print(*rows, sep="\n")
        if request.config.getoption("--whole-matrix"):
            write(rows)

    return kept


def _task(on_ray: OnRay) -> dict[str, Any]:
    return {"type": "recorder.py:Recorder", "orders": str(on_ray.orders), "sleep": SLOW}


def _steps(run: Path) -> int:
    return max(losses(run), default=0) if (run / "metrics.jsonl").exists() else 0


def _hosts(run: Path) -> dict[int, str]:
    return {each["rank"]: each["host"] for each in json.loads((run / "topology.json").read_text())["ranks"]}


@pytest.mark.long
def test_a_worker_and_then_a_node_are_lost_and_the_weights_are_the_same(
    places: Places, on_ray: OnRay, undisturbed: Path, keep: Keep
) -> None:
    settings = places.ray(placement="SPREAD")
    config = on_ray.config(task=_task(on_ray), ray=settings, launch={"max_restarts": 2})
    started = on_ray.start(config)
    run = on_ray.run_folder()
    wait_until(lambda: _steps(run) >= 6, 90, "the first checkpoint")
    worker = Recovery(on_ray, run, "SIGKILL to a worker")
    on_ray.order("kill", 1)
    worker.fault()
    worker.wait()
    wait_until(lambda: _steps(run) >= 12, 90, "the second checkpoint")
    hosts = _hosts(run)
    node = Recovery(on_ray, run, "SIGKILL to all processes of a node")
    places.kill(hosts[1])
    node.fault()
    node.wait()
    finished = started.wait(LIMIT)
    places.complete()
    assert finished.code == 0, finished.text
    headlines = [line for line in finished.err.splitlines() if " failed: " in line]
    assert len(headlines) == 2, finished.err
    assert headlines[0].startswith("lockstep: rank 1 of 2 on ") and "its process was killed or crashed" in headlines[0]
    assert f"rank 1 of 2 on {hosts[1]} failed: " in headlines[1] and "node is gone" in headlines[1]
    assert "restarting from the newest checkpoint (restart 1 of 2)" in finished.err
    assert "restarting from the newest checkpoint (restart 2 of 2)" in finished.err
    assert finished.out.count("restored step-") == 2
    assert_same_weights(run, undisturbed)
    assert losses(run) == losses(undisturbed)
    keep([worker.row("bit-identical"), node.row("bit-identical")])


@pytest.mark.long
def test_a_hang_is_found_and_the_number_of_restarts_is_kept(places: Places, on_ray: OnRay, keep: Keep) -> None:
    settings = places.ray(placement="STRICT_SPREAD")
    timeouts = {"stall": "3 s", "first_step": "60 s"}
    config = on_ray.config(task=_task(on_ray), ray=settings, launch={"max_restarts": 1}, timeouts=timeouts)
    started = on_ray.start(config)
    run = on_ray.run_folder()
    wait_until(lambda: _steps(run) >= 6, 90, "the first checkpoint")
    hang = Recovery(on_ray, run, "a worker hangs (`timeouts.stall: 3 s`)")
    on_ray.order("hang", 1)
    hang.fault()
    hang.wait()
    on_ray.order("raise", 0)
    finished = started.wait(LIMIT)
    assert finished.code == 5, finished.text
    assert "rank 1: in loss of step " in finished.err and "recorder.py:" in finished.err
    assert "rank 0 waits in gradient reduction" in finished.err
    assert "restart 1 of 1" in finished.err and "restart 2" not in finished.err
    assert f"rank 0 of 2 on {_hosts(run)[0]} failed: ValueError: this example cannot be right" in finished.err
    assert "recorder.py" in finished.err and "Traceback" in finished.err, "with the user's own frames"
    assert f"go on from the last checkpoint with: lockstep resume {run.relative_to(on_ray.folder)}" in finished.err
    assert summary(run)["status"] == "failed"
    wait_until(lambda: not places.workers(), 20, "all workers to be gone")
    keep([hang.row("-")])


@pytest.mark.long
def test_fewer_workers_where_there_is_no_room_for_all_see_every_example_once(places: Places, on_ray: OnRay) -> None:
    """Each finds its part of a model that was split over more of them."""
    processes, left = 4, 2
    resources = {"CPU": 0, "place": 4 // processes}
    settings = places.ray(placement="SPREAD", resources=resources, min_workers=left, placement_timeout="5 s")
    config = on_ray.config(
        task=_task(on_ray), ray=settings, launch={"max_restarts": 1}, train={"epochs": 2, "batch_size": 12},
        processes=processes, strategy=FSDP,
    )  # fmt: skip
    started = on_ray.start(config)
    run = on_ray.run_folder()
    wait_until(lambda: _steps(run) >= 9, 90, "the first checkpoint of the second epoch's steps")
    before = rank_pids(run)
    places.kill(_hosts(run)[0])
    finished = started.wait(LIMIT)
    places.complete()
    assert finished.code == 0, finished.text
    assert f"there is room for {left} of {processes} workers: continuing with {left}" in finished.err, finished.text
    assert summary(run)["world_size"] == left
    (restored,) = [line for line in finished.out.splitlines() if "restored step-" in line]
    step = int(restored.split("step-")[1].split()[0])
    per_epoch, everything = 7, set(_training_examples(on_ray, processes))
    seen: list[int] = []
    for pid in before.values():  # what came before the checkpoint, of the epoch that it was made in
        steps = [examples for each, _, examples in on_ray.seen() if each == pid]
        seen += [example for examples in steps[step // per_epoch * per_epoch : step] for example in examples]
    for pid in {each for each, _, _ in on_ray.seen()} - set(before.values()):
        later = [examples for each, _, examples in on_ray.seen() if each == pid]
        seen += [example for examples in later[: per_epoch - step % per_epoch] for example in examples]
    assert len(seen) == len(everything) and set(seen) == everything


def _training_examples(on_ray: OnRay, processes: int) -> list[int]:
    """Those of the first epoch, which nothing disturbed."""
    first = list(dict.fromkeys(pid for pid, _, _ in on_ray.seen()))[:processes]
    steps = {pid: [examples for each, _, examples in on_ray.seen() if each == pid][:7] for pid in first}
    return [example for each in steps.values() for examples in each for example in examples]
