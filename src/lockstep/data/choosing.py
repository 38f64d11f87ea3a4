"""From what a loop or a config asks for to the order of its examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config.data import Ordering
from lockstep.config.load import validate
from lockstep.data.buckets import Buckets
from lockstep.data.orders import Order, Own, OwnOrder, Sequential, Shuffled
from lockstep.data.split import Part
from lockstep.data.weighted import Weighted
from lockstep.errors import ConfigError

# Of a loop of one's own: one of these words, a mapping with one as its type, a function, or what was made before.
Asked = str | Mapping[str, Any] | OwnOrder | Order | None

# What a mapping may hold in place of what a config can only name.
_VALUES = ("weights", "lengths", "order", "repeats")


def choose(asked: Asked, shuffle: bool, dataset: Any, batch_size: int, seed: int) -> Order:
    """The order that a loop asks for by `order` and `shuffle`; refused where they contradict each other."""
    count = len(dataset)
    if asked is None:
        return Shuffled(count, seed) if shuffle else Sequential(count)
    if isinstance(asked, Order):
        if asked.count != count:
            raise ConfigError(f"run.batches: the order is one of {asked.count} examples, and the dataset has {count}")
        return asked
    if callable(asked):
        asked = {"type": "own", "order": asked}
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
    """An order of the examples of a dataset. `values` has what is no plain setting: weights, lengths, a function."""
    count = len(dataset)
    if ordering.type == "own":
        own: Callable[..., Any] | None = values.get("order")
        if not callable(own):
            raise ConfigError(
                "data.order: own needs an order: define order(self, epoch, seed, count) in the task, or give "
                "run.batches a function: order=function"
            )
        return Own(count, seed, own, bool(values.get("repeats", False)), said_by)
    if ordering.type == "weighted":
        weights = _of_every_example("weights", ordering.weights, values, dataset)
        return Weighted(count, seed, weights, ordering.replacement, ordering.count)
    if ordering.type == "buckets":
        lengths = _of_every_example("lengths", ordering.lengths, values, dataset)
        return Buckets(count, seed, lengths, batch_size, ordering.window)
    return Shuffled(count, seed) if ordering.type == "shuffled" else Sequential(count)


def _of_every_example(name: str, file: str | None, values: Mapping[str, Any], dataset: Any) -> Any:
    """One value per example: of a file, of whoever asks, or of the dataset itself; of a part, those that are in it."""
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
    place = Path(file).expanduser().resolve()
    try:
        return np.lib.format.open_memmap(place, mode="r")
    except (OSError, ValueError) as error:
        raise ConfigError(f"data.order.{name}: {place} cannot be read as an array of numpy's: {error}") from None
