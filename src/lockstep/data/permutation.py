"""Random permutations of any size, of which every place can be computed without the rest; and splits by them.

The numbers never change between versions: a run is resumed with what is installed then. docs/decisions/026 has the
algorithm in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

# The first number of a key: what draws by one never meets what draws by another. seeding.py and placing.py have others.
ORDER_STREAM, SPLIT_STREAM, WEIGHTED_STREAM, BUCKET_STREAM = 1, 2, 5, 6

# Up to here an order is made whole, by sorting random words: milliseconds, half a megabyte, and beyond any doubt.
SORTED_UP_TO = 1 << 16
_ROUNDS = 8
_AT_ONCE = 1 << 14  # places that are worked out together: they stay in the processor's cache
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # of SplitMix64
_GAMMA = np.uint64(0x9E3779B97F4A7C15)


class Permutation:
    """A bijection of range(count) that a key chooses; called with places, it returns what is there."""

    def __init__(self, count: int, *key: int) -> None:
        self._count = count
        self._sorted = sorted_words(count, *key) if count <= SORTED_UP_TO else None
        bits = max(count - 1, 1).bit_length()
        self._right_bits = bits // 2
        self._left_bits = bits - self._right_bits
        self._keys = words_of(_ROUNDS, *key)

    def __call__(self, places: Indices) -> Indices:
        if self._sorted is not None:
            return self._sorted[places]
        if len(places) <= _AT_ONCE:
            return self._at(places)
        found = np.empty(len(places), dtype=np.int64)
        for start in range(0, len(places), _AT_ONCE):
            found[start : start + _AT_ONCE] = self._at(places[start : start + _AT_ONCE])
        return found

    def _at(self, places: Indices) -> Indices:
        found = self._encrypted(places.astype(np.uint64))
        # The network permutes the next power of two: what falls outside walks on until it comes back inside.
        limit = np.uint64(self._count)
        outside = np.flatnonzero(found >= limit)
        while len(outside):
            found[outside] = again = self._encrypted(found[outside])
            outside = outside[again >= limit]
        return found.astype(np.int64)

    def _encrypted(self, values: Words) -> Words:
        """A Feistel network: each half in turn is changed by a random function of the other."""
        shift = np.uint64(self._right_bits)
        left, right = values >> shift, values & ((np.uint64(1) << shift) - np.uint64(1))
        for number in range(0, _ROUNDS, 2):
            left ^= _mixed(right, self._keys[number]) >> np.uint64(64 - self._left_bits)
            right ^= _mixed(left, self._keys[number + 1]) >> np.uint64(64 - self._right_bits)
        return (left << shift) | right


def _mixed(values: Words, key: np.uint64) -> Words:
    mixed = values + key
    mixed *= _FIRST
    mixed ^= mixed >> np.uint64(32)
    mixed *= _SECOND
    return mixed


def sorted_words(count: int, *key: int) -> Indices:
    """Returns a random order of small data, computed whole."""
    # Sorting raw Philox words: numpy promises that a bit generator's words never change, but not what its shuffles do.
    words = np.random.Philox(np.random.SeedSequence(list(key))).random_raw(count)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


def uniform(places: Indices, *key: int) -> npt.NDArray[np.float64]:
    """Returns a random number above 0 and up to 1 for every place: the words of SplitMix64."""
    words = places.astype(np.uint64)
    words += np.uint64(1)
    words *= _GAMMA
    words += words_of(1, *key)
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    words ^= words >> np.uint64(31)
    return ((words >> np.uint64(11)).astype(np.float64) + 1.0) * 2.0**-53


def words_of(count: int, *key: int) -> Words:
    words: Words = np.random.SeedSequence(list(key)).generate_state(count, np.uint64)  # type: ignore[assignment]
    return words


class Split:
    """Disjoint random parts by fraction; together they hold every example once.

    A part of large data is a stretch of a random order, in that order, and takes no memory; with `in_order`, its
    examples come as they are in the dataset, at 8 bytes for each.
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
        """Returns the examples of the whole that are at these places of a part."""
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
        """Returns the places of these examples in the dataset that this is a part of."""
        return self.split.at(self.name, places)

    def __getitem__(self, place: int) -> Any:
        if not -len(self) <= place < len(self):
            raise IndexError(f"{place} of {len(self)} examples")
        return self.dataset[int(self.whole(np.array([place % len(self)]))[0])]


class First(Part):
    """The first examples of a dataset, or of a part of one."""

    def __init__(self, dataset: Dataset[Any], count: int) -> None:
        self.dataset: Dataset[Any] = dataset.dataset if isinstance(dataset, Part) else dataset
        self._of, self._count = dataset, min(count, len(dataset))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self._count

    def whole(self, places: Indices) -> Indices:
        return self._of.whole(places) if isinstance(self._of, Part) else places


def split_dataset(
    dataset: Dataset[Any], fractions: Mapping[str, float], seed: int, in_order: bool = False
) -> dict[str, Dataset[Any]]:
    split = Split(len(dataset), fractions, seed, in_order)  # type: ignore[arg-type]
    return {name: Part(dataset, split, name) for name in fractions if split.length(name)}
