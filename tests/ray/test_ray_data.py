"""Ray Data as a source: every row counts once, whatever the shards look like."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_cluster import Fit, notes

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'lockstep-train[ray]'")

import ray_bodies as bodies

import lockstep.ray
from lockstep.data.stream_batches import streamed
from lockstep.distributed.group import Group
from lockstep.errors import ConfigError
from lockstep.ray.data import _counted, row_count

ROWS = 43  # a prime: no number of workers or batches divides it


def test_what_would_count_rows_wrongly_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"DataConfig\(datasets_to_split=...\): it takes no arguments"):
        lockstep.ray.DataConfig(datasets_to_split=["train"])
    rows = {"x": [1, 2, 3]}
    assert _counted(lambda given: {"y": given["x"]})(rows) == {"y": [1, 2, 3]} and row_count({}) == 0
    with pytest.raises(ConfigError, match="collate_fn made 2 rows of 3"):
        _counted(lambda given: {"x": given["x"][:2]})(rows)
    for batch in ([1, 2], {"x": [1, 2], "y": [1]}, {"x": {"a": [1]}}, {"x": 5}):
        with pytest.raises(ConfigError, match="whose rows cannot be counted"):
            row_count(batch)


@pytest.mark.long
def test_every_row_counts_once_in_training_and_in_means(fit: Fit, tmp_path: Path) -> None:
    datasets = {name: ray.data.range(ROWS).rename_columns({"id": "x"}).repartition(5) for name in ("train", "val")}
    trainer = {"datasets": datasets, "dataset_config": lockstep.ray.DataConfig()}
    fit(bodies.from_ray_data, loop_config={"notes": str(tmp_path), "rows": ROWS}, trainer=trainer)
    found = notes(tmp_path)
    for epoch in (0, 1):
        seen = [row for rank in found for each in found[rank] if each.get("epoch") == epoch for row in each["rows"]]
        assert sorted(seen) == list(range(ROWS))
        steps = {rank: sum(each.get("epoch") == epoch for each in found[rank]) for rank in found}
        assert steps[0] == steps[1], "both ranks take part in every step"
    for rank in found:
        last = found[rank][-1]
        assert last["examples"] == 2 * ROWS and last["epochs"] == 2
        expected = {"value": (ROWS - 1) / 2, "square": sum(x * x for x in range(ROWS)) / ROWS}
        assert last["means"] == pytest.approx(expected, rel=1e-12)


def test_a_stream_weighs_every_example_alike_and_knows_its_last_batch() -> None:
    batches = [[1, 2], [3, 4], [5]]
    parts = [part for part, _ in streamed(Group(0, 1, 1.0), iter(batches), len, "train")]
    assert [(part.batch, part.examples, part.weight, part.whole) for part in parts] == [
        (0, 2, 1.0, 2),
        (1, 2, 1.0, 2),
        (2, 1, 1.0, 1),
    ]
    assert [part.completes_epoch for part in parts] == [False, False, True]


def test_a_rank_without_any_example_is_named() -> None:
    with pytest.raises(ConfigError, match=r"rank 0 of 1 got no examples of 'train'.*repartition"):
        next(streamed(Group(0, 1, 1.0), iter([]), len, "train"))
