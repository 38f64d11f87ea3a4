"""Records what is on a device during a step, and what every operation costs.

Tensors are fake: they have shapes and no memory. Every storage is recorded with its size, the line that made it and its
end; a replay finds the peak and what was alive then. The trackers of torch.distributed._tools keep neither lines nor a
timeline.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import linecache
import multiprocessing
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.errors import ConfigError
from lockstep.strategy.context import CONTEXTS

_WORTH_ASKING = 2**16  # bytes: who made smaller ones does not matter
_ROUNDED_TO = 512  # bytes: what the allocator of GPUs hands out is a multiple of it
_ALIKE = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
# What operators of strategy/context.py exchange.
_OF_PARTS = {"gather_parts": "c10d.allgather_", "add_up_parts": "c10d.allreduce_"}
_TORCH, _LOCKSTEP, _PROCESSES = (
    str(Path(each).parent) for each in (torch.__file__, Path(__file__).parent, multiprocessing.__file__)
)

_ATEN = torch.ops.aten
_COMPUTES_NOTHING = {_ATEN._unsafe_view, _ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty}
_FULLY_SHARD = str(Path(_TORCH) / "distributed" / "fsdp")


class NotTraced(ConfigError):
    """The step does something that depends on the values of tensors."""


@dataclass
class Allocation:
    """A storage, from the event that made it."""

    bytes: int
    operation: str
    line: str
    shape: tuple[int, ...]
    dtype: str
    phase: str
    kind: str | None = None  # where it is known before its end: weights, gradients, optimizer, batch
    born: int = 0
    died: int | None = None
    on_host: bool = False  # kept in the memory of the host (strategy.offload): no device has it


@dataclass
class Operation:
    """The cost of one operation."""

    flops: int
    bytes: int
    dtype: str


@dataclass
class Collective:
    name: str
    group: str
    bytes: int
    by_fully_shard: bool


@dataclass
class Books:
    events: list[tuple[Allocation, int]] = field(default_factory=list)  # with the change in bytes
    operations: list[Operation] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    phases: list[tuple[str, int]] = field(default_factory=list)  # with the event at which each began

    @functools.cached_property
    def backward_starts(self) -> list[int]:
        return [at for name, at in self.phases if name == "backward"]


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations while it is entered."""

    def __init__(self, only_fake: bool = False, optimizes_on_host: bool = False) -> None:
        """`only_fake` ignores real tensors; `optimizes_on_host` is strategy.offload."""
        self._only_fake, self._optimizes_on_host = only_fake, optimizes_on_host
        super().__init__()  # type: ignore[no-untyped-call]
        self.books = Books()
        self._of: Any = WeakIdKeyDictionary()  # storage -> its allocation
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._lines: dict[int, str] = {}  # of the forward pass, by the number of the autograd node
        self._resize = torch.UntypedStorage.resize_
        self._optimizing = self.validating = False
        self.paused = False  # while torch traces, which makes tensors that no device sees
        self.inside = False  # a kernel that is being put together: what it makes on the way is nowhere

    # Telling what is what

    def name(self, tensors: Iterable[Tensor], kind: str, on_host: bool = False) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            found = self._of.get(storage)
            if found is None:
                found = self._allocate(storage, tensor, "before", "", kind)
            found.kind = kind
            found.on_host = found.on_host or on_host

    def is_of_batch(self, tensor: Tensor) -> bool:
        found = self._of.get(tensor.untyped_storage())
        return found is not None and found.kind == "batch"

    @contextlib.contextmanager
    def during(self, state: str, value: bool = True) -> Iterator[None]:
        """Sets a state inside the block: `paused`, `validating` or `inside` a kernel."""
        before = getattr(self, state)
        setattr(self, state, value)
        try:
            yield
        finally:
            setattr(self, state, before)

    @property
    def phase(self) -> str:
        if self.validating:
            return "validation"
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        return "optimizer" if self._optimizing else "forward"

    # What happens

    def __enter__(self) -> Ledger:
        self._hooks = [
            register_optimizer_step_pre_hook(lambda *_: self._optimizer(True)),
            register_optimizer_step_post_hook(lambda *_: self._optimizer(False)),
        ]
        resize, ledger = self._resize, self

        def resized(storage: Any, size: int) -> Any:
            done = resize(storage, size)
            ledger._resized(storage)
            return done

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        for each in self._hooks:
            each.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].device  # which torch asks for several times per operation
        if any(not issubclass(each, _ALIKE) or hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # a tensor of tensors (DTensor): what it does to them comes by here
        kwargs = kwargs or {}
        given = list(_tensors((args, kwargs)))
        if self._only_fake and given and all(map(_has_memory, given)):
            with unset_fake_temporarily():  # the places of a mesh, a dataset's numbers: not of the device
                return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._value_of(args[0])
        made = func(*args, **kwargs)
        if not self.paused:
            self._record(func, args, kwargs, made)
        return made

    def _record(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops

        phase, line = self.phase, None
        outputs = list(_tensors(made))
        for each in outputs:
            storage = each.untyped_storage()
            if storage not in self._of and storage.nbytes():
                line = self._line(phase) if line is None else line
                kind = "communication" if storage.nbytes() > _WORTH_ASKING and _is_for_an_exchange() else None
                self._allocate(storage, each, str(func), line, kind)
        if func in collective_ops:
            if func not in sync_ops:
                group = CollectiveOp.get_process_group(func, args)
                size = CollectiveOp.get_comm_tensor_size(func, made, args, kwargs)
                self.books.collectives.append(
                    Collective(
                        str(func._overloadpacket).removeprefix("aten."), group.group_name, size, _is_for_an_exchange()
                    )
                )
            return
        if func.namespace == "lockstep" and func._opname in _OF_PARTS:
            size = max(each.numel() * each.element_size() for each in [*_tensors(args), *outputs])
            over = str(CONTEXTS[args[1]].group.group_name)
            self.books.collectives.append(Collective(_OF_PARTS[func._opname], over, size, False))
            return
        returns = func._schema.returns
        if returns and returns[0].alias_info is not None and not returns[0].alias_info.is_write:
            return  # a view: nothing is computed
        if func._overloadpacket in _COMPUTES_NOTHING:
            return
        inputs = list(_tensors((args, kwargs)))
        known = ((each, self._of.get(each.untyped_storage())) for each in [*inputs, *outputs])
        moved = sum(each.numel() * each.element_size() for each, found in known if found is None or found.bytes)
        count = flop_registry.get(func._overloadpacket)
        flops = int(count(*args, **kwargs, out_val=made)) if count is not None else 0
        dtype = _name_of(inputs[0].dtype if inputs else outputs[0].dtype) if inputs or outputs else ""
        if not (self._optimizes_on_host and phase == "optimizer"):
            self.books.operations.append(Operation(flops, moved, dtype))

    def _allocate(self, storage: Any, tensor: Tensor, operation: str, line: str, kind: str | None = None) -> Allocation:
        found = Allocation(
            0 if self.inside else _rounded(storage.nbytes()),
            operation,
            line,
            tuple(tensor.shape),
            _name_of(tensor.dtype),
            self.phase,
            kind,
            on_host=self._optimizes_on_host and self.phase == "optimizer",
        )
        self._of[storage] = found
        self._watched[id(found)] = weakref.ref(storage, partial(self._released, found))
        self._add_event(found, found.bytes)
        return found

    def _released(self, allocation: Allocation, _: Any) -> None:
        self._watched.pop(id(allocation), None)
        self._add_event(allocation, -allocation.bytes)
        allocation.died = len(self.books.events)

    def _resized(self, storage: Any) -> None:
        found = self._of.get(storage)
        if found is not None and found.bytes != (size := _rounded(storage.nbytes())):
            self._add_event(found, size - found.bytes)
            found.bytes = size

    def _add_event(self, allocation: Allocation, change: int) -> None:
        phase = self.phase
        if not self.books.phases or self.books.phases[-1][0] != phase:
            self.books.phases.append((phase, len(self.books.events)))
        if change > 0 and not allocation.born:
            allocation.born = len(self.books.events)
        if change:
            self.books.events.append((allocation, change))

    def _optimizer(self, is_on: bool) -> None:
        self._optimizing = is_on

    def _value_of(self, tensor: Tensor) -> Any:
        """A fake tensor has no value. Lockstep only asks whether gradients are finite: they are."""
        frame = _frame_outside(_TORCH)
        if frame is not None and frame.f_code.co_filename.startswith(_LOCKSTEP):
            return True if tensor.dtype is torch.bool else 1.0 if tensor.dtype.is_floating_point else 1
        raise NotTraced(
            f"{_user_line() or 'the task'}: reads the value of a tensor (.item(), bool() or int() of one): a plan is "
            "made without values. Keep it out of the step: log tensors as they are, choose by torch.where"
        )

    def _line(self, phase: str) -> str:
        number = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
        if phase == "backward":
            node: Any = torch._C._current_autograd_node()
            if node is None:
                return "backward"
            of = self._lines.get(node._sequence_nr(), "")
            return f"backward of {of}" if of else f"backward ({node.name()})"
        found = _user_line()
        self._lines[number] = found
        return found


@dataclass(frozen=True)
class Peak:
    bytes: int
    at: int  # the event
    phase: str
    by_kind: dict[str, int]
    largest: list[tuple[Allocation, int]]  # with what each held then


def replay(books: Books, start: int) -> tuple[Peak, list[tuple[int, dict[str, int]]]]:
    """Returns the peak from an event on, and the bytes by kind after each event."""
    now: Counter[str] = Counter()
    alive: dict[int, tuple[Allocation, int]] = {}
    line: list[tuple[int, dict[str, int]]] = []
    most, at = -1, start
    total = 0
    for number, (allocation, change) in enumerate(books.events):
        if not allocation.on_host:
            now[kind_of(allocation, books)] += change
            total += change
        if number >= start:
            line.append((number, dict(now)))
            if total > most:
                most, at = total, number
    for allocation, change in books.events[: at + 1]:
        if allocation.on_host:
            continue
        held = alive.get(id(allocation), (allocation, 0))[1] + change
        if held:
            alive[id(allocation)] = (allocation, held)
        else:
            alive.pop(id(allocation), None)
    kinds: Counter[str] = Counter()
    for allocation, held in alive.values():
        kinds[kind_of(allocation, books)] += held
    largest = sorted(alive.values(), key=lambda each: -each[1])[:10]
    phase = next((name for name, began in reversed(books.phases) if began <= at), "forward")
    return Peak(most, at, phase, dict(kinds), largest), line


def kind_of(allocation: Allocation, books: Books) -> str:
    """Activations are made in the forward pass and read in the backward pass; everything else is temporary."""
    if allocation.kind is not None:
        return allocation.kind
    if allocation.phase != "forward":
        return "temporaries"
    ended = len(books.events) if allocation.died is None else allocation.died
    starts = books.backward_starts
    place = bisect.bisect_right(starts, allocation.born)
    return "activations" if place < len(starts) and ended > starts[place] else "temporaries"


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _has_memory(tensor: Tensor) -> bool:
    """Whether a tensor is real: neither fake nor functional."""
    return type(tensor) in _ALIKE and tensor.device.type != "meta" and not torch._is_functional_tensor(tensor)


def _rounded(size: int) -> int:
    return -(-size // _ROUNDED_TO) * _ROUNDED_TO


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _frame_outside(*folders: str) -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    here = __file__
    while frame is not None and (frame.f_code.co_filename == here or frame.f_code.co_filename.startswith(folders)):
        frame = frame.f_back
    return frame


def _is_for_an_exchange() -> bool:
    """Whether fully_shard allocated it, for gathered parameters or gradients."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_FULLY_SHARD):
            return True
        if file != __file__ and not file.startswith(_TORCH):
            return False
        frame = frame.f_back
    return False


def _user_line() -> str:
    """Returns the nearest line outside of torch and Lockstep."""
    frame = _frame_outside(_TORCH, _LOCKSTEP, _PROCESSES)
    if frame is None or frame.f_code.co_filename.startswith("<"):
        return ""
    file, number = frame.f_code.co_filename, frame.f_lineno
    return f"{Path(file).name}:{number} {linecache.getline(file, number).strip()}".strip()
