"""The orders in which an epoch may visit its examples: pure functions of (seed, epoch), evaluated a few places at a
time."""

from __future__ import annotations

import abc
import functools
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.config.load import validate
from lockstep.config.plain import in_home
from lockstep.config.training import Ordering
from lockstep.data.permutation import (
    BUCKET_STREAM,
    ORDER_STREAM,
    WEIGHTED_STREAM,
    Indices,
    Part,
    Permutation,
    uniform,
    words_of,
)
from lockstep.errors import ConfigError

OrderFunction = Callable[[int, int, int], Any]  # (epoch, seed, count) -> indices

Numbers = npt.NDArray[np.float64]

# Batches whose examples are sorted by length together, where nothing was said.
WINDOW = 100

# What a mapping may hold in place of what a config can only name.
_VALUES = ("weights", "lengths", "order", "repeats")


class Order(abc.ABC):
    """Which example is at which place of an epoch."""

    # In checkpoints, beside the position that depends on it.
    name: str
    # Whether ranks compare it in every epoch.
    drawn_anew = False

    def __init__(self, count: int) -> None:
        self.count = count  # examples that there are

    @property
    def length(self) -> int:
        return self.count

    @abc.abstractmethod
    def at(self, epoch: int, places: Indices) -> Indices:
        """Returns the examples at these places of an epoch."""

    def facts(self, epoch: int) -> dict[str, Any]:
        """Returns what a position in it depends on; the same on all ranks, and after a restart."""
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
        self._permutation = functools.lru_cache(1)(functools.partial(Permutation, count, ORDER_STREAM, seed))

    def at(self, epoch: int, places: Indices) -> Indices:
        return self._permutation(epoch)(places)


class WholeOrder(Order):
    """An order that is computed whole for an epoch, and kept until another is asked for."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.whole = functools.lru_cache(1)(self.make)

    @abc.abstractmethod
    def make(self, epoch: int) -> Indices: ...

    def at(self, epoch: int, places: Indices) -> Indices:
        return self.whole(epoch)[places]


class CustomOrder(WholeOrder):
    """What a user's function of (epoch, seed, count) returns: every example once, unless it may repeat some."""

    name = "own"
    drawn_anew = True

    def __init__(
        self, count: int, seed: int, order: OrderFunction, repeats: bool = False, said_by: str = "order"
    ) -> None:
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
    """Returns a short digest of numbers, by which ranks and restarts compare them."""
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:16]


def _as_indices(given: Any, what: str) -> Indices:
    indices = np.asarray(given)
    if indices.ndim != 1 or (len(indices) and indices.dtype.kind not in "iu"):
        raise ConfigError(
            f"{what} must return indices, one whole number for every place of the epoch; got a "
            f"{type(given).__name__} of shape {list(indices.shape)} and type {indices.dtype}"
        )
    return indices.astype(np.int64, copy=False)


class Weighted(WholeOrder):
    """Draws examples by weight, as torch's WeightedRandomSampler does; a pure function of the seed and the epoch."""

    name = "weighted"

    def __init__(self, count: int, seed: int, weights: Any, replacement: bool = True, draws: int | None = None) -> None:
        super().__init__(count)
        self._seed, self._weights, self._replacement = seed, checked_weights(weights, count), replacement
        self._length = count if draws is None else draws
        # Added up one after the other, which gives the same sums on every machine.
        self._sums = np.cumsum(self._weights)
        there = int(np.count_nonzero(self._weights))
        if not replacement and self._length > there:
            raise ConfigError(
                f"data.order: {self._length} examples cannot be drawn without replacement: {there} of {count} have a "
                "weight above 0. Lower count, or draw with replacement: true"
            )

    @property
    def length(self) -> int:
        return self._length

    def facts(self, epoch: int) -> dict[str, Any]:
        drawn = {"replacement": self._replacement, "length": self._length, "weights": digest(self._weights)}
        return {**super().facts(epoch), **drawn}

    def at(self, epoch: int, places: Indices) -> Indices:
        if not self._replacement:
            return super().at(epoch, places)
        # Above 0 and up to the whole sum: an example of weight 0 has no room between two sums, and is never met.
        wanted = uniform(places, WEIGHTED_STREAM, self._seed, epoch) * self._sums[-1]
        found: Indices = np.searchsorted(self._sums, wanted, side="left").astype(np.int64, copy=False)
        return found

    def make(self, epoch: int) -> Indices:
        """Without replacement: each example waits for an exponential time at the rate of its weight; the first come."""
        there = np.flatnonzero(self._weights)
        times = -np.log(uniform(there, WEIGHTED_STREAM, self._seed, epoch)) / self._weights[there]
        return there[np.argsort(times, kind="stable")[: self._length]].astype(np.int64, copy=False)


def checked_weights(given: Any, count: int) -> Numbers:
    weights = numbers(given, count, "weights")
    with np.errstate(over="ignore"):
        total = weights.sum()
    if not total or not np.isfinite(total):
        raise ConfigError(f"data.order: the {count} weights add up to {total:g}, and cannot be drawn by: scale them")
    return weights


def numbers(given: Any, count: int, name: str) -> Numbers:
    """Returns one number per example, 0 or more, from whatever holds them."""
    detached = given.detach().cpu() if hasattr(given, "detach") else given
    try:
        found = np.asarray(detached, dtype=np.float64)
    except (TypeError, ValueError) as error:
        kind = type(given).__name__
        raise ConfigError(f"data.order: {name} must be one number per example, got a {kind}: {error}") from None
    if found.shape != (count,):
        raise ConfigError(
            f"data.order: there are {count} examples, but {name} of shape {list(found.shape)}: give one number for each"
        )
    wrong = np.flatnonzero(~np.isfinite(found) | (found < 0))
    if len(wrong):
        raise ConfigError(
            f"data.order: the {name.removesuffix('s')} of example {wrong[0]} is {found[wrong[0]]:g} ({len(wrong)} such "
            f"of {count}): {name} are 0 or more, and finite"
        )
    return found


class Buckets(Order):
    """A random order, of which every so many batches are sorted by length, cut, and shuffled: little is padding.

    Every example comes once in an epoch, in new company every time. Only the last batch may be short, and it is of any
    length.
    """

    name = "buckets"

    def __init__(self, count: int, seed: int, lengths: Any, batch_size: int, window: int | None = None) -> None:
        super().__init__(count)
        self._lengths = numbers(lengths, count, "lengths")
        self._seed, self._batch_size, self._window = seed, batch_size, window or WINDOW
        self._permutation = functools.lru_cache(1)(functools.partial(Permutation, count, BUCKET_STREAM, seed))
        self._sorted = functools.lru_cache(1)(self._sort)

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

    def _sort(self, epoch: int, window: int) -> Indices:
        start = window * self._window * self._batch_size
        drawn = self._permutation(epoch)(np.arange(start, min(start + self._window * self._batch_size, self.count)))
        by_length = drawn[np.argsort(self._lengths[drawn], kind="stable")]
        full, rest = divmod(len(drawn), self._batch_size)
        # The short batch is cut out at a random place: taken off the end it would always have the longest examples.
        key = (BUCKET_STREAM, self._seed, epoch, window)
        cut = int(words_of(1, *key)[0] % np.uint64(full + 1)) * self._batch_size
        short = by_length[cut : cut + rest]
        batches = np.concatenate([by_length[:cut], by_length[cut + rest :]]).reshape(full, self._batch_size)
        return np.concatenate([batches[Permutation(full, *key)(np.arange(full))].reshape(-1), short])


# What run.batches takes: a name, a mapping with one as its type, a function, or an order.
OrderChoice = str | Mapping[str, Any] | OrderFunction | Order | None


def choose(asked: OrderChoice, shuffle: bool, dataset: Any, batch_size: int, seed: int) -> Order:
    """Returns the order that a loop asks for by `order` and `shuffle`; refused where they contradict each other."""
    count = len(dataset)
    if asked is None:
        return Shuffled(count, seed) if shuffle else Sequential(count)
    if isinstance(asked, Order):
        if asked.count != count:
            raise ConfigError(f"run.batches: the order is one of {asked.count} examples, and the dataset has {count}")
        return asked
    if callable(asked):
        asked = {"type": "own", "order": asked}
    if not isinstance(asked, (str, Mapping)):
        raise ConfigError(f"run.batches: order must be a name, a mapping or a function, got {asked!r}")
    given = {"type": asked} if isinstance(asked, str) else dict(asked)
    values = {name: given.pop(name) for name in _VALUES if name in given and not isinstance(given[name], str)}
    ordering = validate(Ordering, given, {}, "run.batches: order")
    if not shuffle and ordering.type != "sequential":
        raise ConfigError(
            f"run.batches: shuffle=False, but the order is {ordering.type}: leave shuffle out, or ask for "
            "order='sequential'"
        )
    return make_order(ordering, dataset, batch_size, seed, values)


def make_order(
    ordering: Ordering,
    dataset: Any,
    batch_size: int,
    seed: int,
    values: Mapping[str, Any],
    said_by: str = "order",
) -> Order:
    """Makes an order of a dataset's examples. `values` has what is no plain setting: weights, lengths, a function."""
    count = len(dataset)
    if ordering.type == "own":
        own: Callable[..., Any] | None = values.get("order")
        if not callable(own):
            raise ConfigError(
                "data.order: own needs an order: define order(self, epoch, seed, count) in the task, or give "
                "run.batches a function: order=function"
            )
        return CustomOrder(count, seed, own, bool(values.get("repeats", False)), said_by)
    if ordering.type == "weighted":
        weights = of_every_example("weights", ordering.weights, values, dataset)
        return Weighted(count, seed, weights, ordering.replacement, ordering.count)
    if ordering.type == "buckets":
        lengths = of_every_example("lengths", ordering.lengths, values, dataset)
        return Buckets(count, seed, lengths, batch_size, ordering.window)
    return Shuffled(count, seed) if ordering.type == "shuffled" else Sequential(count)


def of_every_example(name: str, file: str | None, values: Mapping[str, Any], dataset: Any) -> Any:
    """Returns one value per example: from a file, from the caller, or from the dataset; of a part, its own."""
    whole: Any = dataset.dataset if isinstance(dataset, Part) else dataset
    found = _read(name, file) if file is not None else values.get(name)
    if found is None:
        found = getattr(whole, name, None)
        found = found() if callable(found) else found
    if found is None:
        raise ConfigError(
            f"data.order: {'weighted' if name == 'weights' else 'buckets'} needs {name}, one number per example: "
            f"define {name}(self) in the task, give the dataset an attribute {name}, or name a file of numpy's "
            f"(data.order.{name}: FILE.npy)"
        )
    if not isinstance(dataset, Part):
        return found
    of_whole = np.asarray(found.detach().cpu() if hasattr(found, "detach") else found)
    if of_whole.shape != (len(whole),):
        raise ConfigError(
            f"data.order: train_data() has {len(whole)} examples, but {name} has shape {list(of_whole.shape)}: give "
            "one number for each; data.split takes those of its part"
        )
    return of_whole[dataset.whole(np.arange(len(dataset)))]


def _read(name: str, file: str) -> Any:
    try:
        return np.lib.format.open_memmap(Path(in_home(file)).absolute(), mode="r")
    except (OSError, ValueError) as error:
        raise ConfigError(f"data.order.{name}: {file} cannot be read as an array of numpy's: {error}") from None
