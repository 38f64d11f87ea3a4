"""Batches from a source that cannot be asked for by index, brought into step.

Every rank has a share of the source, and the shares need not be equal. So before a batch is handed out, all ranks tell
each other how many examples they have for it: a gathering per step, one batch ahead so that the last is known as such.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from lockstep.data.order import MicroBatch
from lockstep.distributed.group import Group
from lockstep.distributed.topology import ranks_text
from lockstep.errors import ConfigError

Count = Callable[[Any], int]


def streamed(group: Group, batches: Iterator[Any], count: Count, name: str) -> Iterator[tuple[MicroBatch, Any]]:
    """This rank's micro-batch of every global batch, until no rank has any examples left."""
    spare: Any = None  # what a rank that has run out computes, to take part: it counts for nothing
    number, batch, counts = 0, *_next(group, batches, count, name)
    lacking = [rank for rank, examples in enumerate(counts) if examples == 0]
    if lacking:
        raise ConfigError(
            f"{ranks_text(lacking)} of {len(counts)} got no examples of {name!r}: all ranks must have some. Split the "
            "source into more pieces (Ray Data: dataset.repartition), or use fewer workers"
        )
    while sum(counts):
        following, coming = _next(group, batches, count, name)
        mine, whole = counts[group.rank], sum(counts)
        spare = batch if mine else spare
        weight = mine * group.world_size / whole
        none = np.empty(0, dtype=np.int64)
        yield MicroBatch(number, 0, none, mine, weight, whole, True, not sum(coming)), batch if mine else spare
        number, batch, counts = number + 1, following, coming


def _next(group: Group, batches: Iterator[Any], count: Count, name: str) -> tuple[Any, list[int]]:
    batch = next(batches, None)
    examples = 0 if batch is None else count(batch)
    return batch, group.gather(examples, f"how many examples of {name!r} every rank has")


def counted(batches: Iterator[Any], count: Count) -> Iterator[tuple[int, int, Any]]:
    """Batches with how many examples count, and how many there are: all of them."""
    return ((length := count(batch), length, batch) for batch in batches)
