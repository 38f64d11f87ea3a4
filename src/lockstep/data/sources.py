"""What a stream is: data that is read from its beginning on, the pieces it falls into, and how one is opened.

Three kinds. One that can be asked for a piece of itself, by Hugging Face's names `num_shards` and `shard(num_shards,
index)`, is divided by its pieces. Any other is read whole by every rank, each of which keeps its examples. One that is
a rank's share already (`is_share`) is not divided at all.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from lockstep.errors import ConfigError

PIECES, WHOLE, OWN = "pieces", "whole", "own"


def is_stream(data: Any) -> bool:
    """Whether data is read from its beginning on; other data is asked for by index."""
    if isinstance(data, IterableDataset):
        return True
    by_index = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    return hasattr(data, "__iter__") and not by_index


def check_stream(data: Any, name: str) -> None:
    """Refuse what cannot be read again, or is not made of examples."""
    if getattr(data, "batch_sampler", None) is not None:
        raise ConfigError(
            f"{name}: a {type(data).__name__} makes batches, and Lockstep divides examples among ranks and puts them "
            "into batches itself: return its dataset (data.workers sets how many workers read it), or make the loader "
            "with batch_size=None. Batches of a loader of one's own are for run.stream"
        )
    if hasattr(data, "__next__") and not is_stateful(data):
        raise ConfigError(
            f"{name}: a {type(data).__name__} can be read once, and the next epoch, an evaluation and a resume read it "
            "again: return an object whose __iter__ makes it"
        )


def is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


class Opened:
    def __init__(self, stream: Any, state: Any, name: str) -> None:
        self.ended = self.closed = False
        self._holder = stream if is_stateful(stream) and keeps_all(stream) else None
        if self._holder is not None and state is not None:
            self._holder.load_state_dict(copy.deepcopy(state))
        iterator: Any = iter(stream)
        self.examples: Iterator[Any] = iterator
        if self._holder is None and iterator is not stream and is_stateful(iterator):
            self._holder = iterator
            if state is not None:
                iterator.load_state_dict(copy.deepcopy(state))
        if state is not None and self._holder is None:
            raise ConfigError(
                f"{name}: it was saved with a state, and has none any more (no state_dict and load_state_dict): give "
                "them back, or go on from a checkpoint at the end of an epoch"
            )

    def state(self) -> Any:
        """Where it is, or None where it cannot say."""
        return None if self._holder is None else copy.deepcopy(self._holder.state_dict())

    def close(self) -> None:
        self.closed = True
        close = getattr(self.examples, "close", None)
        if callable(close):
            close()


class Source:
    """A stream, and how parts of it are opened. Sent to workers as it is."""

    def __init__(self, data: Any, name: str) -> None:
        self.data, self.name = data, name
        self.pieces = _num_shards(data)  # None where there is no way to have one of them
        self._first: Any = None  # the state before anything was read, of an object that keeps its own place
        self._reading: Opened | None = None
        self._moved = False  # whether another process read on in it before it came here

    def __getstate__(self) -> dict[str, Any]:
        moved = self._moved or (self._reading is not None and not self._reading.ended)
        return {**self.__dict__, "_reading": None, "_moved": moved}

    def kind(self, dp_size: int) -> str:
        """How it is divided among so many."""
        if getattr(self.data, "is_share", False) or getattr(self.data, "_distributed", None) is not None:
            return OWN  # or split by Hugging Face's split_dataset_by_node
        if self.pieces is None or (self.pieces < dp_size and _is_of_datasets(self.data)):
            return WHOLE
        return PIECES

    def open(self, piece: int, count: int, epoch: int | None, state: Any = None) -> Opened:
        """One of `count` pieces, from its beginning or from a state that it had."""
        itself = self.pieces is None
        stream = self.data if itself else self.data.shard(num_shards=count, index=piece)
        set_epoch = getattr(stream, "set_epoch", None)
        if epoch is not None and callable(set_epoch):
            set_epoch(epoch)
        if not itself or not is_stateful(stream):
            return Opened(stream, state, self.name)
        self._begin_anew()
        self._reading = Opened(stream, state, self.name)
        return self._reading

    def _begin_anew(self) -> None:
        """An object that keeps its own place, and was left in the midst of a pass, starts where it was at first."""
        if self._first is None:
            self._first = copy.deepcopy(self.data.state_dict())
        elif self._reading is not None and not self._reading.closed:
            raise ConfigError(
                f"{self.name}: it is being read already, and keeps its place in itself (state_dict): read an object of "
                "its own for the second purpose"
            )
        elif self._moved or (self._reading is not None and not self._reading.ended):
            self._moved = False
            self.data.load_state_dict(copy.deepcopy(self._first))


def keeps_all(stream: Any) -> bool:
    """Whether the state of a stream is all there is to go on by. That of a Hugging Face dataset with a shuffle buffer
    leaves out what the buffer holds, so that examples would be lost; its documentation names both cases."""
    if not _is_of_datasets(stream):
        return True
    waiting = [getattr(stream, "_ex_iterable", None)]
    while waiting:
        each = waiting.pop()
        if type(each).__name__ == "BufferShuffledExamplesIterable" or _batches_tables(each):
            return False
        inner = (getattr(each, "ex_iterable", None), *getattr(each, "ex_iterables", ()))
        waiting += [within for within in inner if within is not None]
    return True


def _num_shards(data: Any) -> int | None:
    """How many pieces there are; None where there is no way to have one of them."""
    count = getattr(data, "num_shards", None)
    return count if isinstance(count, int) and callable(getattr(data, "shard", None)) else None


def _batches_tables(each: Any) -> bool:
    """A batched map() after with_format("arrow")."""
    formatting = getattr(each, "formatting", None)
    return bool(getattr(each, "batched", False)) and bool(getattr(formatting, "is_table", False))


def _is_of_datasets(data: Any) -> bool:
    return type(data).__module__.partition(".")[0] == "datasets"
