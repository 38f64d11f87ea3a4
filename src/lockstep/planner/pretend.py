"""A world of any size in one process: ranks that are not there, and a device that has no memory.

The run, its strategy and its task are the real ones. What they ask of other ranks is answered as if every rank had said
what this one says; what they ask of the device is computed on fake tensors.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep import strategy as strategies
from lockstep.config.load import check_strategy
from lockstep.config.strategy import Strategy as StrategySettings
from lockstep.distributed.group import Group
from lockstep.runtime.base import Runtime
from lockstep.runtime.moving import map_tensors
from lockstep.strategy.base import Strategy
from lockstep.strategy.xla_ddp import in_buckets

_TIMEOUT = 600.0
_really_create = strategies.create


class PretendRuntime(Runtime):
    """A device family by the name that it has; its tensors are fake, and on the host's device for torch.

    Torch refuses tensors of a device that it was not built for, fake ones too. The host's are as large; what GPUs do
    otherwise, gpu_rules.py makes the host do.
    """

    name: ClassVar[str] = "cuda"
    backend = "fake"
    fuses_optimizers = True

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__(torch.device("cpu"))
        self._fake = fake

    def move(self, batch: Any) -> Any:
        return map_tensors(self._as_fake, batch, lambda other: other)

    def use_precision(self, precision: str) -> None:
        pass  # what it changes is how numbers are multiplied, not how large they are

    def _as_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._fake.from_tensor(tensor)


class PretendGroup(Group):
    """Rank 0 of ranks that all say what it says."""

    def rendezvous(self, tag: str, payload: bytes = b"", ranks: Sequence[int] | None = None) -> list[bytes]:
        return [payload] * self.world_size

    def _from_rank_0(self, name: str, message: bytes) -> bytes:
        return message

    def leave_word(self, key: str, text: str) -> None:
        pass

    def words(self, keys: Sequence[str]) -> list[str | None]:
        return [None] * len(keys)


class PretendDdp(Strategy):
    """What DistributedDataParallel needs and exchanges. It is written in C++, which has no use for fake tensors.

    A hook that makes thin matrices of gradients, or is the user's own, is planned as if they went as they are.
    """

    name = "ddp"

    def __init__(self, runtime: Runtime, settings: StrategySettings, world_size: int) -> None:
        super().__init__(runtime, world_size)
        self._settings = settings
        self.buckets: list[torch.Tensor] = []
        self._norms: list[int] = []  # the features of every layer that normalises by the batches of all ranks

    def convert(self, model: nn.Module) -> None:
        if self._settings.sync_batchnorm:
            self._norms += [each.num_features for each in model.modules() if isinstance(each, _BatchNorm)]

    def place(self, model: nn.Module) -> nn.Module:
        most = self._settings.bucket_mb * 2**20
        trained: list[torch.Tensor] = [each for each in model.parameters() if each.requires_grad]
        for parameters in in_buckets(trained, most):  # of gradients, which are as large
            bucket = torch.empty(sum(each.numel() for each in parameters), dtype=parameters[0].dtype)
            self.buckets.append(bucket)
            if self._settings.has_bucket_views(on_gpu=True):
                parts = torch.split(bucket, [each.numel() for each in parameters])
                for parameter, part in zip(parameters, parts, strict=True):
                    parameter.register_post_accumulate_grad_hook(_moved_into(part))  # type: ignore[no-untyped-call]
        return model

    @property
    def gradients(self) -> bool:
        """Whether the buckets are the gradients."""
        return self._settings.has_bucket_views(on_gpu=True)

    def computed(self, last: bool) -> None:
        for features in self._norms:  # what torch's layer gathers on its way forward, and sums up on its way back
            mine = torch.empty(2 * features + 1)
            dist.all_gather_into_tensor(mine.new_empty(self.world_size * len(mine)), mine)
            dist.all_reduce(torch.empty(2 * features))
        if last:
            for bucket in self.buckets:
                self._exchange(bucket)

    def _exchange(self, bucket: torch.Tensor) -> None:
        hook = self._settings.comm_hook
        short = {"bf16_compress": torch.bfloat16, "fp16_compress": torch.float16}.get(hook.type if hook else "")
        if short is None:
            dist.all_reduce(bucket)
            return
        sent = bucket.to(short)
        dist.all_reduce(sent)
        bucket.copy_(sent)


def _moved_into(part: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def move(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        there = part.view_as(parameter)
        if parameter.grad._base is not part._base:
            there.copy_(parameter.grad)
            parameter.grad = there

    return move


def _create(settings: StrategySettings, runtime: Runtime, group: Group) -> Strategy:
    check_strategy(settings, runtime.name, group.world_size)
    if settings.type in ("auto", "ddp") and group.world_size > 1:
        return PretendDdp(runtime, settings, group.world_size)
    return _really_create(settings, runtime, group)


@contextlib.contextmanager
def world(size: int) -> Iterator[PretendGroup]:
    """Torch's own group that exchanges nothing, for its parts that want one."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    to = nn.Module.to
    nn.Module.to = _stays(to)  # type: ignore[method-assign]
    strategies.create = _create
    available = torch.cuda.is_available
    torch.cuda.is_available = _as_on_the_target(available)
    try:
        yield PretendGroup(0, size, _TIMEOUT)
    finally:
        nn.Module.to = to  # type: ignore[method-assign]
        strategies.create = _really_create
        torch.cuda.is_available = available
        dist.destroy_process_group()


def _as_on_the_target(available: Callable[[], bool]) -> Callable[[], bool]:
    """A task that asks for GPUs (fused=torch.cuda.is_available()) is told what it would be told there."""

    def answer() -> bool:
        asking = str(sys._getframe(1).f_globals.get("__name__", "")).partition(".")[0]
        return available() if asking in ("torch", "lockstep") else True

    return answer


def _stays(to: Any) -> Any:
    """Moving a model to where it is: torch would swap fake parameters for others, and cannot."""

    def instead(module: nn.Module, *arguments: Any, **named: Any) -> nn.Module:
        given = [*arguments, *named.values()]
        if len(given) == 1 and isinstance(given[0], (str, torch.device)):
            return module
        moved: nn.Module = to(module, *arguments, **named)
        return moved

    return instead


def real(function: Any, *arguments: Any) -> Any:
    """What a function returns on tensors with memory, as reading data needs them."""
    with unset_fake_temporarily():
        return function(*arguments)
