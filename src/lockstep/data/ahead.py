"""Batches whose way to the device begins before they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lockstep.data.order import MicroBatch


def one_ahead(
    micros: Iterator[tuple[MicroBatch, Any]], begin: Callable[[Any], Any]
) -> Iterator[tuple[MicroBatch, Any]]:
    """The same micro-batches, each begun when the one before it is handed out: its copy goes on during that step.

    The first is handed out as soon as it is there. Nobody counts a batch before its step is done, so that one which was
    begun and not handed out is fetched again after a restart.
    """
    first = next(micros, None)
    if first is None:
        return
    yield first[0], begin(first[1])
    coming: tuple[MicroBatch, Any] | None = None
    for micro, batch in micros:
        begun = micro, begin(batch)
        if coming is not None:
            yield coming
        coming = begun
    if coming is not None:
        yield coming
