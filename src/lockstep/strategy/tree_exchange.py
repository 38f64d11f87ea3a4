"""Continues the tree of `train.exact` over ranks: in buckets, while the last leaf of a rank is still computed.

A thread exchanges one bucket after the other. Which buckets there are, and in which order, ranks know from the step
before; when each of them begins is up to the backward pass of each rank. How tensors are divided into buckets, and
buckets between ranks, changes no sum.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.distributed.group import Group
from lockstep.runtime.base import Runtime, in_buckets, meeting_place
from lockstep.strategy.parameters import Parameters

Node = dict[Hashable, Tensor]
Bucket = list[tuple[Hashable, Tensor]]

_BUCKET_BYTES = 32 * 2**20
# Gradients begin at multiples of so many elements, as they would by themselves: reductions on CUDA depend on it.
_ALIGNED = 128


class Thread(Protocol):
    def do(self, what: Callable[[], None]) -> None: ...

    def wait(self) -> None: ...


class TreeExchange:
    """The buckets of a step. `fill` writes this rank's sums of some parameters into the tensors it is given."""

    def __init__(self, runtime: Runtime, group: Group, fill: Callable[[Sequence[Any], Node], None]) -> None:
        self._runtime, self._group, self._fill = runtime, group, fill
        self.thread: Thread = _Background(runtime.device)
        self._own_group: Any = None  # apart from the one that the main thread uses
        self._buckets: list[Bucket] = []
        self._number: dict[Hashable, int] = {}  # of each parameter's bucket
        self._waiting: list[set[Hashable]] = []  # for the backward pass, of each bucket
        self._sent: list[Node] = []
        self._stale: set[int] = set()  # buckets whose gradients have changed since they were sent
        self._as_sent: dict[Any, tuple[Tensor | None, int]] = {}  # the gradients of parameters, and their versions
        self._planned: list[int] = []
        self.armed = False

    def plan(self, parameters: Parameters) -> None:
        """Sets what the following steps exchange. All ranks call it alike."""
        if self._own_group is None and parameters:
            with self._group.activity.within("making a group", waits=True), self._group.closed_to_others():
                limit = timedelta(seconds=self._group.timeout)
                self._own_group = dist.new_group(backend=self._runtime.backend, timeout=limit)
        if list(map(id, parameters)) != self._planned:
            self._planned = list(map(id, parameters))
            self._buckets = buckets([(each, each) for each in parameters])
            self._number = {key: number for number, bucket in enumerate(self._buckets) for key, _ in bucket}

    def arm(self) -> None:
        """The last micro-batch of the step begins."""
        self.armed = bool(self._buckets)
        self._waiting = [{key for key, _ in bucket} for bucket in self._buckets]
        self._sent, self._stale, self._as_sent = [], set(), {}

    def computed(self, parameter: nn.Parameter) -> None:
        """The backward pass is done with a parameter."""
        number = self._number.get(parameter) if self.armed else None
        if number is None:
            return
        if number < len(self._sent):
            self._stale.add(number)
            return
        self._waiting[number].discard(parameter)
        while len(self._sent) < len(self._buckets) and not self._waiting[len(self._sent)]:
            self._send()

    def changed(self, parameters: Parameters) -> None:
        """Gradients are no longer what they were when they were computed."""
        for each in parameters:
            number = self._number.get(each) if self.armed else None
            if number is not None and number < len(self._sent):
                self._stale.add(number)
            elif number is not None:
                self._waiting[number].add(each)

    def finish(self) -> tuple[Node, set[int]]:
        """Sends what is left, and waits. Returns the sums over ranks, and the buckets that have to be sent again."""
        while self.armed and len(self._sent) < len(self._buckets):
            self._send()
        self.thread.wait()
        for key, as_sent in self._as_sent.items():  # model.zero_grad(), or a hook of the user after ours
            if not _is_same(key.grad, *as_sent):
                self._stale.add(self._number[key])
        self._as_sent = {}
        self.armed, found = False, {key: value for node in self._sent for key, value in node.items()}
        self._sent = []
        return found, self._stale

    def keys(self, numbers: Sequence[int]) -> list[Hashable]:
        return [key for number in numbers for key, _ in self._buckets[number]]

    @property
    def count(self) -> int:
        return len(self._buckets)

    @torch.no_grad()
    def _send(self) -> None:
        bucket = self._buckets[len(self._sent)]
        rank, size, group = self._group.rank, self._group.world_size, self._own_group
        flat, views = flat_views(bucket, size)
        self._fill([key for key, _ in bucket], views)
        self._sent.append(views)
        self._as_sent |= {key: (key.grad, 0 if key.grad is None else key.grad._version) for key, _ in bucket}  # type: ignore[attr-defined]
        self.thread.do(lambda: add_over_ranks(flat, rank, size, group))


def _is_same(now: Tensor | None, before: Tensor | None, version: int) -> bool:
    return now is before and (now is None or now._version == version)


class _Background:
    """A thread that does one thing after the other; on CUDA in its own stream, after what was queued until then."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asked: queue.SimpleQueue[tuple[Callable[[], None], Any]] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._stream: Any = None
        self._thread: threading.Thread | None = None
        self._under_way = 0

    def do(self, what: Callable[[], None]) -> None:
        if self._thread is None:
            self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
            self._thread = threading.Thread(target=self._work, name="lockstep-exchange", daemon=True)
            self._thread.start()
        self._under_way += 1
        self._asked.put((what, torch.cuda.current_stream(self._device).record_event() if self._stream else None))

    def wait(self) -> None:
        """Waits for everything; raises the first error."""
        errors = [self._ended.get() for _ in range(self._under_way)]
        self._under_way = 0
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        for error in errors:
            if error is not None:
                raise error

    def _work(self) -> None:
        failed: BaseException | None = None
        while True:
            what, queued = self._asked.get()
            try:
                if failed is None and queued is not None:
                    with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                        self._stream.wait_event(queued)
                        what()
                elif failed is None:
                    what()
            except BaseException as error:  # raised in the main thread
                failed = error
            self._ended.put(failed)


def buckets(wanted: Sequence[tuple[Hashable, Any]]) -> list[Bucket]:
    """Groups tensors of one dtype and device, each group of a limited size."""
    return in_buckets(wanted, lambda each: each[1].nbytes, _BUCKET_BYTES, lambda each: (each[1].dtype, each[1].device))


def flat_views(bucket: Bucket, world_size: int) -> tuple[Tensor, Node]:
    """Returns a tensor of zeros for a bucket, and the parts of it in their shapes."""
    starts, end = [], 0
    for _, tensor in bucket:
        starts.append(end)
        end += -(-tensor.numel() // _ALIGNED) * _ALIGNED
    flat = torch.zeros(-(-end // world_size) * world_size, dtype=bucket[0][1].dtype, device=bucket[0][1].device)
    return flat, {
        key: flat[start : start + tensor.numel()].as_strided(tensor.shape, _strides(tensor), start)
        for start, (key, tensor) in zip(starts, bucket, strict=True)
    }


def _strides(tensor: Tensor) -> Sequence[int]:
    """Returns the layout of a gradient, which is that of its parameter: norms depend on it."""
    dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()


def add_over_ranks(flat: Tensor, rank: int, world_size: int, group: Any = None) -> None:
    """Sums a tensor over ranks in place in the order of a binary tree: halving what is exchanged, then the way back."""
    low, high, distance = 0, flat.numel(), 1
    exchanges: list[tuple[int, tuple[int, int], tuple[int, int]]] = []
    while distance < world_size:
        partner, middle = rank ^ distance, (low + high) // 2
        kept, given = ((low, middle), (middle, high)) if rank < partner else ((middle, high), (low, middle))
        flat[slice(*kept)] += _swapped(flat[slice(*given)], kept[1] - kept[0], partner, group)
        exchanges.append((partner, kept, given))
        (low, high), distance = kept, distance * 2
    for partner, kept, given in reversed(exchanges):
        flat[slice(*given)] = _swapped(flat[slice(*kept)], given[1] - given[0], partner, group)


def _swapped(mine: Tensor, length: int, partner: int, group: Any) -> Tensor:
    """Sends a tensor to another rank, and returns what that rank sends. Gloo sends from the host alone."""
    here = mine.to(meeting_place(mine.device))
    theirs = torch.empty(length, dtype=mine.dtype, device=here.device)
    sent = dist.P2POp(dist.isend, here, partner, group)
    received = dist.P2POp(dist.irecv, theirs, partner, group)
    for work in dist.batch_isend_irecv([sent, received]):
        work.wait()
    return theirs.to(mine.device)
