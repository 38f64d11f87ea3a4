"""What rank 0 prints where its output goes to a pipe."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest

from lockstep.record import logs
from lockstep.record.display import Display
from lockstep.record.logs import rank_log
from lockstep.terminal import standard_error

logger = logging.getLogger("lockstep.somewhere")
CLOCK = re.compile(r"\d\d:\d\d:\d\d ")


class Clock:
    """Stands for the time module in logs: only what paces the lines moves by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(logs.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def training(step: int) -> dict[str, Any]:
    return {"step": step, "epoch": 0, "loss": 1.0, "examples_per_second": 10.0}


def validation(step: int) -> dict[str, Any]:
    return {"step": step, "epoch": 0, "val/loss": 2.0}


def steps(text: str) -> list[tuple[int, str]]:
    """The steps of the rows that were printed, each with `loss` or `val/loss`."""
    found = (re.search(r"step (\d+)\S*  (\S*loss)", line) for line in text.splitlines())
    return [(int(match[1]), match[2]) for match in found if match]


def test_a_pipe_gets_a_row_per_ten_seconds_and_the_first_and_the_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    with rank_log(tmp_path, 0, None, redirect=False):
        shown = Display()
        shown.begin(0, 0, 40)
        for step in range(1, 41):
            shown.row(training(step), [])
            clock.now += 1.0
    assert steps(capsys.readouterr().out) == [(1, "loss"), (11, "loss"), (21, "loss"), (31, "loss"), (40, "loss")]
    assert len(steps((tmp_path / "rank-0.log").read_text())) == 40, "the log file has every row"


def test_the_last_row_of_a_run_without_a_known_end_is_printed_when_it_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    with rank_log(tmp_path, 0, None, redirect=False):
        shown = Display()
        shown.begin(0, 0, None)
        for step in (1, 2, 3):
            shown.row(training(step), [])
    assert steps(capsys.readouterr().out) == [(1, "loss"), (3, "loss")]
    assert len(steps((tmp_path / "rank-0.log").read_text())) == 3


def test_a_row_of_training_waits_for_a_validation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    with rank_log(tmp_path, 0, None, redirect=False):
        shown = Display()
        shown.begin(0, 0, 4)
        shown.row(training(1), [])
        clock.now += 9.0
        shown.row(validation(1), [])
        clock.now += 2.0
        shown.row(training(2), [])
        shown.row(validation(2), [])
        clock.now += 8.0
        shown.row(training(3), [])
        shown.row(validation(4), [])
        shown.row(training(4), [])
    assert steps(capsys.readouterr().out) == [(1, "loss"), (1, "val/loss"), (3, "loss"), (4, "val/loss"), (4, "loss")]


def test_other_messages_are_printed_at_once_with_the_time_and_without_the_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    with rank_log(tmp_path, 0, None, redirect=False):
        for number in range(3):
            logger.info("message %d", number)
            logger.info("saved step-%d", number, extra={"repeats": "saved"})
    out = capsys.readouterr().out.splitlines()
    assert all(CLOCK.match(line) for line in out)
    assert [CLOCK.sub("", line) for line in out] == [
        "message 0",
        "saved step-0",
        "message 1",
        "message 2",
        "saved step-2",
    ]


def test_standard_error_that_was_closed_from_the_start_takes_text_for_nothing() -> None:
    """As `python train.py 2>&-` has it, whose heartbeat writes its warnings there."""
    if (child := os.fork()) == 0:
        code = 1
        with contextlib.suppress(OSError):
            os.close(2)
            os.write(standard_error(), b"a warning")
            code = 0
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
