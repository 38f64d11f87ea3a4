"""Worker processes that fetch data ahead of time: they end with their rank, and with nothing else.

A signal to the whole process group, as `timeout`, systemd and most schedulers send it, asks the rank to save and leave.
It still needs its workers then, so they ignore it. They are ended by SIGKILL instead of SIGTERM, also where one is
stuck, and by the system where the rank itself was killed.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import pickle
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.queues import Queue
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data._utils import signal_handling

from lockstep.distributed.from_worker import FromWorker
from lockstep.distributed.signals import QUIET_SIGNALS, die_with_parent
from lockstep.distributed.watch.stacks import show_stack_on_request
from lockstep.errors import ConfigError

_ALIGNED_TO = 64
_LEAST_PART = 1 / 4  # of the file that a view must be: so a kept one holds at most four times its own size
_NUMBERS = {int: torch.int64, float: torch.float64}  # as default_collate has them


@dataclass(frozen=True)
class Loading:
    """How examples are fetched: here, or by worker processes ahead of time."""

    workers: int = 0
    pin_memory: bool = False
    prefetch: int | None = None
    persistent: bool = False  # whether workers of data with an index stay for the passes that follow


def loader(
    dataset: Dataset[Any], loading: Loading, count: int = 0, sampler: Iterable[Any] | None = None
) -> DataLoader[Any]:
    """Makes a DataLoader whose `count` workers return whole batches; they live until `end`."""
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=sampler,
        num_workers=count or loading.workers,
        collate_fn=unchanged,
        pin_memory=loading.pin_memory and torch.cuda.is_available(),
        prefetch_factor=loading.prefetch or 2,
        persistent_workers=True,
        multiprocessing_context=start_method(),
        worker_init_fn=begin,
        # Making an iterator draws a number, and a resumed epoch makes one more than the original.
        generator=torch.Generator(),
    )


def start_method() -> str:
    """Returns multiprocessing's default, but never a fork server: workers would end with that, not with their rank."""
    return "fork" if multiprocessing.get_start_method() == "fork" else "spawn"


def fetched(loader: DataLoader[Any], name: str) -> Iterator[Any]:
    """Starts the workers of a loader where they do not run yet; yields what they fetch of the data called `name`."""
    try:
        with signals_kept_back():
            iterator: Any = iter(loader)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        if start_method() == "fork":  # which pickles nothing
            raise
        raise ConfigError(
            f"data.workers: {name} cannot be sent to worker processes ({error}). Define its functions and classes at "
            "the top level of a module (no lambda) and open files in the worker, or set data.workers to 0"
        ) from None
    for worker in iterator._workers:
        worker._popen.terminate = worker._popen.kill  # they ignore SIGTERM
    for batch in iterator:
        if isinstance(batch, FromWorker):
            raise batch.error()
        yield batch


def unchanged(batch: Any) -> Any:
    """In place of what torch would do to a batch from a worker, and not to one that is fetched here."""
    return batch


def begin(worker: int) -> None:
    for number in QUIET_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, QUIET_SIGNALS)
    die_with_parent()
    show_stack_on_request()
    Queue._on_queue_feeder_error = _not_sent  # type: ignore[attr-defined]


def _not_sent(queue: Queue[Any], error: Exception, item: Any) -> None:
    """Sends the error in place of a batch that cannot be pickled: the rank would wait for the batch for ever."""
    error.add_note("a batch cannot be sent from a data worker: return tensors and plain data, or set data.workers to 0")
    queue.put((item[0], FromWorker.of(error)))


@contextlib.contextmanager
def signals_kept_back() -> Iterator[None]:
    """Blocks signals while workers are started, until they have set which they ignore."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, QUIET_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end(loader: DataLoader[Any], at_once: bool) -> None:
    """Ends the workers of a loader: when they have finished what they are doing, or at once."""
    iterator: Any = getattr(loader, "_iterator", None)
    if iterator is None:
        return
    if at_once and iterator._worker_pids_set:
        signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]  # torch would report them as workers that failed
        iterator._worker_pids_set = False
        for worker in iterator._workers:
            worker.kill()
    iterator._shutdown_workers()


class Column(NamedTuple):
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, memory: Tensor) -> Tensor:
        return memory[self.offset : self.offset + self.size].view(self.dtype).view(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Packed(NamedTuple):
    """A batch on its way from a worker in one file of shared memory, where torch has one for every tensor.

    Columns are views of it. A small one (labels) is copied out: a view that is kept keeps the whole file.
    """

    memory: Tensor  # bytes
    columns: tuple[Column, ...]
    keys: tuple[Any, ...] | None  # of mappings; None: a list

    def unpacked(self) -> Any:
        # In page-locked memory, a batch is on its way to a device: a copy would not be page-locked.
        shared = self.memory.is_shared()  # type: ignore[no-untyped-call]
        least = _LEAST_PART * len(self.memory) if shared else 0
        found = [each.of(self.memory).clone() if each.size < least else each.of(self.memory) for each in self.columns]
        return found if self.keys is None else dict(zip(self.keys, found, strict=True))


def collate_packed(examples: Sequence[Any]) -> Any:
    """In a worker: collates as default_collate does; tuples, lists and dicts of tensors are packed."""
    first = examples[0]
    keys = tuple(first) if type(first) is dict else None
    if keys is None and type(first) not in (tuple, list):
        return default_collate(list(examples))
    width = len(first)
    if width < 2 or any(type(each) is not type(first) or len(each) != width for each in examples):
        return default_collate(list(examples))
    rows = [[each[key] for key in keys] for each in examples] if keys is not None else examples
    values = list(zip(*rows, strict=True))
    columns, size = [], 0
    for column in values:
        shape_and_type = _shape_and_type(column)
        if shape_and_type is None:
            return default_collate(list(examples))
        shape, dtype = shape_and_type
        columns.append(Column(size, dtype, (len(examples), *shape)))
        size += -(-math.prod(columns[-1].shape) * dtype.itemsize // _ALIGNED_TO) * _ALIGNED_TO
    if not size:
        return default_collate(list(examples))
    storage: Any = torch.UntypedStorage._new_shared(size, device="cpu")  # type: ignore[no-untyped-call]
    memory = torch.empty(0, dtype=torch.uint8).set_(storage)
    for spec, column in zip(columns, values, strict=True):
        if isinstance(column[0], Tensor):
            torch.stack(column, out=spec.of(memory))
        else:
            spec.of(memory).copy_(torch.tensor(column, dtype=spec.dtype))
    return Packed(memory, tuple(columns), keys)


def _shape_and_type(column: Sequence[Any]) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Returns the shape and type of a column; None where its values differ in them."""
    first = column[0]
    if type(first) in _NUMBERS:
        return ((), _NUMBERS[type(first)]) if all(type(each) is type(first) for each in column) else None
    if type(first) is not Tensor or first.layout is not torch.strided or first.device.type != "cpu":
        return None
    shape, dtype = first.shape, first.dtype
    alike = all(
        type(each) is Tensor and each.shape == shape and each.dtype is dtype and not each.requires_grad
        for each in column
    )
    return (tuple(shape), dtype) if alike else None
