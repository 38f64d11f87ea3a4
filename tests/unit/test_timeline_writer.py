"""What a run leaves for whoever looks at it: written aside, bounded, and never at the cost of the run."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.distributed.activity import Activity, Beat
from lockstep.distributed.failure import Failure, Result
from lockstep.distributed.topology import Topology
from lockstep.distributed.watch.heartbeat import Heartbeat
from lockstep.distributed.watch.stall import Limits, Seen
from lockstep.engine.compile_guard import Phases
from lockstep.record import timeline as chronicles
from lockstep.record.timeline import Timeline
from lockstep.runs.records import newest_row, read_lags, read_live, read_timeline, typical_lags


def beat(step: int, busy: float | None = None, **more: Any) -> Beat:
    looks = {"host": "anna", "total_steps": 100, "busy": busy, "memory": 10**9, **more}
    return Beat(1, 1, step, "loss", False, False, 0.0, 0.5, "train.py:3", True, **looks)


def test_entries_are_lines_in_their_order_and_phases_have_an_end(tmp_path: Path) -> None:
    with chronicles.opened(tmp_path, pytest.fail) as timeline:
        timeline.note("start", world_size=2)
        with timeline.during("save", step=7):
            pass
        failure = Failure(1, "anna", "ValueError: no", 5, traceback="x" * 10_000)
        timeline.failed("restart", failure, 2, attempt=1)
        timeline.ended(Result(75), 2)
    start, save, restart, end = read_timeline(tmp_path)
    assert (start.kind, start.until, start.world_size) == ("start", None, 2)
    assert save.step == 7 and save.until is not None and save.until >= save.at
    assert (restart.rank, restart.note, restart.host) == (1, "ValueError: no", "anna") and len(restart.traceback) < 5000
    assert (end.kind, end.status) == ("end", "preempted")


def test_where_ranks_are_is_replaced_at_most_once_a_second(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path)
    for step in range(5, 50):
        timeline.show([Seen(0, beat(step, 0.02), 1.0), Seen(1, beat(4, 0.05), 0.0), Seen(2, None, 3.0)])
    timeline.close()
    live = read_live(tmp_path)
    assert live is not None and (live.step, live.total_steps, len(live.ranks)) == (5, 100, 3)
    assert live.age() < 60
    first, second, third = live.ranks
    assert (first.doing, first.host, first.memory, first.where) == ("loss", "anna", 10**9, "train.py:3")
    assert first.still == 1.5 and first.lag == 0.0 and second.lag == pytest.approx(0.03)
    assert third.doing == "" and third.lag is None and third.still == 3.0
    assert not list(tmp_path.glob("*.partial")) and not list(tmp_path.glob(".*"))


def test_lags_of_a_month_are_a_thousand_lines() -> None:
    lags = chronicles._Lags()
    written = [line for at in range(0, 30 * 86400, 20) if (line := lags.add(float(at), at, [0.1, 0.4]))]
    assert 500 < len(written) < 1500
    assert all(line["busy"] == [0.1, 0.4] for line in written)


def test_the_rest_of_the_lags_is_written_at_the_end(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path)
    for step in range(3):
        timeline.lags(step, [0.1, 0.3])
    timeline.close()
    assert typical_lags(read_lags(tmp_path)) == pytest.approx([0.0, 0.2])


@pytest.mark.parametrize("gone", ["deleted", "moved"])
def test_a_folder_that_goes_away_costs_a_warning_at_most(gone: str, tmp_path: Path) -> None:
    folder, told = tmp_path / "run", list[str]()
    folder.mkdir()
    timeline = Timeline(folder, told.append)
    folder.rmdir() if gone == "deleted" else folder.rename(tmp_path / "elsewhere")
    folder.mkdir()  # by somebody else
    timeline.note("start")
    timeline.note("end")
    timeline.close()
    assert not list(folder.iterdir()), "nothing is written to what has its name now"
    if gone == "moved":
        assert len(read_timeline(tmp_path / "elsewhere")) == 2 and not told
    else:
        assert len(told) == 1 and "The run goes on without it" in told[0]


def test_a_disk_that_does_not_answer_holds_up_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "timeline.jsonl")  # whoever opens it to write waits for a reader
    began = time.monotonic()
    timeline = Timeline(tmp_path, [].append)
    for _ in range(5000):
        timeline.note("save", step=1)
    assert time.monotonic() - began < 2.0
    timeline.close()
    assert time.monotonic() - began < 10.0
    reader = os.open(tmp_path / "timeline.jsonl", os.O_RDONLY | os.O_NONBLOCK)  # lets the thread go
    for thread in threading.enumerate():
        if thread.name == "lockstep-aside":
            thread.join(0.5)
    os.close(reader)


def test_the_newest_row_is_found_at_the_end_of_a_long_file(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert newest_row(file) == {}
    long = {"step": 3, **{f"metric-{at}": 1.0 for at in range(2000)}}
    file.write_text("".join(json.dumps({**long, "step": step}) + "\n" for step in range(50)) + '{"st', encoding="utf-8")
    assert newest_row(file)["step"] == 49
    file.write_text('{"step": 1}\n', encoding="utf-8")
    assert newest_row(file) == {"step": 1}


def test_a_process_on_its_own_shows_where_it_is_too() -> None:
    activity, seen = Activity(), list[list[Seen]]()
    heartbeat = Heartbeat(None, Topology(), activity, Limits(0.8, 0.8))
    heartbeat.show, heartbeat.reports_resident_memory = seen.append, True
    heartbeat.start()
    activity.enter("loss", step=3)
    deadline = time.monotonic() + 20
    while not seen and time.monotonic() < deadline:
        time.sleep(0.05)
    heartbeat.stop()
    assert seen and seen[0][0].beat is not None
    assert (seen[0][0].beat.doing, seen[0][0].beat.step) == ("loss", 3) and seen[0][0].beat.memory


def test_a_first_step_that_is_compiled_is_a_phase_of_its_own(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path)
    phases = Phases(timeline)
    assert not phases.at(5, compiles=True) and not phases.at(5, compiles=True) and phases.at(6, compiles=True)
    assert Phases(timeline).at(0, compiles=False)
    timeline.close()
    assert [(each.kind, each.step) for each in read_timeline(tmp_path)] == [("train", 5), ("compile", 6), ("train", 0)]


def test_what_is_no_beat_is_none() -> None:
    whole = json.loads(beat(3, 0.5).encode())
    assert Beat.decode(json.dumps(whole).encode()) == beat(3, 0.5)
    for name, value in (("host", 3), ("total_steps", -1), ("total_steps", 1.5), ("busy", "x"), ("memory", True)):
        assert Beat.decode(json.dumps({**whole, name: value}).encode()) is None
