"""Batches of examples of similar length, so that little of them is padding."""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep.data.orders import BUCKET_STREAM, Order, digest
from lockstep.data.permutation import Indices, Permutation, words_of
from lockstep.data.weighted import numbers
from lockstep.errors import ConfigError

# Batches whose examples are sorted by length together, where nothing was said.
WINDOW = 100


class Buckets(Order):
    """A random order, of which every so many batches are sorted by length, cut, and shuffled as whole batches.

    Every example comes once in an epoch, in new company every time. Only the last batch may be short: not one of the
    longest examples, but of any length.
    """

    name = "buckets"

    def __init__(self, count: int, seed: int, lengths: Any, batch_size: int, window: int | None = None) -> None:
        super().__init__(count)
        self._lengths = numbers(lengths, count, "lengths")
        wrong = np.flatnonzero(~np.isfinite(self._lengths) | (self._lengths < 0))
        if len(wrong):
            raise ConfigError(
                f"data.order: the length of example {wrong[0]} is {self._lengths[wrong[0]]:g}: lengths are 0 or more"
            )
        self._seed, self._batch_size, self._window = seed, batch_size, window or WINDOW
        self._order: tuple[int, Permutation] | None = None
        self._made: tuple[int, int, Indices] | None = None

    def facts(self, epoch: int) -> dict[str, Any]:
        return {**super().facts(epoch), "window": self._window, "lengths": digest(self._lengths)}

    def at(self, epoch: int, places: Indices) -> Indices:
        size = self._window * self._batch_size
        windows = places // size
        if len(places) and windows[0] == windows[-1] == windows.max():
            return self._sorted(epoch, int(windows[0]))[places % size]
        found = np.empty(len(places), dtype=np.int64)
        for window in np.unique(windows):
            here = windows == window
            found[here] = self._sorted(epoch, int(window))[places[here] % size]
        return found

    def _sorted(self, epoch: int, window: int) -> Indices:
        if self._made is None or self._made[:2] != (epoch, window):
            self._made = epoch, window, self._make(epoch, window)
        return self._made[2]

    def _make(self, epoch: int, window: int) -> Indices:
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, Permutation(self.count, BUCKET_STREAM, self._seed, epoch)
        start = window * self._window * self._batch_size
        drawn = self._order[1](np.arange(start, min(start + self._window * self._batch_size, self.count)))
        by_length = drawn[np.argsort(self._lengths[drawn], kind="stable")]
        full, rest = divmod(len(drawn), self._batch_size)
        # The short batch is cut out at a random place: taken off the end it would always have the longest examples.
        key = (BUCKET_STREAM, self._seed, epoch, window)
        cut = int(words_of(1, *key)[0] % np.uint64(full + 1)) * self._batch_size
        short = by_length[cut : cut + rest]
        batches = np.concatenate([by_length[:cut], by_length[cut + rest :]]).reshape(full, self._batch_size)
        return np.concatenate([batches[Permutation(full, *key)(np.arange(full))].reshape(-1), short])
