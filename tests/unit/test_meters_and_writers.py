"""Numbers about a run: weighted, summed, written a line at a time."""

from __future__ import annotations

import json
import math
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import ConfigError
from lockstep.record.meters import Found, Meter, Parts, Totals, added_up
from lockstep.record.writers import JsonlWriter, keep_rows, read_rows, write_json

# Collected


def sums_of(meter: Meter) -> dict[str, list[float]]:
    return added_up([meter.read().parts])


def test_values_are_weighted_by_the_examples_they_are_means_over() -> None:
    meter = Meter()
    meter.add(1, 3, {"loss": torch.tensor(2.0), "speed": 1.0})
    meter.add(2, 1, {"loss": torch.tensor(6.0)})
    assert meter.read() == Found({"loss": [[12.0], [4.0]], "speed": [[3.0], [3.0]]}, None)


def test_a_reading_starts_anew() -> None:
    meter = Meter()
    meter.add(1, 1, {"loss": 1.0})
    meter.read()
    assert meter.read() == Found({}, None)


def test_a_value_is_kept_as_it_was_noted() -> None:
    meter = Meter()
    weight = torch.tensor(2.0, requires_grad=True)
    meter.add(1, 1, {"loss": weight * 3})
    with torch.no_grad():
        weight.zero_()
    assert sums_of(meter) == {"loss": [6.0, 1.0]}


@pytest.mark.parametrize("value", [2, 2.0, True, torch.tensor(2), torch.tensor([2.0]), torch.tensor(2.0).bfloat16()])
def test_any_number_can_be_noted(value: Any) -> None:
    meter = Meter()
    meter.add(1, 2, {"x": value})
    meter.add(2, 2, {"x": value})
    assert sums_of(meter) == {"x": [4.0 * float(value), 4.0]}


def test_numbers_and_tensors_may_alternate_under_one_name() -> None:
    meter = Meter()
    meter.add(1, 1, {"x": 1.0})
    meter.add(2, 1, {"x": torch.tensor(2)})
    assert sums_of(meter) == {"x": [3.0, 2.0]}


def test_a_value_that_is_no_single_number_is_refused_by_name_where_it_is_noted() -> None:
    with pytest.raises(ConfigError, match="accuracy"):
        Meter().add(1, 4, {"accuracy": torch.ones(4)})


def test_what_counts_for_nothing_is_not_in_the_mean_even_if_it_is_no_number() -> None:
    meter = Meter()
    meter.add(1, 0, {"accuracy": nan})
    meter.add(2, 2, {"accuracy": 0.5})
    assert sums_of(meter) == {"accuracy": [1.0, 2.0]}


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_the_first_loss_that_is_no_number_is_told_with_its_step(bad: float) -> None:
    meter = Meter()
    for step, loss in [(4, 1.0), (5, bad), (6, nan)]:
        meter.add(step, 2, {"other": nan})
        meter.add_loss(step, torch.tensor(loss))
    step, value = meter.read().bad or (None, None)
    assert (step, str(value)) == (5, str(bad))


def test_a_metric_that_is_no_number_is_no_reason_to_stop() -> None:
    meter = Meter()
    meter.add(1, 1, {"loss": inf, "perplexity": inf})
    meter.add_loss(1, torch.tensor(1.0))
    assert meter.read().bad is None


# Summed

number = st.floats(-1e6, 1e6)


@settings(deadline=None)
@given(values=st.lists(st.tuples(number, st.integers(1, 100)), min_size=1, max_size=20), cut=st.integers(0, 20))
def test_totals_over_ranks_are_the_weighted_mean(values: list[tuple[float, int]], cut: int) -> None:
    totals = Totals()
    for rank in (values[:cut], values[cut:]):
        meter = Meter()
        for step, (value, examples) in enumerate(rank):
            meter.add(step, examples, {"loss": value})
        totals.add([meter.read().parts])
    expected = sum(value * examples for value, examples in values) / sum(examples for _, examples in values)
    assert totals.take()["loss"] == pytest.approx(expected, abs=1e-6)
    assert totals.means() == {}


def test_what_has_no_weight_has_no_mean() -> None:
    totals = Totals()
    totals.add([{"loss": [[0.0], [0.0]]}])
    assert totals.means() == {}


@given(values=st.lists(number, min_size=1, max_size=20), cut=st.integers(0, 20))
def test_a_checkpoint_in_between_changes_no_bit_of_a_mean(values: list[float], cut: int) -> None:
    """Sums are brought together at a checkpoint, and those of a run that was interrupted once more."""

    def read(some: list[float]) -> Parts:
        meter = Meter()
        for value in some:
            meter.add(1, 3, {"loss": value})
        return meter.read().parts

    whole, begun, resumed = Totals(), Totals(), Totals()
    whole.add([read(values)])
    begun.add([read(values[:cut])])
    resumed.sums = json.loads(json.dumps(begun.sums))
    resumed.add([read(values[cut:])])
    assert resumed.take() == whole.take()


@pytest.mark.parametrize("where", [0, 1])
def test_what_is_not_finite_stays_so(where: int) -> None:
    totals = Totals()
    for each in [[math.inf, 1.0], [1.0, -math.inf]][where:]:
        totals.add([{"loss": [[each[0]], [1.0]]}, {"loss": [[each[1]], [1.0]]}])
    assert not math.isfinite(totals.take()["loss"])


# Written


def strict(text: str) -> Any:
    """JSON as every other program reads it: without NaN and Infinity, which Python alone writes."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_every_row_is_a_line_that_is_there_at_once(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(file)
    writer.write({"step": 1, "loss": 0.5})
    assert [strict(line) for line in file.read_text().splitlines()] == [{"step": 1, "loss": 0.5}]
    writer.write({"step": 2, "loss": nan, "other": -inf})
    writer.close()
    JsonlWriter(file).close()
    assert [strict(line) for line in file.read_text().splitlines()][1:] == [{"step": 2, "loss": None, "other": None}]


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    assert list(read_rows(file)) == [{"step": 1}, {"step": 2}]
    assert list(read_rows(file, having="2")) == [{"step": 2}]


def test_rows_that_will_be_written_again_are_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert keep_rows(file, 2) == 0 and not list(tmp_path.iterdir())
    kept = '{"step": 1, "loss": null}\n{"note": 1}\n{"step": 2}\n'
    file.write_text(kept + '{"step": 3}\n{"st')
    assert keep_rows(file, 3) == 3 and file.read_text() == kept
    file.write_text(kept + '{"st')  # the rest never came to this disk
    assert keep_rows(file, 9) == 3 and file.read_text() == kept
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_json_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    write_json(file, {"status": "completed"})
    with pytest.raises(TypeError):
        write_json(file, {"status": object()})
    assert strict(file.read_text()) == {"status": "completed"}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_json_file_is_json_even_where_a_metric_is_no_number(tmp_path: Path) -> None:
    write_json(tmp_path / "summary.json", {"metrics": {"val/loss": nan}, "best": [inf]})
    assert strict((tmp_path / "summary.json").read_text()) == {"metrics": {"val/loss": None}, "best": [None]}
