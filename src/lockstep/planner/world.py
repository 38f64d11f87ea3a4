"""A world of any size of which one process stands for rank 0: its runtime, its group and its strategies."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from lockstep import strategy as strategies
from lockstep.config.load import check_strategy
from lockstep.config.strategy import Strategy as StrategySettings
from lockstep.distributed.activity import Activity
from lockstep.distributed.group import Group
from lockstep.runtime.base import Runtime, in_buckets
from lockstep.runtime.moving import map_tensors
from lockstep.strategy import context
from lockstep.strategy.base import Strategy
from lockstep.strategy.exact import ExactStrategy

_TIMEOUT = 600.0
_really_create = strategies.create


class FakeRuntime(Runtime):
    """A CUDA runtime on fake host tensors: torch refuses tensors of a device that it was not built for.

    What GPUs do differently is in gpu_rules.py.
    """

    name: ClassVar[str] = "cuda"
    backend = "fake"
    fuses_optimizers = True

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__(torch.device("cpu"))
        self._fake = fake

    def move(self, batch: Any) -> Any:
        def fake(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if isinstance(tensor, FakeTensor) else self._fake.from_tensor(tensor)

        return map_tensors(fake, batch, lambda other: other)

    def use_precision(self, precision: str) -> None:
        pass  # what it changes is how numbers are multiplied, not how large they are


class FakeGroup(Group):
    """Rank 0 of ranks that all say what it says."""

    def rendezvous(self, tag: str, payload: bytes = b"", ranks: Sequence[int] | None = None) -> list[bytes]:
        return [payload] * self.world_size

    def _from_rank_0(self, name: str, message: bytes) -> bytes:
        return message

    def publish(self, key: str, text: str) -> None:
        pass

    def published(self, keys: Sequence[str]) -> list[str | None]:
        return [None] * len(keys)


class FakeDdp(Strategy):
    """The memory and traffic of DistributedDataParallel, which cannot run on fake tensors.

    A `comm_hook` is planned as if gradients were not compressed.
    """

    name = "ddp"

    def __init__(self, runtime: Runtime, settings: StrategySettings, world_size: int) -> None:
        super().__init__(runtime, world_size)
        self._settings, self.has_views = settings, settings.has_bucket_views(on_gpu=True)
        self.buckets: list[torch.Tensor] = []

    def place(self, model: nn.Module) -> nn.Module:
        trained = [each for each in model.parameters() if each.requires_grad]
        most = self._settings.bucket_mb * 2**20  # of gradients, which are as large
        for parameters in in_buckets(trained, lambda each: each.nbytes, most, lambda each: each.dtype):
            bucket = torch.empty(sum(each.numel() for each in parameters), dtype=parameters[0].dtype)
            self.buckets.append(bucket)
            if self.has_views:
                parts = torch.split(bucket, [each.numel() for each in parameters])
                for parameter, part in zip(parameters, parts, strict=True):
                    parameter.register_post_accumulate_grad_hook(_moved_into(part))  # type: ignore[no-untyped-call]
        return model

    def computed(self, last: bool) -> None:
        for bucket in self.buckets if last else ():
            dist.all_reduce(bucket)


def _moved_into(part: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def move(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        there = part.view_as(parameter)
        if parameter.grad._base is not part._base:
            there.copy_(parameter.grad)
            parameter.grad = there

    return move


class _AtOnce:
    """In place of a thread, in which memory would not be counted."""

    def do(self, what: Callable[[], None]) -> None:
        what()

    def wait(self) -> None:
        pass


class FakeExact(ExactStrategy):
    def __init__(self, runtime: Runtime, group: Group, leaves: int, seed: int) -> None:
        super().__init__(runtime, group, leaves, seed)
        if self._exchange is not None:
            self._exchange.thread = _AtOnce()


class LastContext(context.Context):
    """The last rank along the axis `context`, which sees the most positions; a GPU needs no mask in memory."""

    def __init__(self, blocks: Mapping[str, nn.Module], mesh: DeviceMesh, activity: Activity) -> None:
        super().__init__(blocks, mesh, activity)
        self.rank = self.size - 1

    def causal_mask(self, length: int, end: int, device: torch.device) -> None:
        pass


def _create(
    settings: StrategySettings, runtime: Runtime, group: Group, leaves: int | None = None, seed: int = 0
) -> Strategy:
    check_strategy(settings, runtime.name, group.world_size)
    if leaves is not None:
        return FakeExact(runtime, group, leaves, seed)
    if settings.type in ("auto", "ddp") and group.world_size > 1:
        return FakeDdp(runtime, settings, group.world_size)
    return _really_create(settings, runtime, group)


@contextlib.contextmanager
def world(size: int) -> Iterator[FakeGroup]:
    """Enters torch's fake process group, and patches what does not work on fake tensors."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    to = nn.Module.to
    nn.Module.to = _stays(to)  # type: ignore[method-assign]
    strategies.create = _create
    own, context.Context = context.Context, LastContext  # type: ignore[misc]
    available = torch.cuda.is_available
    torch.cuda.is_available = _as_on_the_target(available)
    try:
        yield FakeGroup(0, size, _TIMEOUT)
    finally:
        nn.Module.to = to  # type: ignore[method-assign]
        strategies.create = _really_create
        context.Context = own  # type: ignore[misc]
        torch.cuda.is_available = available
        dist.destroy_process_group()


def _as_on_the_target(available: Callable[[], bool]) -> Callable[[], bool]:
    """Answers torch.cuda.is_available() in user code as on the target."""

    def answer() -> bool:
        asking = str(sys._getframe(1).f_globals.get("__name__", "")).partition(".")[0]
        return available() if asking in ("torch", "lockstep") else True

    return answer


def _stays(to: Any) -> Any:
    """Replaces Module.to(device, dtype), for which torch would swap fake parameters, and cannot."""

    def instead(module: nn.Module, *arguments: Any, **named: Any) -> nn.Module:
        given = [*arguments, *named.values()]
        if given and all(isinstance(each, (str, torch.device, torch.dtype)) for each in given):
            for dtype in (each for each in given if isinstance(each, torch.dtype)):
                _cast(module, dtype)
            return module
        moved: nn.Module = to(module, *arguments, **named)
        return moved

    return instead


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    made: dict[int, nn.Parameter] = {}  # by the identity of what it replaces: weights may be tied
    for part in module.modules():
        for name, each in part._parameters.items():
            if each is not None and each.is_floating_point() and each.dtype != dtype:
                part._parameters[name] = made.setdefault(
                    id(each), nn.Parameter(each.detach().to(dtype), each.requires_grad)
                )
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = buffer.to(dtype)
