"""`python -m lockstep.planner.step CONFIG WORLD_SIZE OUT [KEY=VALUE ...]` traces a step on fake tensors.

Of two steps the first creates the optimizer's state, and the second is planned.
One process stands for rank 0 of a world of any size. The run, its strategy and its task are the real ones; other ranks
answer what this one says, and the device computes on fake tensors.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from lockstep import strategy as strategies
from lockstep.config.load import check_strategy, load
from lockstep.config.schema import Checkpoint, Log, RunConfig
from lockstep.config.strategy import BATCH_AXES, DATA_AXIS, MAIN, resolve_meshes
from lockstep.config.strategy import Strategy as StrategySettings
from lockstep.config.values import Interval
from lockstep.distributed.activity import Activity
from lockstep.distributed.group import Group
from lockstep.distributed.topology import Topology
from lockstep.engine.engine import Engine
from lockstep.engine.run import Run
from lockstep.engine.stop_requests import StopRequests
from lockstep.errors import LockstepError
from lockstep.planner import gpu_rules, plan
from lockstep.planner.ledger import Ledger, NotTraced, kind_of, replay
from lockstep.planner.plan import Step
from lockstep.record.display import Display
from lockstep.runtime.base import Runtime, in_buckets
from lockstep.runtime.moving import map_tensors
from lockstep.strategy import context
from lockstep.strategy.base import Strategy
from lockstep.strategy.exact import ExactStrategy
from lockstep.strategy.mesh import axes_of, shard_rules
from lockstep.strategy.slices import local_part
from lockstep.tasks.create import create_task
from lockstep.tasks.loop import step_of
from lockstep.tasks.schedules import RunLength
from lockstep.tasks.setup import order_of, set_up
from lockstep.tasks.trainer import datasets_of

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

    def _anywhere(self, present: list[bool]) -> list[bool]:
        return present


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


def real(function: Any, *arguments: Any) -> Any:
    """Calls a function on real tensors, as reading data needs."""
    with unset_fake_temporarily():
        return function(*arguments)


LONG = RunLength(10**9, 1000)


def quiet(config: RunConfig, **more: Any) -> RunConfig:
    """Returns a config that logs, saves and profiles nothing."""
    log = Log(every=Interval(10**9, "step"))
    return config.model_copy(
        update={"log": log, "checkpoint": Checkpoint(every=None, save="all"), "profile": None, **more}
    )


@contextlib.contextmanager
def new_run(runtime: Runtime, group: Group, settings: RunConfig) -> Iterator[Run]:
    with tempfile.TemporaryDirectory(prefix="lockstep-plan-") as folder:
        yield Run(Engine(Topology(), runtime, group, settings, Path(folder), Display(), StopRequests()))


def trace(config: RunConfig, world_size: int) -> Step:
    began = time.monotonic()
    if config.train.precision == "fp8":  # its layers cannot be traced without such a GPU: what they keep, bf16 keeps
        config = config.model_copy(update={"train": config.train.model_copy(update={"precision": "bf16"})})
    settings = quiet(config, processes=world_size)
    task = create_task(config.task)
    datasets = datasets_of(task, config)
    order = order_of(task, config, datasets["train"])
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    ledger = Ledger(only_fake=True, optimizes_on_host=config.strategy.offload)
    if config.strategy.offload:
        _copy_offloaded()
    gpu_rules.install_compile(ledger)
    runtime = FakeRuntime(fake)
    with world(world_size) as group, new_run(runtime, group, settings) as run:
        try:
            with fake, ledger:
                set_up(run, task, config, LONG)
                gpu_rules.install_masks(ledger)
                event, operation, collective = _steps(run, task, config, datasets["train"], order, ledger)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise NotTraced(f"the step has a shape or a branch that depends on values: {error}") from None
        books = ledger.books
        peak, timeline = replay(books, event)
        before = [(name, 0) for name, at in books.phases if at <= event][-1:]
        rules = {**shard_rules(task.shard_rules()), **config.strategy.shard}
        ruled = {axis for rule in rules.values() if rule.mesh is None for entry in rule.spec for axis in axes_of(entry)}
        on_host = (change for each, change in books.events if each.on_host and each.kind is not None)
        strategy = config.strategy
        return Step(
            world_size=world_size,
            batch=config.train.batch_size,
            examples=order.length if order is not None else None,
            parameters=sum(each.numel() for module in run.modules.values() for each in module.parameters()),
            weights_bytes=weights_bytes(run),
            optimizer_bytes=optimizer_bytes(run),
            peak=peak.bytes,
            phase=peak.phase,
            by_kind=peak.by_kind,
            largest=[
                plan.Tensor(held, kind_of(each, books), list(each.shape), each.dtype, each.operation, each.line)
                for each, held in peak.largest
            ],
            flops=sum(each.flops for each in books.operations[operation:]),
            bytes=sum(each.bytes for each in books.operations[operation:]),
            work=plan.work_of(books, operation),
            collectives=plan.collectives_of(books, collective, _axes(run, world_size), world_size),
            timeline=plan.thinned(timeline, peak.at),
            phases=before + [(name, at - event) for name, at in books.phases if at > event],
            seconds=round(time.monotonic() - began, 1),
            events=len(timeline),
            mesh=dict(resolve_meshes(strategy, world_size)[MAIN]) if strategy.has_mesh else {DATA_AXIS: world_size},
            axes=sorted(ruled - set(BATCH_AXES)),
            host_bytes=max(itertools.accumulate(on_host), default=0),  # without temporaries of its optimizer
        )


def _steps(run: Run, task: Any, config: RunConfig, data: Any, order: Any, ledger: Ledger) -> tuple[int, int, int]:
    """Runs two steps and returns where events, operations and collectives of the second begin."""
    parameters = [each for module in run.modules.values() for each in module.parameters()]
    away = config.strategy.offload
    ledger.name((local_part(each) for each in parameters), "weights", away)
    ledger.name((each for module in run.modules.values() for each in module.buffers()), "weights")

    def named(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        ledger.name([local_part(parameter.grad)], "gradients", away)

    for each in parameters:
        if each.requires_grad:
            each.register_post_accumulate_grad_hook(named)  # type: ignore[no-untyped-call]
    strategy = run._engine.strategy
    if isinstance(strategy, FakeDdp):
        ledger.name(strategy.buckets, "gradients" if strategy.has_views else "communication")
    limits, step, done, books = config.train, step_of(task), 0, ledger.books
    # The rest of an epoch is a smaller step, and a short epoch would have it for the second.
    whole = config.data.drop_last or (order is not None and order.length >= limits.batch_size)
    for _ in run.epochs(None):
        batches = run.batches(
            data, limits.batch_size, order=order, drop_last=whole, accumulate=limits.accumulate,
            collate=getattr(task, "collate", None),
        )  # fmt: skip
        began = len(books.events), len(books.operations), len(books.collectives)
        while (batch := real(next, batches, None)) is not None:
            ledger.name(_tensors(batch), "batch")
            complete = step(run, task, batch)
            gc.collect()  # of fake tensors cycles are left, which no device would see
            del batch
            if not complete:
                continue
            done += 1
            if done == 2:
                return began
            ledger.name((local_part(each) for each in _states(run)), "optimizer", away)
            began = len(books.events), len(books.operations), len(books.collectives)
    raise AssertionError("an endless number of epochs has ended")


def _axes(run: Run, world_size: int) -> dict[str, plan.Axis]:
    mesh = run.devices.mesh
    if mesh is None:
        return {"0": plan.Axis("data", world_size, world_size)}
    found = {}
    for name in mesh.mesh_dim_names or ():
        group = mesh.get_group(name)
        ranks = dist.get_process_group_ranks(group)
        found[group.group_name] = plan.Axis(name, len(ranks), max(ranks) - min(ranks) + 1)
    return found


def weights_bytes(run: Run) -> int:
    """Returns the bytes of all weights, as a checkpoint has them."""
    state = [each for module in run.modules.values() for each in run._engine.strategy.state_dict(module).values()]
    return sum(each.numel() * each.element_size() for each in state if isinstance(each, torch.Tensor))


def optimizer_bytes(run: Run) -> int:
    return sum(each.numel() * each.element_size() for each in _states(run))


def _states(run: Run) -> list[torch.Tensor]:
    return [
        each
        for optimizer in run.optimizers.values()
        for state in optimizer.state.values()
        for each in state.values()
        if isinstance(each, torch.Tensor)
    ]


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [each for each in torch.utils._pytree.tree_leaves(batch) if isinstance(each, torch.Tensor)]


def _copy_offloaded() -> None:
    """Makes `strategy.offload` copy on fake tensors, whose device is the host to torch.

    This cannot be undone.
    """
    of_the_host: Any = FSDPParam.all_gather_inputs

    def copied(parameter: FSDPParam) -> list[Tensor]:
        return [each.clone() for each in of_the_host.fget(parameter)]

    FSDPParam.all_gather_inputs = property(copied)  # type: ignore[assignment]


def main(config: str, world_size: str, out: str, *overrides: str) -> int:
    logging.disable(logging.WARNING)
    gpu_rules.install()
    try:
        found = trace(load(Path(config), overrides), int(world_size)).plain()
    except LockstepError as error:
        found = {"error": str(error)}
    Path(out).write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
