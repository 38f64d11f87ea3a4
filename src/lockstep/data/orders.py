"""The orders in which an epoch may visit its examples, each a pure function that is asked for a few places at a time.

None of them knows of ranks or of batches done: every rank asks for the places of its share, wherever it begins.
"""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.data.permutation import Indices, Permutation
from lockstep.errors import ConfigError

# Of the random numbers: what draws by one never meets what draws by another. The loader has 3, first weights have 4.
ORDER_STREAM, SPLIT_STREAM, WEIGHTED_STREAM, BUCKET_STREAM = 1, 2, 5, 6

OwnOrder = Callable[[int, int, int], Any]  # (epoch, seed, count) -> indices


class Order(abc.ABC):
    """Which example is at which place of an epoch."""

    # As a checkpoint has it, beside the position that depends on it.
    name: str
    # Whether what ranks were given may be another for every epoch, so that they compare it every time.
    drawn_anew = False

    def __init__(self, count: int) -> None:
        self.count = count  # examples that there are

    @property
    def length(self) -> int:
        return self.count

    @abc.abstractmethod
    def at(self, epoch: int, places: Indices) -> Indices:
        """The examples at these places of an epoch."""

    def facts(self, epoch: int) -> dict[str, Any]:
        """What a position in it depends on, in plain words; the same on all ranks, and after a restart."""
        return {"order": self.name}


class Sequential(Order):
    name = "sequential"

    def at(self, epoch: int, places: Indices) -> Indices:
        return places


class Shuffled(Order):
    """A new random order in every epoch. Takes no memory: 1e9 examples begin as fast as a thousand."""

    name = "shuffled"

    def __init__(self, count: int, seed: int) -> None:
        super().__init__(count)
        self._seed = seed
        self._epoch: tuple[int, Permutation] | None = None

    def at(self, epoch: int, places: Indices) -> Indices:
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, Permutation(self.count, ORDER_STREAM, self._seed, epoch)
        return self._epoch[1](places)


class Made(Order):
    """An order that is made whole for an epoch, and kept until another is asked for."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._made: tuple[int, Indices] | None = None

    @abc.abstractmethod
    def make(self, epoch: int) -> Indices: ...

    def whole(self, epoch: int) -> Indices:
        if self._made is None or self._made[0] != epoch:
            self._made = epoch, self.make(epoch)
        return self._made[1]

    def at(self, epoch: int, places: Indices) -> Indices:
        return self.whole(epoch)[places]


class Own(Made):
    """What a function of (epoch, seed, count) returns: every example once, unless it is said to repeat some."""

    name = "own"
    drawn_anew = True

    def __init__(self, count: int, seed: int, order: OwnOrder, repeats: bool = False, said_by: str = "order") -> None:
        super().__init__(count)
        self._seed, self._order, self._repeats, self._said_by = seed, order, repeats, said_by
        self._length: int | None = None if repeats else count

    @property
    def length(self) -> int:
        if self._length is None:
            self._length = len(self.whole(0))
        return self._length

    def make(self, epoch: int) -> Indices:
        what = f"{self._said_by}(epoch={epoch}, seed={self._seed}, count={self.count})"
        indices = _as_indices(self._order(epoch, self._seed, self.count), what)
        self._check(indices, what)
        return indices

    def facts(self, epoch: int) -> dict[str, Any]:
        return {**super().facts(epoch), "length": self.length, "examples": digest(self.whole(epoch))}

    def _check(self, indices: Indices, what: str) -> None:
        outside = np.flatnonzero((indices < 0) | (indices >= self.count))
        if len(outside):
            raise ConfigError(
                f"{what} has {indices[outside[0]]} at place {outside[0]}: an index is 0 to {self.count - 1}"
            )
        if self._repeats:
            if len(indices) != (self._length or len(indices)) or not len(indices):
                raise ConfigError(
                    f"{what} returned {len(indices)} indices, and {self._length or 'at least one'} were expected: "
                    "every epoch has as many as the first"
                )
            return
        times = np.bincount(indices, minlength=self.count)
        twice, lacking = np.flatnonzero(times > 1), np.flatnonzero(times == 0)
        wrong = [f"has example {twice[0]} {times[twice[0]]} times"] if len(twice) else []
        wrong += [f"lacks example {lacking[0]}"] if len(lacking) else []
        if wrong:
            raise ConfigError(
                f"{what} is no permutation of the {self.count} examples: it {' and '.join(wrong)} "
                f"({len(indices)} indices in all). Return each once, or say that an epoch may leave out and repeat "
                "examples: order_repeats = True in the task, {'type': 'own', 'order': ..., 'repeats': True} in "
                "run.batches"
            )


def digest(values: Any) -> str:
    """A short name for numbers, by which ranks and restarts tell whether they have the same."""
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:16]


def _as_indices(given: Any, what: str) -> Indices:
    indices = np.asarray(given)
    if indices.ndim != 1 or (len(indices) and indices.dtype.kind not in "iu"):
        raise ConfigError(
            f"{what} must return indices, one whole number for every place of the epoch; got a "
            f"{type(given).__name__} of shape {list(indices.shape)} and type {indices.dtype}"
        )
    return indices.astype(np.int64, copy=False)
