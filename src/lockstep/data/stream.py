"""Batches from a source of one's own, of which every rank has a share, brought into step.

The shares need not be equal. So before a batch is handed out, all ranks tell each other how many examples they have for
it (counts.py), at least one batch ahead so that the last is known as such. A source without a state is read no further
ahead unless the caller allows it: its batches may depend on what was trained before.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from lockstep.data.counts import with_counts
from lockstep.data.order import MicroBatch
from lockstep.data.seeding import Key, generators_kept, seed_by
from lockstep.data.sources import is_stateful
from lockstep.distributed.group import Group
from lockstep.distributed.topology import ranks_text
from lockstep.errors import ConfigError

Count = Callable[[Any], int]

_BATCHES = 8  # random numbers for what is read: 1 to 7 are others'


def streamed(
    group: Group,
    batches: Iterable[Any],
    count: Count,
    name: str,
    dp_rank: int | None = None,
    dp_size: int | None = None,
    start: int = 0,
    key: Sequence[int] | None = None,
) -> Generator[tuple[MicroBatch, Any], None, None]:
    """This rank's micro-batch of every global batch from `start` on, until no rank has any examples left.

    With a `key`, batches are read ahead, with random numbers of their own, so that it changes nothing for training. A
    source that has a state has it noted with each batch.
    """
    dp_rank, dp_size = group.rank if dp_rank is None else dp_rank, group.world_size if dp_size is None else dp_size
    reading = _Ahead(batches, count, name, dp_rank, start, key)
    coming = with_counts(group, dp_rank, dp_size, name, reading.next, ahead=key is not None)
    spare: Any = None  # what a rank that has run out computes, to take part: it counts for nothing
    number, ((batch, place), counts) = start, next(coming)
    lacking = [each for each, examples in enumerate(counts) if examples == 0]
    if lacking and not start:
        raise ConfigError(
            f"{ranks_text(lacking)} of {len(counts)} got no examples of {name!r}: all ranks must have some. Split the "
            "source into more pieces (Ray Data: dataset.repartition), or use fewer workers"
        )
    while sum(counts):
        following = next(coming)
        mine, whole = counts[dp_rank], sum(counts)
        spare = batch if mine else spare if spare is not None else reading.again()
        weight, none = mine * dp_size / whole, np.empty(0, dtype=np.int64)
        yield (
            MicroBatch(number, 0, none, mine, weight, whole, True, not sum(following[1]), place),
            batch if mine else spare,
        )
        number, ((batch, place), counts) = number + 1, following


class _Ahead:
    """Reads batches, each with random numbers of its own where the source has a state."""

    def __init__(
        self, batches: Iterable[Any], count: Count, name: str, dp_rank: int, number: int, key: Sequence[int] | None
    ) -> None:
        self._source, self._count, self._name = batches, count, name
        self._dp_rank, self._key, self._number = dp_rank, key, number
        with self._random_numbers():
            self._batches: Iterator[Any] = iter(batches)

    def next(self) -> tuple[tuple[Any, Callable[[], Any] | None], int]:
        """The next batch, where the source is once it is done, and how many examples it has."""
        with self._random_numbers():
            batch = next(self._batches, None)
        self._number += 1
        examples = 0 if batch is None else self._count(batch)
        place = None
        if self._key is not None and is_stateful(self._source):
            state = copy.deepcopy(self._source.state_dict())  # type: ignore[attr-defined]
            place = partial(_same, state)
        return (batch, place), examples

    def again(self) -> Any:
        """A batch for a rank that ran out before the run was resumed: it has none at hand."""
        with self._random_numbers():
            found = next(iter(self._source), None)
        if found is None:
            raise ConfigError(
                f"{self._name!r}: this rank ran out of it, and it cannot be read again: its __iter__ must begin anew "
                "each time"
            )
        return found

    def _random_numbers(self) -> contextlib.AbstractContextManager[None]:
        if self._key is None:
            return contextlib.nullcontext()
        return _seeded((_BATCHES, *self._key, self._dp_rank, self._number))


@contextlib.contextmanager
def _seeded(key: Key) -> Iterator[None]:
    with generators_kept():
        seed_by(key)
        yield


def _same(state: Any) -> Any:
    return state


def counted(batches: Iterator[Any], count: Count) -> Iterator[tuple[int, int, Any]]:
    """Batches with how many examples count, and how many there are: all of them."""
    return ((length := count(batch), length, batch) for batch in batches)
