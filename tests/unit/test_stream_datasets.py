"""Hugging Face's streaming datasets, from local files: what their states keep, and how they are divided."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_stream_readers import passes, portions_of, read

datasets = pytest.importorskip("datasets")

ROWS = [9, 4, 7]  # in each file


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("rows")
    paths = []
    for shard, count in enumerate(ROWS):
        path: Path = folder / f"{shard}.jsonl"
        path.write_text("".join(json.dumps({"x": 100.0 * shard + row}) + "\n" for row in range(count)))
        paths.append(str(path))
    return paths


EVERYTHING = sorted(100.0 * shard + row for shard, count in enumerate(ROWS) for row in range(count))


def stream(files: list[str], how: str = "plain") -> Any:
    found = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
    return {
        "plain": lambda: found,
        "torch": lambda: found.with_format("torch"),
        "mapped": lambda: found.map(lambda row: {"x": row["x"] + 0.0}),
        "batched": lambda: found.map(lambda rows: {"x": [x + 0.0 for x in rows["x"]]}, batched=True, batch_size=3),
        "filtered": lambda: found.filter(lambda row: True),
        "shuffled": lambda: found.shuffle(seed=3, buffer_size=5),
    }[how]()


def values(row: list[Any]) -> Any:
    return [float(each["x"]) for each in row]


def walks(data: Any, dp_size: int, **how: Any) -> Any:
    found = passes(data, dp_size, **how)
    for walk in found:
        object.__setattr__(walk._cut, "collate", values)
    return found


@pytest.mark.parametrize("how", ["plain", "torch", "mapped", "batched", "filtered", "shuffled"])
def test_a_streaming_dataset_goes_on_where_it_was(files: list[str], how: str) -> None:
    expected, _ = portions_of(walks(stream(files, how), 1, epoch=1)[0], 100)
    assert sorted(x for batch in expected for x in batch) == EVERYTHING
    for stop in (1, 2, 3):
        walk = walks(stream(files, how), 1, epoch=1)[0]
        before, place = portions_of(walk, stop)
        saved = {"kind": walk.kind, "places": [place]}
        after, _ = portions_of(walks(stream(files, how), 1, epoch=1, start=stop, saved=saved)[0], 100)
        assert before + after == expected, (how, stop)
        mark = next(iter(place[0]["marks"].values()), None)
        assert mark is None or mark["read"] == 0 or (mark["state"] is None) == (how == "shuffled")


@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_its_files_are_divided(files: list[str], dp_size: int) -> None:
    assert sorted(x for walk in walks(stream(files), dp_size, shuffle=True) for x in read(walk)) == EVERYTHING


def test_workers_have_files_of_their_own(files: list[str]) -> None:
    assert sorted(read(walks(stream(files), 1, workers=2)[0])) == EVERYTHING


def test_with_fewer_files_than_ranks_every_rank_reads_all(files: list[str]) -> None:
    found = [read(walk) for walk in walks(stream(files), 4, batch_size=8)]
    assert walks(stream(files), 4)[0].kind == "whole"
    assert sorted({x for rank in found for x in rank}) == EVERYTHING


def test_one_that_is_split_by_node_is_not_divided_again(files: list[str]) -> None:
    from datasets.distributed import split_dataset_by_node

    parts = [split_dataset_by_node(stream(files), rank=rank, world_size=3) for rank in range(3)]
    found = [x for rank, part in enumerate(parts) for x in read(walks(part, 3)[rank])]
    assert sorted(found) == EVERYTHING
