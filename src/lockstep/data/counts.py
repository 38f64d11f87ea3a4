"""Exchanges how many examples every rank has for the next batches of a stream, for several batches at a time.

Shares of a stream need not be equal, and the weight of a rank in a batch depends on what the others have. An exchange
costs milliseconds. So each rank reads some batches ahead and tells the counts of all of them at once: as many as come
in a fraction of a second and fit into a little memory. How many is itself agreed, by the exchange before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from lockstep.distributed.group import Group
from lockstep.errors import ConfigError
from lockstep.runtime.moving import tensors_of

Item = TypeVar("Item")

# What is read ahead of an exchange, at most.
_SECONDS = 0.2
_BYTES = 64 * 2**20
_TENSORS = 128  # each from a worker is an open file
_BATCHES = 32


def with_counts(
    group: Group, dp_rank: int, dp_size: int, name: str, read: Callable[[], tuple[Item, int]], ahead: bool = True
) -> Iterator[tuple[Item, list[int]]]:
    """Yields what `read` returns, with how many examples each share has for that batch. Without end.

    `read` returns a batch and how many examples it has, 0 from the end on; without `ahead`, one is read at a time.
    """
    before = batches = 1
    last = time.monotonic()
    while True:
        items = [read() for _ in range(batches)]
        now = time.monotonic()
        more = _affordable((now - last) / before, items[0][0]) if ahead and group.world_size > 1 else 1
        last, before = now, batches
        message: list[Any] = [dp_rank, [count for _, count in items], min(more, 2 * batches)]
        told = group.gather(message, f"how many examples of {name!r} every rank has")
        for index, (item, _) in enumerate(items):
            yield item, _of_shares([(each[0], each[1][index]) for each in told], dp_size, name)
        batches = min(each[2] for each in told)


def _affordable(seconds: float, item: Any) -> int:
    """How many batches can be read ahead, if each takes so long and is as large as this one."""
    sizes = [tensor.nbytes for _, tensor in tensors_of(item)]
    limits = _SECONDS / max(seconds, 1e-9), _BYTES / max(sum(sizes), 1), _TENSORS / max(len(sizes), 1), _BATCHES
    return max(1, int(min(limits)))


def _of_shares(told: Sequence[tuple[int, int]], dp_size: int, name: str) -> list[int]:
    """How many examples each share has, of what every rank tells of its own; several may have the same share."""
    counts: dict[int, int] = {}
    for rank, (dp_rank, count) in enumerate(told):
        if counts.setdefault(dp_rank, count) != count:
            raise ConfigError(
                f"{name}: rank {rank} has {count} examples for a batch, and another rank that computes the same share "
                f"of it {counts[dp_rank]}: ranks with the same share must read the same, in the same order"
            )
    return [counts[dp_rank] for dp_rank in range(dp_size)]
