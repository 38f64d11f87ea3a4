"""`lockstep.launch(main)`: the Run that a loop of one's own is given, on real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import bodies
import pytest

import lockstep
from conftest import ROOT, losses, steps_saved, summary

# These are about ranks, not devices: two of them must fit on any machine.
launch = partial(lockstep.launch, runtime="cpu")


@pytest.mark.requirement("X07")
def test_ranks_decide_together(tmp_path: Path) -> None:
    zero, one, two = launch(bodies.talk, processes=3, out=tmp_path)
    for name in ("agree", "agree_callable", "gather", "rendezvous", "empty", "any"):
        assert zero[name] == one[name] == two[name], name
    assert zero["agree"] == {"from": 0}
    assert zero["agree_callable"] == 100
    assert zero["gather"] == [[0, "x"], [1, "x"], [2, "x"]]
    assert zero["rendezvous"] == ["from 0", "from 1" * 2, "from 2" * 3]
    assert zero["long"] == one["long"] == [0, 5000, 10000]
    assert zero["agree_long"] == one["agree_long"] == 5000
    assert zero["any"] == [True, False]
    assert zero["failure"] == "ValueError: no such thing"
    expected = "RankZeroFailed: rank 0 failed at 'something that fails on rank 0': ValueError: no such thing"
    assert one["failure"] == two["failure"] == expected
    assert "only plain data" in zero["refused"]


def test_a_time_out_names_the_wait_and_who_did_not_arrive(tmp_path: Path) -> None:
    with pytest.raises(lockstep.WorkerFailed) as failed:
        launch(bodies.one_rank_is_missing, processes=3, out=tmp_path, timeouts={"collective": 2})
    text = str(failed.value)
    assert failed.value.exit_code == 4
    assert "'the start of the feast'" in text and "limit 2 s" in text
    assert "Did not arrive: rank 1" in text


def test_rank_0_may_work_for_longer_than_others_wait(tmp_path: Path) -> None:
    found = launch(bodies.slow_on_rank_0, processes=2, out=tmp_path, timeouts={"collective": 3})
    assert found == [[7, "x" * 2000, {"one": 1.0}]] * 2


def test_a_failure_on_one_rank_is_raised_with_its_rank(tmp_path: Path) -> None:
    with pytest.raises(lockstep.WorkerFailed) as failed:
        launch(bodies.one_rank_fails, processes=2, out=tmp_path)
    assert failed.value.rank == 1
    assert "KeyError: 'what rank 1 was looking for'" in str(failed.value)


@pytest.mark.requirement("D14")
def test_an_own_loop_is_the_same_on_one_process_and_on_two(tmp_path: Path) -> None:
    (alone,) = launch(bodies.own_loop, processes=1, out=tmp_path / "one")
    pair = launch(bodies.own_loop, processes=2, out=tmp_path / "two")
    assert [each["rank"] for each in pair] == [0, 1]
    assert pair[0]["weights"] == pair[1]["weights"]
    assert pair[0]["weights"] == pytest.approx(alone["weights"], rel=1e-5)
    assert pair[0]["measured"] == pair[1]["measured"]
    assert pair[0]["measured"]["error"] == pytest.approx(alone["measured"]["error"], rel=1e-5)
    assert alone["steps"] == pair[0]["steps"] == 10


def test_an_own_loop_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = launch(bodies.own_loop_longer, processes=2, folder=tmp_path / "whole")
    launch(bodies.own_loop, processes=2, folder=tmp_path / "run")
    assert steps_saved(tmp_path / "run") == [5, 10]
    again = launch(bodies.own_loop_longer, processes=2, folder=tmp_path / "run")
    assert [each["restored"] for each in again] == [True, True]
    assert again[0]["weights"] == whole[0]["weights"]
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_state_that_differs_by_rank_is_every_ranks_own_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    saved = launch(bodies.carries_state, processes=2, folder=run)
    assert saved == [([1.0, 2.0], 5, 5), ([2.0, 1.0], 5, 5)]
    assert launch(bodies.carries_state, processes=2, folder=run) == saved
    with pytest.raises(lockstep.ConfigError, match=r"the state of 'carried' differed on the 2 ranks .* per_rank=True"):
        launch(bodies.carries_state, processes=1, folder=run)
    (alone,) = launch(partial(bodies.carries_state, per_rank=True), processes=1, folder=run)
    assert alone == ([0.0, 0.0], 0, 5)
    assert (
        "'carried' differed on the 2 ranks that saved it, and cannot be carried over to 1: it begins anew"
        in (run / "logs" / "rank-0.log").read_text()
    )


def test_a_loop_that_does_not_restore_is_not_restarted_past_its_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, again = tmp_path / "run", {"max_restarts": 2}
    with pytest.raises(lockstep.WorkerFailed, match="ValueError: after the checkpoint"):
        launch(bodies.fails_without_restore, processes=2, folder=run, launch=again)
    log, told = (run / "logs" / "rank-0.log").read_text(), capfd.readouterr().err
    assert "launch.max_restarts is 2, but main does not call run.restore()" in log, "before anything failed"
    assert "not restarted: main does not call run.restore()" in told and "step-00000005. Call run.restore()" in told
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # by another launcher, which restarts all the same
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(lockstep.ConfigError, match=r"this is restart 1.*set step-00000005 aside\. Call run\.restore"):
        launch(bodies.fails_without_restore, folder=run)
    assert steps_saved(run) == [5]


def test_the_same_data_on_every_rank_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    kinds = ["different", "same"]
    assert launch(partial(bodies.own_data, kinds=kinds), processes=2, folder=run, log={"every": "2 steps"}) == [10, 10]
    told = [line for line in (run / "logs" / "rank-0.log").read_text().splitlines() if "every rank" in line]
    assert len(told) == 1
    assert "every rank computes the same: the first 3 losses are equal on all 2 ranks" in told[0]
    assert list(losses(run)) == [2, 4, 6, 8, 10], "rows are written as the loop goes"


def times(end: dict[str, Any]) -> dict[str, Any]:
    return {name: end[name] for name in ("seconds", "samples_per_second")}


@pytest.mark.parametrize("restores", [True, False])
def test_a_launch_that_only_evaluates_leaves_the_summary_of_the_training_alone(tmp_path: Path, restores: bool) -> None:
    run = tmp_path / "run"
    launch(bodies.own_loop, processes=1, folder=run)
    trained = {
        **summary(run),
        "metrics": {"val/error": 0.25},
        "best": {"step": 5, "mode": "min"},
        "status": "preempted",
    }
    (run / "summary.json").write_text(json.dumps(trained))
    ((step, measured),) = launch(partial(bodies.only_evaluates, restores=restores), processes=1, folder=run)
    assert (step, measured["error"] > 0) == (10 if restores else 0, True)
    assert summary(run) == trained
    launch(bodies.own_loop, processes=1, folder=run)  # nothing is left to train: it comes to its end
    assert summary(run) == {**trained, "status": "completed"} | times(summary(run))
    launch(bodies.own_loop_longer, processes=1, folder=run)
    assert (summary(run)["status"], summary(run)["step"]) == ("completed", 20)
    launch(bodies.only_evaluates, processes=1, folder=tmp_path / "new")
    assert summary(tmp_path / "new")["status"] == "completed", "a folder that said nothing yet"


def test_every_rank_starts_from_the_same_weights_and_then_draws_its_own_numbers(tmp_path: Path) -> None:
    zero, one = launch(bodies.random_numbers, processes=2, out=tmp_path, seed=7)
    assert zero["before"] == one["before"] and zero["weights"] == one["weights"]
    assert zero["after"] != one["after"]
    (alone,) = launch(bodies.random_numbers, processes=1, out=tmp_path, seed=7)
    assert alone["weights"] == zero["weights"]


def test_variables_and_threads_of_each_rank(tmp_path: Path) -> None:
    found = launch(bodies.threads_and_variables, processes=2, out=tmp_path, launch={"threads": 1})
    assert [each["RANK"] for each in found] == [each["LOCAL_RANK"] for each in found] == ["0", "1"]
    assert {each["WORLD_SIZE"] for each in found} == {"2"}
    assert {each["MASTER_ADDR"] for each in found} == {"127.0.0.1"}
    assert {each["threads"] for each in found} == {1}


def test_what_a_rank_returns_does_not_change_how_the_run_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is not taken for an exit code, and a value that cannot be sent does not train the model again."""
    again = {"max_restarts": 2}
    assert launch(bodies.seventy_five, processes=3, folder=tmp_path / "run", launch=again) == [75, None, None]
    assert summary(tmp_path / "run")["status"] == "completed"
    told = capfd.readouterr().err
    assert "restart" not in told
    assert "rank 1 returned a _thread.lock, which cannot be sent to the launcher (TypeError: cannot pickle" in told
    assert "rank 2 returned a bodies._Unknown, which cannot be sent to the launcher (ValueError: no such thing)" in told


def test_settings_are_checked_like_a_config(tmp_path: Path) -> None:
    with pytest.raises(lockstep.ConfigError, match=r"log\.evry: unknown key, did you mean every\?"):
        launch(bodies.talk, processes=2, out=tmp_path, log={"evry": "1 step"})


SCRIPT = """
import json, sys
import lockstep
sys.path.insert(0, {folder!r})
from bodies import own_loop

def main(run):
    found = own_loop(run)
    if run.is_main:
        open({out!r}, "w").write(json.dumps(found))

if __name__ == "__main__":
    lockstep.launch(main, processes=2, runtime="cpu", out={runs!r})
"""


@pytest.mark.requirement("D11")
@pytest.mark.parametrize("how", ["script", "torchrun"])
def test_one_script_runs_by_itself_and_under_torchrun(tmp_path: Path, how: str) -> None:
    script, out = tmp_path / "script.py", tmp_path / "out.json"
    script.write_text(SCRIPT.format(folder=str(ROOT / "tests" / "ranks"), out=str(out), runs=str(tmp_path / "runs")))
    command = {
        "script": [sys.executable, str(script)],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)],
    }[how]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    found = json.loads(out.read_text())
    assert found["world_size"] == 2 and found["steps"] == 10
    (run,) = (tmp_path / "runs").iterdir()  # one run folder, named once
    assert finished.stderr.count("lockstep: completed: epoch 2, step 10 in ") == 1
    assert (
        f"lockstep: run folder: {run}" in finished.stderr
        and "lockstep: train further:  lockstep resume" in finished.stderr
    )


def test_a_script_without_a_main_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import lockstep\ndef main(run): pass\nlockstep.launch(main, processes=2, runtime='cpu')\n")
    finished = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert finished.returncode != 0
    told = f"{script}:3: lockstep.launch is called at the top level of the script, which every rank imports"
    last = finished.stderr.strip().splitlines()[-1]
    assert told in last and last.endswith('Put the call under `if __name__ == "__main__":`'), "and no rank was started"


def test_the_summary_of_an_own_loop_has_its_metrics_and_its_best(tmp_path: Path) -> None:
    launch(bodies.loop_with_values, processes=2, folder=tmp_path / "run", log={"every": "1 step"})
    end = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert end["metrics"]["error"] == 2.0 and end["metrics"]["loss"] > 0 and "lr" not in end["metrics"]
    assert end["best"] == {"value": 1.0, "step": 2, "mode": "min"}
    assert (end["epoch"], end["step"]) == (2, 4)
    # Back to the best, which is the older one: what is newer is set aside before anything is saved.
    assert launch(bodies.goes_back, processes=2, folder=tmp_path / "run") == [[2, 1], [2, 1]]
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("[!.]*")) == [
        "aside-step-00000004", "best", "step-00000002",
    ]  # fmt: skip


def test_the_norm_of_gradients_is_counted_once_on_any_number_of_ranks(tmp_path: Path) -> None:
    """An epoch that is resumed on other ranks has the mean of one that was not."""
    (expected,) = lockstep.launch(bodies.clipped, processes=1, runtime="cpu", folder=tmp_path / "whole")
    lockstep.launch(partial(bodies.clipped, until=1), processes=1, runtime="cpu", folder=tmp_path / "run")
    found = lockstep.launch(bodies.clipped, processes=2, runtime="cpu", folder=tmp_path / "run")
    assert found[0]["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=1e-6)
