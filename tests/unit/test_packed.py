"""Batches in one piece of memory: the ones that torch's default_collate makes, or left to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from lockstep.data.batches import GlobalBatches
from lockstep.data.loader import Loader
from lockstep.data.workers import Loading, Packed, collate_packed


def same(one: Any, other: Any) -> bool:
    if isinstance(other, Tensor):
        return isinstance(one, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(other, dict):
        return type(one) is dict and list(one) == list(other) and all(same(one[key], other[key]) for key in other)
    if isinstance(other, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def rows(*makers: Any) -> list[Any]:
    return [tuple(make(number) for make in makers) for number in range(5)]


IMAGE = lambda number: torch.full((3, 4, 4), number, dtype=torch.uint8)  # noqa: E731
TEXT = lambda number: torch.arange(number, number + 7)  # noqa: E731
PACKED = {
    "image and label": rows(IMAGE, lambda number: number),
    "two windows of one tensor": rows(TEXT, lambda number: TEXT(number + 1)[:7]),
    "half, float and flag": rows(lambda n: torch.tensor([n]).half(), float, lambda n: torch.tensor(n > 2)),
    "lists": [list(each) for each in rows(TEXT, TEXT)],
    "mappings": [{"tokens": TEXT(n), "weight": float(n), "empty": torch.empty(0, 2)} for n in range(4)],
    "not contiguous": rows(lambda n: torch.arange(12).view(3, 4).t() + n, lambda n: n),
}
LEFT = {
    "one column": rows(TEXT),
    "a tensor": [TEXT(0), TEXT(1)],
    "text": rows(TEXT, str),
    "arrays": rows(lambda n: np.ones(3) * n, lambda n: n),
    "within each other": rows(TEXT, lambda n: (TEXT(n), n)),
    "booleans": rows(TEXT, lambda n: n > 1),
    "an order of its own in every mapping": [{"a": 1, "b": 2.0}, {"b": 3.0, "a": 4}],
}


@pytest.mark.parametrize("name", PACKED)
def test_it_is_the_batch_that_torch_makes_in_one_piece(name: str) -> None:
    made = collate_packed(PACKED[name])
    assert isinstance(made, Packed) and made.memory.is_shared()
    assert same(made.unpacked(), default_collate(PACKED[name]))


@pytest.mark.parametrize("name", LEFT)
def test_other_examples_are_left_to_torch(name: str) -> None:
    made = collate_packed(LEFT[name])
    assert same(made.unpacked() if isinstance(made, Packed) else made, default_collate(LEFT[name]))


@pytest.mark.parametrize("examples", [rows(TEXT, lambda n: torch.zeros(n)), [(1, 2), (1, 2, 3)]])
def test_examples_that_do_not_go_together_are_refused_in_torchs_words(examples: list[Any]) -> None:
    with pytest.raises(RuntimeError) as theirs:
        default_collate(examples)
    with pytest.raises(type(theirs.value), match=r"stack|size"):
        collate_packed(examples)


class Images(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return {"image": torch.full((3, 16, 16), float(index)), "mask": torch.ones(16, 16), "label": index}


def test_a_kept_label_does_not_keep_the_shared_memory_of_its_batch() -> None:
    loader = Loader(Images(), GlobalBatches(64, 32, shuffle=False), loading=Loading(1))
    batches = [batch for _, batch in loader.epoch(0)]
    loader.close()
    kept = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    assert torch.equal(kept["label"], torch.arange(64)) and torch.equal(kept["image"][:, 0, 0, 0], torch.arange(64.0))
    for batch in batches:
        for name, tensor in batch.items():
            assert tensor.untyped_storage().nbytes() <= 4 * tensor.nbytes, name
        assert not batch["label"].is_shared() and batch["image"].is_shared()


class Arrays(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.full((3,), index), index


def arrays(examples: list[Any]) -> Any:
    return (np.array([label for _, label in examples]), [row for row, _ in examples])


@pytest.mark.parametrize("collate", [None, arrays])
def test_a_batch_is_the_same_whoever_fetches_it(collate: Any) -> None:
    """Its kinds too: torch would turn arrays into tensors, and tuples into lists, on the way from a worker."""
    found = []
    for workers in (0, 1):
        loader = Loader(Arrays(), GlobalBatches(8, 4), collate, Loading(workers))
        found.append([batch for _, batch in loader.epoch(0)])
        loader.close()
    for here, there in zip(*found, strict=True):
        assert type(here) is type(there)
        assert all(type(one) is type(other) for one, other in zip(here, there, strict=True))
        assert np.array_equal(np.asarray(here[0]), np.asarray(there[0]))
