"""`lockstep watch`: a real run from before it began to its end, in lines and on a terminal; and runs that are gone."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from conftest import TASK_FILE, Project, wait_until
from lockstep.cli import main
from lockstep.runs import watching
from run_folders import completed, entry, lines


def watch(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["watch", *map(str, arguments)])


def test_a_run_from_its_beginning_to_its_end(project: Project) -> None:
    runs, gate = project.folder / "runs", project.folder / "gate"
    task = {"type": f"{TASK_FILE}:Tiny", "fail_at": {"how": "wait", "rank": 1, "step": 5, "until": str(gate)}}
    training = project.start("train", project.config(task=task), "--out", str(runs))
    folder = wait_until(lambda: next(runs.glob("tiny-*"), None) if runs.is_dir() else None)
    command = [sys.executable, "-m", "lockstep", "watch"]
    following = subprocess.Popen(
        [*command, folder, "--every", "0.3"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    live = wait_until(lambda: (look := watching.look(folder)).live and look.step == 5 and look, what="step 5")
    assert (live.status, live.total_steps, len(live.live.ranks)) == ("running", 14, 2)
    once = subprocess.run(
        [*command, folder.name, "--once"], cwd=project.folder, capture_output=True, text=True, timeout=60, check=True
    )
    head, _, *ranks = once.stdout.splitlines()
    assert f"{folder.name}: step 5 of 14" in head and "train/loss" in head
    assert len(ranks) == 2 and all(str(os.uname().nodename)[:8] in each for each in ranks)
    drawn = on_a_terminal(command, project.folder)
    assert "doing" in drawn and "step 5 of 14" in drawn and "train/loss" in drawn
    gate.touch()
    assert training.wait().code == 0
    said, errors = following.communicate(timeout=60)
    assert following.returncode == 0, errors
    assert said.splitlines()[-1].startswith(f"{folder.name}: completed at step 14 of 14")


def on_a_terminal(command: list[str], cwd: Path) -> str:
    """What it draws until it has drawn the ranks twice; then Ctrl-C, which it must leave at without a word."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "140", "LINES": "40"}
    process = subprocess.Popen(command, cwd=cwd, env=env, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    said, until = b"", time.monotonic() + 60
    try:
        while said.count(b"doing") < 2 and time.monotonic() < until:
            if select.select([ours], [], [], 1.0)[0]:
                said += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert (process.returncode, errors) == (0, b""), errors.decode()
    finally:
        process.kill()
        os.close(ours)
    return said.decode(errors="replace")


def running(folder: Path, at: float, **rank: Any) -> Path:
    """A run that nobody has said the end of, last heard of at a time."""
    completed(folder, count=50, ranks=2, status="running", step=None, best=None)
    lines(folder / "timeline.jsonl", entry(0, "start"), {"at": at - 100, "kind": "train", "step": 0, "until": None})
    ranks = [{"rank": 0, "host": "a", "step": 51, "doing": "loss", "waits": False, "still": 0.1, "where": "",
              "memory": 10**9, "lag": 0.0},
             {"rank": 1, "host": "b", "step": 51, "doing": "data", "waits": False, "still": 0.1, "where": "",
              "memory": None, "lag": 0.25, **rank}]  # fmt: skip
    (folder / "live.json").write_text(json.dumps({"at": at, "world_size": 2, "step": 51, "total_steps": 100,
                                                  "ranks": ranks, "latest": {}}))  # fmt: skip
    return folder


def test_time_left_who_is_behind_and_what_each_does(tmp_path: Path) -> None:
    folder = running(tmp_path / "run", time.time(), still=30.0, where="task.py:7 in loss", doing="\x1b[2Jdata")
    seen = watching.look(folder)
    assert seen.seconds_left == pytest.approx(100.0, rel=0.01)  # fifty steps in 100 s, and fifty to go
    said = watch(folder, "--once").stdout
    assert "step 51 of 100  1 min 40 s left" in said
    assert "+250 ms" in said and "1.0 GB" in said
    assert "\\x1b[2Jdata, for 30.0 s, at task.py:7 in loss" in said and "\x1b" not in said
    told = json.loads(watch(folder, "--once", "--json").stdout)
    assert watching.look_of(told) == seen or abs(told["age"] - (seen.age or 0)) < 10
    assert watching.headline(watching.look_of(told)).startswith("run: step 51 of 100")


def test_a_run_whose_process_is_gone_or_that_says_nothing(tmp_path: Path) -> None:
    folder = running(tmp_path / "run", time.time() - 30)
    seen = watching.look(folder)
    assert seen.is_stale and not seen.has_ended
    assert "nothing was heard of it for 3" in watching.headline(seen)
    (folder / ".lock").write_text("")  # let go of, or never named anybody: whoever held it is not there
    result = watch(folder, "--every", "0.1")
    assert result.exit_code == 1
    assert "lost at step 51 of 100: its process is gone" in result.stdout


def test_a_run_that_does_not_begin_and_one_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = watch("nowhere", "--wait", "0.2")
    assert result.exit_code == 2
    assert "nowhere: waiting up to 0.2 s for it to begin" in result.stderr
    assert "nowhere: the run did not begin within 0.2 s: there is no such folder" in result.stderr
    assert "there is no run in runs/" in watch().stderr
    completed(tmp_path / "runs" / "bad", status="failed", reason="ValueError: no\nmore")
    (tmp_path / "runs" / "bad" / "logs").mkdir()
    result = watch("bad")
    assert (result.exit_code, result.stdout.split("  ")[0]) == (1, "bad: failed at step 300: ValueError: no")
    assert watch("--pod", "team", "bad").exit_code == 2


def test_bars_are_drawn_between_the_least_and_the_most() -> None:
    assert watching.sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert watching.sparkline([3.0, 3.0]) == "▁▁"
    assert watching.sparkline([]) == ""


def test_of_many_ranks_those_that_are_behind_are_shown(tmp_path: Path) -> None:
    folder = running(tmp_path / "run", time.time())
    told = json.loads((folder / "live.json").read_text())
    told["ranks"] = [{"rank": each, "lag": 0.5 if each == 99 else 0.0} for each in range(128)]
    (folder / "live.json").write_text(json.dumps(told))
    live = watching.look(folder).live
    assert live is not None
    shown, more = watching.ranks_shown(live)
    assert (len(shown), more) == (16, 112)
    assert 99 in [each.rank for each in shown]
