"""Two steps of a run on fake tensors: the first makes the optimizer's state, the second is what a plan is made of."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from lockstep.config.mesh import BATCH_AXES, DATA_AXIS, MAIN, resolve_meshes
from lockstep.config.schema import Checkpoint, Log, RunConfig
from lockstep.config.values import Interval
from lockstep.distributed.topology import Topology
from lockstep.engine.engine import Engine
from lockstep.engine.run import Run
from lockstep.engine.stop_requests import StopRequests
from lockstep.planner import figures, fusion, pretend
from lockstep.planner.figures import Step
from lockstep.planner.ledger import Ledger, NotTraced, replay
from lockstep.record.display import Display
from lockstep.strategy.mesh import axes_of, shard_rules
from lockstep.strategy.slices import local_part
from lockstep.tasks.create import create_task
from lockstep.tasks.loop import step_of
from lockstep.tasks.schedules import RunLength
from lockstep.tasks.setup import order_of, set_up
from lockstep.tasks.trainer import datasets_of

_LONG = RunLength(10**9, 10**6)
_NEVER = Interval(10**9, "step")


def trace(config: RunConfig, world_size: int) -> Step:
    began = time.monotonic()
    if config.train.precision == "fp8":  # its layers cannot be traced without such a GPU: what they keep, bf16 keeps
        config = config.model_copy(update={"train": config.train.model_copy(update={"precision": "bf16"})})
    settings = config.model_copy(
        update={
            "log": Log(every=_NEVER),
            "checkpoint": Checkpoint(every=None),
            "profile": None,
            "processes": world_size,
        }
    )
    task = create_task(config.task)
    datasets = datasets_of(task, config)
    order = order_of(task, config, datasets["train"])
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    ledger = Ledger(only_fake=True, optimizes_on_host=config.strategy.offload)
    if config.strategy.offload:
        _copy_offloaded()
    fusion.install(ledger)
    runtime = pretend.PretendRuntime(fake)
    with pretend.world(world_size) as group, tempfile.TemporaryDirectory(prefix="lockstep-plan-") as folder:
        run = Run(Engine(Topology(), runtime, group, settings, Path(folder), Display(), StopRequests()))
        try:
            with fake, ledger:
                set_up(run, task, config, _LONG)
                start = _steps(run, task, config, datasets["train"], order, ledger)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise NotTraced(f"the step has a shape or a branch that depends on values: {error}") from None
        books = ledger.books
        peak, timeline = replay(books, start.event)
        parameters = [each for module in run.modules.values() for each in module.parameters()]
        state = [each for module in run.modules.values() for each in run._engine.strategy.state_dict(module).values()]
        return Step(
            world_size=world_size,
            batch=config.train.batch_size,
            examples=order.length if order is not None else None,
            parameters=sum(each.numel() for each in parameters),
            weights_bytes=sum(each.numel() * each.element_size() for each in state if isinstance(each, torch.Tensor)),
            optimizer_bytes=sum(each.numel() * each.element_size() for each in _states(run)),
            peak=peak.bytes,
            phase=peak.phase,
            by_kind=peak.by_kind,
            largest=figures.largest(peak, books),
            flops=sum(each.flops for each in books.operations[start.operation :]),
            bytes=sum(each.bytes for each in books.operations[start.operation :]),
            work=figures.work_of(books, start.operation),
            collectives=figures.collectives_of(books, start.collective, _axes(run, world_size), world_size),
            uneven=figures.awkward_of(books, start.operation),
            timeline=figures.thinned(timeline, peak.at),
            phases=_phases(books.phases, start.event),
            seconds=round(time.monotonic() - began, 1),
            events=len(timeline),
            weights=figures.weights_of(_parameters(run)),
            mesh=_mesh_of(config, world_size),
            axes=_ruled_axes(config, task),
            host_bytes=figures.held_by_the_host(books),
        )


@dataclass(frozen=True)
class _Start:
    event: int
    operation: int
    collective: int

    @classmethod
    def now(cls, ledger: Ledger) -> _Start:
        books = ledger.books
        return cls(len(books.events), len(books.operations), len(books.collectives))


def _steps(run: Run, task: Any, config: RunConfig, data: Any, order: Any, ledger: Ledger) -> _Start:
    """Two steps; where the second began."""
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
    if isinstance(run._engine.strategy, pretend.PretendDdp):
        ledger.name(run._engine.strategy.buckets, "gradients" if run._engine.strategy.gradients else "communication")
    limits, step, done = config.train, step_of(task), 0
    # The rest of an epoch is a smaller step, and a short epoch would have it for the second.
    whole = config.data.drop_last or (order is not None and order.length >= limits.batch_size)
    for _ in run.epochs(None):
        batches = run.batches(
            data, limits.batch_size, order=order, drop_last=whole, accumulate=limits.accumulate,
            collate=getattr(task, "collate", None),
        )  # fmt: skip
        began = _Start.now(ledger)
        while (batch := pretend.real(next, batches, None)) is not None:
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
            began = _Start.now(ledger)
    raise AssertionError("an endless number of epochs has ended")


def _axes(run: Run, world_size: int) -> dict[str, figures.Axis]:
    mesh = run.devices.mesh
    if mesh is None:
        return {"0": figures.Axis("data", world_size, world_size)}
    found = {}
    for name in mesh.mesh_dim_names or ():
        group = mesh.get_group(name)
        ranks = dist.get_process_group_ranks(group)
        found[group.group_name] = figures.Axis(name, len(ranks), max(ranks) - min(ranks) + 1)
    return found


def _phases(phases: list[tuple[str, int]], start: int) -> list[tuple[str, int]]:
    """Of the second step, the one in which it begins among them."""
    before = [name for name, at in phases if at <= start][-1:]
    return [(name, 0) for name in before] + [(name, at - start) for name, at in phases if at > start]


def _parameters(run: Run) -> Iterator[figures.Named]:
    for owner, module in run.modules.items():
        for name, each in module.named_parameters():
            full = f"{owner}.{name}" if len(run.modules) > 1 else name
            yield full, each.shape, local_part(each).shape, each.element_size(), each.requires_grad


def _mesh_of(config: RunConfig, world_size: int) -> dict[str, int]:
    if not config.strategy.has_mesh:
        return {DATA_AXIS: world_size}
    return dict(resolve_meshes(config.strategy, world_size)[MAIN])


def _ruled_axes(config: RunConfig, task: Any) -> list[str]:
    rules = {**shard_rules(task.shard_rules()), **config.strategy.shard}
    found = {axis for rule in rules.values() if rule.mesh is None for entry in rule.spec for axis in axes_of(entry)}
    return sorted(found - set(BATCH_AXES))


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
    """`strategy.offload` on fake tensors: to torch a pretended device is the host, so that it copies nothing.

    For a process that does nothing but plan: it is not taken back.
    """
    of_the_host: Any = FSDPParam.all_gather_inputs

    def copied(parameter: FSDPParam) -> list[Tensor]:
        return [each.clone() for each in of_the_host.fget(parameter)]

    FSDPParam.all_gather_inputs = property(copied)  # type: ignore[assignment]
