"""A random order of any number of things, of which every place can be asked for without making the rest.

What is here never changes between versions: a run is resumed with what is installed then. docs/decisions/026 has the
algorithm in words.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

# Up to here an order is made whole, by sorting random words: milliseconds, half a megabyte, and beyond any doubt.
SORTED_UP_TO = 1 << 16
_ROUNDS = 8
_AT_ONCE = 1 << 14  # places that are worked out together: they stay in the processor's cache
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # of SplitMix64
_GAMMA = np.uint64(0x9E3779B97F4A7C15)


class Permutation:
    """A bijection of range(count) that a key chooses; called with places, it says what is there."""

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
    """A random order that is made whole: that of small data."""
    # Sorting raw Philox words: numpy promises that a bit generator's words never change, but not what its shuffles do.
    words = np.random.Philox(np.random.SeedSequence(list(key))).random_raw(count)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


def uniform(places: Indices, *key: int) -> npt.NDArray[np.float64]:
    """A random number above 0 and up to 1 for every place: the words of SplitMix64, each by its own number."""
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
