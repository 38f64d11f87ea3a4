"""Training, validation and test data as random parts of one dataset, the same on every rank and after every restart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from lockstep.data.orders import SPLIT_STREAM
from lockstep.data.permutation import SORTED_UP_TO, Indices, Permutation


class Split:
    """Disjoint parts by fraction; together they hold every example once.

    A part of more data than is sorted in no time is a stretch of a random order, in that order, and takes no memory;
    with `in_order`, its examples come as they are in the dataset, at 8 bytes for each.
    """

    def __init__(self, count: int, fractions: Mapping[str, float], seed: int, in_order: bool = False) -> None:
        self.count, self._seed = count, seed
        self._order = Permutation(count, SPLIT_STREAM, seed, 0)
        self._sorts = in_order or count <= SORTED_UP_TO
        self._sorted: dict[str, Indices] = {}
        ends = np.rint(np.cumsum(list(fractions.values())) * count).astype(int)
        # What rounding left over belongs to the last part that was asked for.
        asked = max(index for index, fraction in enumerate(fractions.values()) if fraction > 0)
        ends[asked:] = count
        self.parts = {name: (int(start), int(end))
                      for name, start, end in zip(fractions, [0, *ends[:-1]], ends, strict=True)}  # fmt: skip

    def length(self, part: str) -> int:
        start, end = self.parts[part]
        return end - start

    def at(self, part: str, places: Indices) -> Indices:
        """The examples of the whole that are at these places of a part."""
        start, end = self.parts[part]
        if not self._sorts:
            return self._order(places + start)
        if part not in self._sorted:
            self._sorted[part] = np.sort(self._order(np.arange(start, end)))
        return self._sorted[part][places]


class Part(Dataset[Any]):
    def __init__(self, dataset: Dataset[Any], split: Split, name: str) -> None:
        self.dataset, self.split, self.name = dataset, split, name

    def __len__(self) -> int:
        return self.split.length(self.name)

    def whole(self, places: Indices) -> Indices:
        """The places of these examples in the dataset that this is a part of."""
        return self.split.at(self.name, places)

    def __getitem__(self, place: int) -> Any:
        if not -len(self) <= place < len(self):
            raise IndexError(f"{place} of {len(self)} examples")
        return self.dataset[int(self.whole(np.array([place % len(self)]))[0])]


def split_dataset(
    dataset: Dataset[Any], fractions: Mapping[str, float], seed: int, in_order: bool = False
) -> dict[str, Dataset[Any]]:
    split = Split(len(dataset), fractions, seed, in_order)  # type: ignore[arg-type]
    return {name: Part(dataset, split, name) for name in fractions if split.length(name)}
