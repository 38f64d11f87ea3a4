"""When a rank fails, the user reads one headline with the cause, everything ends in seconds, and nothing is lost."""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import TASK_FILE, Project, losses, steps_saved, summary

TINY = f"{TASK_FILE}:Tiny"


def failing(project: Project, how: str, rank: int, step: int, **values: Any) -> tuple[int, str, Path]:
    task = {"type": TINY, "fail_at": {"rank": rank, "step": step, "how": how}}
    began = time.monotonic()
    finished = project.run("train", project.config(**{"task": task, "checkpoint": {"every": "2 steps"}, **values}))
    assert time.monotonic() - began < 60
    return finished.code, finished.err, project.only_run()


@pytest.mark.requirement("D18")
def test_an_exception_on_one_rank_is_the_headline(project: Project) -> None:
    code, err, run = failing(project, "exception", rank=1, step=5)
    assert code == 5
    headline = next(line for line in err.splitlines() if "failed" in line)
    assert (
        headline == f"lockstep: rank 1 of 2 on {socket.gethostname()} failed: ValueError: this example cannot be right"
    )
    assert err.count("Traceback") == 1, "one traceback, the user's"
    assert 'tasks.py", line' in err and "_misbehave" in err
    assert "src/lockstep/train" not in err, "how we got there is of no use to the user"
    assert "rank 0: " in err, "the others are folded into a line"
    assert "logs/rank-1.log" in err
    assert steps_saved(run) == [2, 4]
    assert summary(run)["status"] == "failed"
    assert "this example cannot be right" in (run / "logs" / "rank-1.log").read_text()


def test_a_loss_that_is_not_a_number_stops_with_step_and_rank(project: Project) -> None:
    code, err, run = failing(
        project, "nan", rank=1, step=5, log={"every": "100 steps"}, checkpoint={"every": "2 steps"}
    )
    assert code == 5
    assert "the loss is nan at step 5 on rank 1" in err
    assert "Traceback" not in err
    assert steps_saved(run) == [2, 4], "the last good checkpoint stays, and none was written after"
    resumed = project.run("resume", run)
    assert "restored step-00000004" in resumed.out
    assert "the loss is nan at step 9 on rank 1" in resumed.err, "the fifth step of the resumed run, by its own number"


GREEDY = """
import ctypes


class Greedy:
    def start(self, about): pass

    def log(self, step, values):
        if step >= 4:
            ctypes.PyDLL(None).sleep(60)  # as native code does that does not release Python's lock

    def finish(self, status): pass
"""


def test_a_logger_that_holds_pythons_lock_is_in_the_stacks_of_rank_0(project: Project) -> None:
    (project.folder / "greedy.py").write_text(GREEDY)
    finished = project.run("train", project.config(
        task={"type": TINY, "sleep": 0.05}, log={"every": "1 step", "mine": {"type": "greedy.py:Greedy"}},
        timeouts={"stall": "3 s", "first_step": "3 s"},
    ))  # fmt: skip
    assert finished.code == 4, finished.text
    assert "rank 0: no sign of life since" in finished.err
    assert "The stacks of all threads are in the ranks' logs" in finished.err
    log = (project.only_run() / "logs" / "rank-0.log").read_text()
    assert re.search(r'greedy\.py", line \d+ in log\n(.*\n)*?.*loggers\.py", line \d+ in _work', log), log


def test_diverging_again_is_not_worth_a_restart(project: Project) -> None:
    code, err, _ = failing(project, "nan", rank=0, step=3, launch={"max_restarts": 3})
    assert code == 5
    assert "restarting" not in err


@pytest.mark.parametrize(
    ("strategy", "what"),
    [
        ("ddp", "the gradients of step 3"),
        pytest.param(
            "fsdp",
            "the parameters of the model of step 3",
            marks=pytest.mark.long,
            id="fsdp",
        ),
    ],
)
def test_a_rank_that_never_arrives_is_named_in_time(project: Project, strategy: Any, what: str) -> None:
    """Rank 1 hangs in its task; rank 0 waits for it, and says so when timeouts.collective is over."""
    limits = {"timeouts": {"collective": "4 s"}, "train": {"steps": 6, "batch_size": 12}}
    code, err, _ = failing(project, "hang", rank=1, step=3, strategy=strategy, **limits)
    assert code == 4
    assert f"{what} did not come together within 4 s: a rank did not take part" in err
    assert "Last heard of: rank 1 in loss of step 3" in err
    assert "Traceback" not in err


@pytest.mark.requirement("D13")
def test_a_port_in_use_is_named_with_the_remedy(project: Project) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finished = project.run("train", project.config(launch={"port": port}))
    assert finished.code == 2
    assert f"launch.port: port {port} is already in use" in finished.err
    assert "a free one is picked" in finished.err
    assert "Traceback" not in finished.err


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"type": f"{TASK_FILE}:NoLoss"}, "does not define loss(self, model"),
        ({"type": f"{TASK_FILE}:Empty"}, "train_data() is a dataset of length 0"),
        ({"type": TINY, "exampels": 3}, "task.exampels: Tiny has no such argument"),
        ({"type": "yaml:YAMLError"}, "is not a class derived from lockstep.Task"),
    ],
    ids=["no loss", "no data", "wrong argument", "not a task"],
)
def test_a_task_that_cannot_work_is_a_config_error(project: Project, task: dict[str, Any], message: str) -> None:
    finished = project.run("train", project.config(task=task, data={}))
    assert finished.code == 2, finished.text
    assert message in finished.err
    assert "Traceback" not in finished.err
    assert finished.err.count(message) == 1, "said once, not by every rank"


def test_a_dataset_smaller_than_a_batch(project: Project) -> None:
    small = {"task": {"type": TINY, "examples": 10}, "train": {"epochs": 2, "batch_size": 12}, "data": {}}
    run = project.train(**small)
    assert list(losses(run)) == [1, 2], "one short batch per epoch"
    finished = project.run("train", project.config(**{**small, "data": {"drop_last": True}}))
    assert finished.code == 2
    assert "10 examples, fewer than one batch of 12" in finished.err


def test_damaged_checkpoints_are_passed_over_by_name(project: Project) -> None:
    values: dict[str, Any] = {
        "train": {"epochs": 2, "batch_size": 12},
        "checkpoint": {"every": "3 steps", "keep": {"last": 5}},
    }
    reference = project.train(out="reference", **values)
    run = project.train(out="damaged", **values)
    newest, second = sorted((run / "checkpoints").glob("step-*"), reverse=True)[:2]
    weights = newest / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    state = bytearray((second / "state.safetensors").read_bytes())
    state[len(state) // 2] ^= 1
    (second / "state.safetensors").write_bytes(state)
    resumed = project.run("resume", run)
    assert resumed.code == 0, resumed.text
    assert f"checkpoint {newest.name} is damaged and is passed over: model.safetensors has" in resumed.out
    damaged = rf"checkpoint {second.name} is damaged and is passed over: .*state\.safetensors does not match"
    assert re.search(damaged, resumed.out)  # ranks divide the digests between them: any of them may find it
    assert losses(run) == losses(reference)
    manifest = json.loads((newest / "manifest.json").read_text())
    assert manifest["step"] == 14


def test_resume_with_a_changed_config(project: Project) -> None:
    run = project.train()
    refused = project.run(
        "resume", run, "--set", "train.batch_size=24", "--set", "seed=1", "--set", "log.every=2 steps"
    )
    assert refused.code == 2
    assert "train.batch_size: 12 -> 24" in refused.err and "seed: 0 -> 1" in refused.err
    assert "log.every" not in refused.err, "only what would be wrong is held against the user"
    allowed = project.run("resume", run, "--set", "log.every=2 steps", "--set", "train.epochs=3")
    assert allowed.code == 0, allowed.text
    assert "changed: log.every: '1 step' -> '2 steps'" in allowed.err
    assert "changed: train.epochs: 2 -> 3" in allowed.err


def test_two_runs_cannot_work_in_one_folder(project: Project) -> None:
    run = project.train()
    long = {"task.sleep": 0.2, "train.epochs": 50}
    first = project.start("resume", run, "--set", f"train.epochs={long['train.epochs']}")
    deadline = time.monotonic() + 30
    while "run folder" not in (project.folder / ".stderr").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    second = Project(project.folder / "elsewhere")
    second.folder.mkdir()
    finished = second.run("resume", run)
    assert finished.code == 2
    assert "another run is at work in this folder" in finished.err
    first.process.terminate()
    assert first.wait().code in (0, 75)
