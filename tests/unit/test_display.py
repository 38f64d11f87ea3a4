"""What rank 0 shows."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lockstep.config.schema import Keep, Log
from lockstep.record import display
from lockstep.record.display import Display, LiveDisplay
from lockstep.record.metric_writer import MetricWriter
from lockstep.record.writers import read_rows

ROW: dict[str, Any] = {
    "step": 20,
    "epoch": 1,
    "loss": 0.123456,
    "lr": 0.01,
    "examples_per_second": 12345.6,
}


def test_a_line_tells_where_the_run_is_how_well_it_does_and_how_fast() -> None:
    assert Display().line(ROW, []) == "epoch 1 step 20  loss 0.1235  12,346 examples/s"


def test_where_the_end_is_known_the_time_left_is_told() -> None:
    shown = Display()
    shown.begin(10, 0, 100)
    line = shown.line(ROW, [])
    assert line.startswith("epoch 1 step 20/100  loss 0.1235  12,346 examples/s  0:0")
    assert line.endswith(" left")


def test_at_the_step_where_a_run_was_resumed_no_time_is_guessed() -> None:
    shown = Display()
    shown.begin(20, 1, 100)
    assert "left" not in shown.line(ROW, [])


def test_a_validation_is_a_line_without_speed() -> None:
    row = {"step": 4, "epoch": 2, "train/loss": 1.5, "val/loss": 2.0, "val/accuracy": 0.98765}
    assert Display().line(row, [0.0, 1.0]) == "epoch 2 step 4  train/loss 1.5  val/loss 2  val/accuracy 0.9877"


def test_a_metric_without_a_value_is_left_out() -> None:
    assert Display().line({"step": 1, "epoch": 0, "loss": None}, []) == "epoch 0 step 1"


@pytest.mark.parametrize(
    ("lags", "shown"),
    [
        ([], ""),
        ([0.5], ""),  # a rank alone has nobody to lag behind
        ([0.010, 0.010], ""),
        ([0.0100, 0.0199], ""),  # less than 10 ms
        ([0.010, 0.025], "  lag r1 +15ms"),
        ([0.030, 0.010, 0.012, 0.110], "  lag r0 +20ms r3 +100ms"),
    ],
)
def test_ranks_that_are_behind_are_told(lags: list[float], shown: str) -> None:
    assert Display().line(ROW, lags) == f"epoch 1 step 20  loss 0.1235  12,346 examples/s{shown}"


def test_a_lag_of_less_than_a_twentieth_of_a_step_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    shown = Display()
    shown.begin(0, 0, None)
    now[0] += 20 * 1.0  # a second per step
    assert "lag" not in shown.line(ROW, [0.900, 0.949])
    assert shown.line(ROW, [0.900, 0.951]).endswith("  lag r1 +51ms")


def test_without_a_terminal_rows_and_notes_are_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    shown = display.create(None)
    with caplog.at_level(logging.INFO, "lockstep"):
        shown.row(ROW, [])
        shown.note("a note")
        shown.close()
    assert caplog.messages == ["epoch 1 step 20  loss 0.1235  12,346 examples/s", "a note"]


@pytest.fixture
def screen() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)


def drawn(screen: Console) -> str:
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_on_a_terminal_a_bar_shows_progress_and_numbers(screen: Console) -> None:
    shown = display.create(screen)
    assert isinstance(shown, LiveDisplay)
    shown.begin(0, 0, 100)
    shown.row(ROW, [0.01, 0.03])
    shown.close()
    text = drawn(screen)
    assert "epoch 1" in text
    assert "20/100" in text
    assert "loss 0.1235  12,346 examples/s  lag r1 +20ms" in text


def test_on_a_terminal_validations_scroll_by(screen: Console, caplog: pytest.LogCaptureFixture) -> None:
    shown = display.create(screen)
    shown.begin(0, 0, None)
    with caplog.at_level(logging.INFO, "lockstep"):
        shown.row({"step": 4, "epoch": 2, "val/loss": 2.0}, [])
    shown.close()
    assert caplog.messages == ["epoch 2 step 4  val/loss 2"]


def test_a_resumed_run_shows_where_it_goes_on(screen: Console) -> None:
    shown = display.create(screen)
    shown.begin(40, 3, 100)
    shown.close()
    assert "epoch 3" in drawn(screen)
    assert "40/100" in drawn(screen)


def test_a_row_before_the_beginning_is_a_line(screen: Console, caplog: pytest.LogCaptureFixture) -> None:
    shown = display.create(screen)
    with caplog.at_level(logging.INFO, "lockstep"):
        shown.row(ROW, [])
    shown.close()
    assert len(caplog.messages) == 1


def test_text_that_looks_like_markup_is_shown_as_it_is(screen: Console) -> None:
    """Metrics may have any name: `val/[cls]` is one, not a style."""
    shown = display.create(screen)
    shown.begin(0, 0, 10)
    shown.row({**ROW, "val/[cls]": 1.0, "[/x]": 2.0}, [])
    shown.close()
    assert "val/[cls] 1" in drawn(screen)


def test_what_is_no_terminal_gets_no_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert display.terminal() is None


def test_a_validation_that_is_better_than_all_before_is_marked(tmp_path: Path) -> None:
    """Also in a run that goes on, which knows what was before."""
    lines: list[str] = []

    class Shown(Display):
        def row(self, row: dict[str, Any], lags: list[float]) -> None:
            lines.append(self.line(row, lags))

    def metric_writer() -> MetricWriter:
        return MetricWriter(tmp_path, Log(), Shown(), keep=Keep(metric="val/accuracy", mode="max"))

    def write(made: MetricWriter, *values: float) -> list[bool]:
        lines.clear()
        for value in values:
            made.write({"step": 1, "epoch": 0, "val/accuracy": value}, 0.0)
        return [line.endswith("  new best") for line in lines]

    first = metric_writer()
    assert write(first, 0.5, 0.5, 0.7, float("nan"), 0.6) == [True, False, True, False, False]
    first.write({"step": 1, "epoch": 0, "val/accuracy": 0.9, "examples": 5}, 1.0)  # a row of training is none of it
    assert not lines[-1].endswith("new best")
    first.close("preempted")
    again = metric_writer()
    again.forget_after(1, rows=3)
    assert write(again, 0.6, 0.8) == [False, True]
    again.close("completed")
    assert all("new best" not in row for row in read_rows(tmp_path / "metrics.jsonl"))
