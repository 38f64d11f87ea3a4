"""All ranks agree, or the run says why: real processes that decide together, and some that do not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import bodies
import pytest

import lockstep
from conftest import ROOT, rows, steps_saved

launch = partial(lockstep.launch, runtime="cpu")


def with_these_modules() -> dict[str, str]:
    """An environment in which a script finds the package and what stands beside this file."""
    folders = [str(ROOT / "src"), str(ROOT / "tests" / "ranks"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folder for folder in folders if folder)}


@pytest.mark.requirement("X12")
def test_nobody_is_connected_to_everybody(tmp_path: Path) -> None:
    """In a ring every rank has two neighbours, in a tree log2(N), in two groups: where asked, or beyond one host."""
    file = tmp_path / "script.py"
    file.write_text(
        "import lockstep, bodies\n"
        "if __name__ == '__main__':\n"
        "    print([lockstep.launch(bodies.connections, processes=n, runtime='cpu', out=str(n)) for n in (3, 7)])\n"
    )
    environment = {**with_these_modules(), "TORCH_GLOO_LAZY_INIT": "1"}
    command = [sys.executable, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path)
    few, many = json.loads(done.stdout.splitlines()[-1])
    assert max(many) <= max(few) + 3
    assert max(many) < 2 * 6 + 2, "which is what a connection between every two ranks would make"


@pytest.mark.requirement("R04")
def test_collectives_that_silently_do_nothing_are_found_out(tmp_path: Path) -> None:
    """A subprocess: the backend that it registers with torch must not stay in this one."""
    script = (
        f"import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}]\n"
        "import lockstep, silent_backend\n"
        "if __name__ == '__main__':\n"
        f"    try: lockstep.launch(silent_backend.main, processes=2, runtime='cpu', out={str(tmp_path)!r})\n"
        "    except lockstep.WorkerFailed as error: print(error.exit_code, error)\n"
    )
    file = tmp_path / "script.py"
    file.write_text(script)
    environment = with_these_modules()
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout.startswith("3 the fake data plane does not reduce over the 2 ranks of this run"), done
    assert "rank 0 received nothing from rank 1; rank 1 received nothing from rank 0" in done.stdout
    assert "Every rank would train a model of its own" in done.stdout


@pytest.mark.requirement("R06")
def test_the_roll_call_is_written_down(tmp_path: Path) -> None:
    launch(bodies.seventy_five, processes=3, folder=tmp_path / "run")
    found = json.loads((tmp_path / "run" / "topology.json").read_text())
    assert found["world_size"] == 3
    assert [each["rank"] for each in found["ranks"]] == [0, 1, 2]
    assert len({each["physical_device"] for each in found["ranks"]}) == 3
    assert len({(each["config"], each["source"], each["torch"], each["python"]) for each in found["ranks"]}) == 1
    log = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert "roll call: all 3 ranks are here" in log
    assert all(each["physical_device"] in log for each in found["ranks"])


@pytest.mark.requirement("X07")
def test_a_rendezvous_of_some_ranks_is_refused() -> None:
    from lockstep.distributed.group import Group

    with pytest.raises(ValueError, match=r"ranks=\[0\] is not all of the 2 ranks"):
        Group(0, 2, 1.0).rendezvous("half", b"", ranks=[0])
    assert Group(0, 1, 1.0).rendezvous("all", b"x", ranks=[0]) == [b"x"]


@pytest.mark.requirement("D18")
def test_a_rank_that_stops_training_stops_it_on_all_ranks_at_the_same_step(tmp_path: Path) -> None:
    zero, one, two = launch(bodies.rank_1_stops_training, processes=3, folder=tmp_path / "run")
    assert zero == one == two
    assert zero["stopped"] == "pruned on rank 1"
    assert 7 <= zero["step"] < 300
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("stopped early", "pruned on rank 1")


def test_a_step_that_is_skipped_is_skipped_by_all_ranks(tmp_path: Path) -> None:
    zero, one = launch(bodies.skipping_nan, processes=2, folder=tmp_path / "run", log={"every": "1 step"})
    assert zero == one
    weights = zero["weights"]
    assert weights[2] == weights[1] != weights[0], "step 3 left the weights as they were"
    assert weights[3] != weights[2] and zero["steps"] == 5
    skipped = [row["step"] for row in rows(tmp_path / "run") if "skipped_steps" in row]
    assert skipped == [3]
    assert "step 3: the gradients are not finite" in (tmp_path / "run" / "logs" / "rank-1.log").read_text()


def test_nothing_but_skipped_steps_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(lockstep.WorkerFailed, match="of 100 steps in a row, up to step 100, were not finite"):
        launch(bodies.always_nan, processes=2, out=tmp_path)


def test_replicas_that_drift_apart_are_named_with_the_parameter(tmp_path: Path) -> None:
    with pytest.raises(lockstep.WorkerFailed) as failed:
        launch(bodies.replicas_that_drift_apart, processes=3, out=tmp_path, watch={"fingerprint_every": 2}, seed=1)
    text = str(failed.value)
    assert failed.value.exit_code == 5
    assert "not equal any more at step 6: '1.weight' differs on rank 2 from the others" in text
    assert text.count("not equal any more") == 1, "said once, not by every rank"


# The classic mistakes: the user is told


def test_validating_through_the_wrapper_on_rank_0_only(tmp_path: Path) -> None:
    assert launch(bodies.validating_through_the_wrapper_on_rank_0, processes=2, folder=tmp_path / "run") == [10, 10]
    log = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert log.count("called through its DDP wrapper without gradients") == 1
    assert "Evaluate with run.module" in log


def test_saving_on_rank_0_with_a_barrier_elsewhere(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(lockstep.WorkerFailed) as failed:
        launch(bodies.saving_on_rank_0_with_a_barrier_elsewhere, processes=2, out=tmp_path)
    text = str(failed.value)
    assert "the ranks are not in step: rank 0 at 'metrics of step 5'; rank 1 at 'rank 0 has saved'" in text
    assert "a save, a barrier or a decision on rank 0 only" in text
    assert time.monotonic() - began < 30, "at once, not after a time-out"


def test_ranks_with_different_numbers_of_batches(tmp_path: Path) -> None:
    with pytest.raises(lockstep.WorkerFailed) as failed:
        launch(bodies.different_numbers_of_batches, processes=2, folder=tmp_path / "run", timeouts={"stall": 3})
    text = str(failed.value)
    assert failed.value.exit_code == 4
    assert "the ranks wait for different things" in text
    assert "rank 0 waits in 'metrics of step 5'; rank 1 waits in gradient reduction of step 6" in text
    assert "ranks with different numbers of batches" in text
    stacks = [(tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    assert all("most recent call first" in each for each in stacks)
    assert "in different_numbers_of_batches" in stacks[1]


# What is slow and not stuck, and what is behind a rank that does not leave


def test_saves_that_take_long_are_not_a_stall(tmp_path: Path) -> None:
    slow = {"checkpoint": {"async": False}, "timeouts": {"checkpoint": 60, "stall": 2, "first_step": 2}}
    assert launch(bodies.slow_synchronous_saves, processes=2, out=tmp_path, **slow) == [10, 10]


def test_user_code_that_takes_long_is_ended_only_where_a_rank_waits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, timeouts = tmp_path / "run", {"stall": 4, "first_step": 4}
    assert launch(bodies.slow_in_user_code, processes=2, folder=run, timeouts=timeouts) == [25, 25]
    told = capfd.readouterr().err
    assert "No rank waits for another, so the run continues" in told
    assert re.search(r"rank [01]: in loss of step 2, bodies\.py:", told)  # both, where they came to it at one time
    assert " s for rank 1 (in loss of step 4, bodies.py:" in told
    assert len(steps_saved(run)) == 1, "a save was requested while rank 0 waited"


def test_an_error_is_told_also_where_its_rank_cannot_leave(tmp_path: Path) -> None:
    with pytest.raises(lockstep.WorkerFailed) as failed:
        launch(bodies.fails_and_cannot_leave, processes=2, out=tmp_path, timeouts={"stall": 2, "first_step": 2})
    assert "rank 1 of 2" in str(failed.value) and "ValueError: the real reason" in str(failed.value)


SCRIPT = """
import sys, time, lockstep, bodies
def hang(run):
    model = bodies.nn.Linear(4, 1)
    run.setup(model, bodies.torch.optim.SGD(model.parameters(), lr=0.05))
    bodies.train_one_epoch(run)
    if run.rank == 1:
        while True: time.sleep(0.1)
    run.barrier("after the loop")
if __name__ == "__main__":
    for part in sys.argv[2:]:
        if part == "talk":
            print(lockstep.launch(bodies.seventy_five, runtime="cpu", out=sys.argv[1]))
        else:
            lockstep.launch(hang, runtime="cpu", out=sys.argv[1], timeouts={"stall": 3, "first_step": 3})
"""


def test_one_script_launches_twice_and_is_watched_under_torchrun(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    environment = with_these_modules()
    start = ["torch.distributed.run", "--nproc-per-node", "2", "--rdzv-id", "lockstep"]
    command = [sys.executable, "-m", *start, str(file), str(tmp_path), "talk", "talk", "hang"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env={**environment, "GLOO_SOCKET_IFNAME": "lo"}
    )
    assert done.stdout.count("[75]") >= 2, done
    assert done.returncode != 0
    assert "rank 1: in " in done.stderr and "script.py:" in done.stderr, done.stderr
