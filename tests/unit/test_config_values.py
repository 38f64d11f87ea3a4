"""Intervals, durations and import paths, as people write them."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from lockstep.config.values import ImportPath, Interval, Seconds

SECONDS = TypeAdapter(Seconds)
IMPORT_PATH = TypeAdapter(ImportPath)


@pytest.mark.parametrize(
    ("text", "count", "unit"),
    [
        ("5 steps", 5, "step"),
        ("1 step", 1, "step"),
        ("250steps", 250, "step"),
        ("1 epoch", 1, "epoch"),
        ("3 epochs", 3, "epoch"),
        ("  2   epochs ", 2, "epoch"),
        ("90 s", 90, "second"),
        ("90 seconds", 90, "second"),
        ("1.5 min", 90, "second"),
        ("10 minutes", 600, "second"),
        ("2 h", 7200, "second"),
        ("0.5 hours", 1800, "second"),
    ],
)
def test_an_interval_is_read(text: str, count: float, unit: str) -> None:
    assert Interval.parse(text) == Interval(count, unit)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "5",
        "steps",
        "-1 steps",
        "5 parsecs",
        "5 steps 3",
        "1e3 steps",
        "every step",
        5,
        5.0,
        None,
        True,
        ["5 steps"],
    ],
)
def test_what_is_not_an_interval_is_refused_with_examples(value: object) -> None:
    with pytest.raises(ValueError, match='not an interval; write for example "50 steps", "1 epoch" or "10 minutes"'):
        Interval.parse(value)


@pytest.mark.parametrize("text", ["0 steps", "0 s", "0.0 epochs"])
def test_an_interval_is_longer_than_zero(text: str) -> None:
    with pytest.raises(ValueError, match="longer than zero"):
        Interval.parse(text)


@pytest.mark.parametrize(("text", "unit"), [("1.5 epochs", "epochs"), ("0.5 steps", "steps")])
def test_steps_and_epochs_come_in_whole_numbers(text: str, unit: str) -> None:
    with pytest.raises(ValueError, match=f"{unit} come in whole numbers"):
        Interval.parse(text)


@settings(deadline=None)
@given(count=st.integers(1, 10**12), unit=st.sampled_from(["step", "epoch", "second", "minute", "hour"]))
def test_a_whole_interval_written_out_reads_back_as_itself(count: int, unit: str) -> None:
    interval = Interval.parse(f"{count} {unit}s")
    assert Interval.parse(str(interval)) == interval


@settings(deadline=None)
@given(
    count=st.decimals(min_value=Decimal("0.0001"), max_value=10**7, places=4), unit=st.sampled_from(["s", "min", "h"])
)
def test_a_fraction_of_time_written_out_reads_back_as_itself(count: Decimal, unit: str) -> None:
    interval = Interval.parse(f"{count:f} {unit}")
    assert Interval.parse(str(interval)) == interval


@pytest.mark.parametrize(("interval", "text"), [(Interval(1, "epoch"), "1 epoch"), (Interval(50, "step"), "50 steps")])
def test_an_interval_is_written_as_people_write_it(interval: Interval, text: str) -> None:
    assert str(interval) == text


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(60, 60), (0.5, 0.5), ("90 s", 90), ("1 second", 1), ("5 minutes", 300), ("1.5 min", 90), ("1 hour", 3600)],
)
def test_a_duration_is_a_number_of_seconds_or_a_text_with_a_unit(value: object, seconds: float) -> None:
    assert SECONDS.validate_python(value) == seconds


@pytest.mark.parametrize("value", ["5", "soon", "5 steps", "-5 s", "", 0, -1, "0 s", float("nan"), None])
def test_what_is_not_a_duration_is_refused(value: object) -> None:
    with pytest.raises(ValidationError):
        SECONDS.validate_python(value)


@pytest.mark.parametrize(
    "text",
    [
        "task.py:Mine",
        "folder/task.py:Mine",
        "/abs/with space/task.py:Mine",
        "package.module:Name",
        "package.module.Name",
    ],
)
def test_an_import_path_is_a_file_or_a_module_and_a_name(text: str) -> None:
    assert IMPORT_PATH.validate_python(text) == text


@pytest.mark.parametrize(
    "text", ["", "Name", "task.py", "task.py:", ":Name", "package.module:", "a b:C", "a:b:C", "a.b:1"]
)
def test_what_is_not_an_import_path_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValidationError, match=r'write "package\.module:Name" or "file\.py:Name"'):
        IMPORT_PATH.validate_python(text)
