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
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils.data import Subset

from lockstep.config.load import load
from lockstep.config.schema import Checkpoint, Log, RunConfig
from lockstep.config.strategy import BATCH_AXES, DATA_AXIS, MAIN, resolve_meshes
from lockstep.config.values import Interval
from lockstep.data.loader import BatchFetcher
from lockstep.data.order import Sequential, numbers, of_every_example
from lockstep.data.stream_reader import is_stream
from lockstep.distributed.group import Group
from lockstep.distributed.topology import Topology
from lockstep.engine.ema import in_place
from lockstep.engine.engine import Engine
from lockstep.engine.run import Run
from lockstep.engine.stop_requests import StopRequests
from lockstep.errors import ConfigError, LockstepError
from lockstep.evaluation.means import evaluating
from lockstep.planner import gpu_rules, plan
from lockstep.planner.ledger import Ledger, NotTraced, kind_of, replay
from lockstep.planner.plan import Step
from lockstep.planner.world import FakeDdp, FakeRuntime, world
from lockstep.record.display import Display
from lockstep.runtime.base import Runtime
from lockstep.strategy.mesh import axes_of, shard_rules
from lockstep.strategy.slices import local_part
from lockstep.tasks.create import create_task
from lockstep.tasks.loop import step_of
from lockstep.tasks.measure import TaskMeasure
from lockstep.tasks.schedules import RunLength
from lockstep.tasks.setup import order_of, set_up, value_of
from lockstep.tasks.task import defines
from lockstep.tasks.trainer import Datasets, datasets_of, limited

Shape = tuple[int, ...]

_LOOKED_AT = 3  # batches, whether they differ in shape


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
    datasets = limited(datasets_of(task, config), config)
    order = order_of(task, config, datasets["train"])
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    ledger = Ledger(only_fake=True, optimizes_on_host=config.strategy.offload)
    if config.strategy.offload:
        gpu_rules.copy_offloaded()
    gpu_rules.install_compile(ledger)
    runtime, shapes, notes, books = FakeRuntime(fake), set[Shape](), list[str](), ledger.books
    with world(world_size) as group, new_run(runtime, group, settings) as run:
        try:
            with fake, ledger:
                set_up(run, task, config, LONG)
                gpu_rules.install_masks(ledger)
                event, operation, collective = _steps(run, task, config, datasets["train"], order, ledger, shapes)
                ended, exchanged = len(books.operations), len(books.collectives)
                notes += _validate(run, task, config, datasets, ledger)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise NotTraced(f"the step has a shape or a branch that depends on values: {error}") from None
        del books.operations[ended:], books.collectives[exchanged:]  # of validation
        parts = (config.train.exact or run.dp_size) * config.train.accumulate
        rows = -(-config.train.batch_size // parts)
        notes += _unlike(task, config, datasets["train"], order, shapes, rows)
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
            notes=notes,
        )


def _steps(
    run: Run, task: Any, config: RunConfig, data: Any, order: Any, ledger: Ledger, shapes: set[Shape]
) -> tuple[int, int, int]:
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
    began = (0, 0, 0)

    def seen(batch: Any) -> None:
        ledger.name(_tensors(batch), "batch")
        shapes.add(_shape(batch))

    def between() -> None:
        nonlocal began
        ledger.name((local_part(each) for each in _states(run)), "optimizer", away)
        began = len(ledger.books.events), len(ledger.books.operations), len(ledger.books.collectives)

    two_steps(run, task, config, data, order, between, seen)
    return began


def two_steps(
    run: Run, task: Any, config: RunConfig, data: Any, order: Any, between: Callable[[], None],
    seen: Callable[[Any], None] = lambda batch: None,
) -> None:  # fmt: skip
    """Runs two steps: the first creates the optimizer's state, the second is planned. `seen` gets every batch."""
    limits, step, done, size = config.train, step_of(task), 0, batch_of(run, config, order)
    data, order = with_longest(task, config, data, order, size)
    # The rest of an epoch is a smaller step, and a short epoch would have it for the second.
    whole = config.data.drop_last or (order is not None and order.length >= size)
    for _ in run.epochs(None):
        batches = run.batches(
            data, size, order=order, drop_last=whole, accumulate=limits.accumulate,
            collate=getattr(task, "collate", None),
        )  # fmt: skip
        while (batch := real(next, batches, None)) is not None:
            seen(batch)
            complete = step(run, task, batch)
            gc.collect()  # of fake tensors cycles are left, which no device would see
            del batch
            done += complete
            if done == 2:
                return
            if complete:
                between()
    raise AssertionError("an endless number of epochs has ended")


def batch_of(run: Run, config: RunConfig, order: Any) -> int:
    """Returns the size of the batch to plan, which all ranks have equal parts of: rank 0 would have the smallest."""
    size, parts = config.train.batch_size, config.train.exact or run.dp_size
    even = -(-size // parts) * parts
    return even if order is None or order.length >= even else size


def with_longest(task: Any, config: RunConfig, data: Any, order: Any, size: int) -> tuple[Any, Any]:
    """Returns data and an order in which every other example of a batch is the longest, and the others the shortest: a
    batch of it is padded as the largest are. Returns what it is given if nobody says how long examples are."""
    values = {"lengths": value_of(task, "lengths")} if defines(task, "lengths") else {}
    file = config.data.order.lengths if config.data.order is not None else None
    try:
        lengths = numbers(of_every_example("lengths", file, values, data), len(data), "lengths")
    except (ConfigError, TypeError):  # they are not known; a stream has no length
        return data, order
    places = np.where(np.arange(order.length) % size % 2, lengths.argmin(), lengths.argmax())
    return Subset(data, places.tolist()), Sequential(order.length)


def _unlike(task: Any, config: RunConfig, data: Any, order: Any, planned: set[Shape], rows: int) -> list[str]:
    """Says it where batches differ in shape from those that were planned."""
    fetch, largest = BatchFetcher(data, getattr(task, "collate", None)), max(planned, key=math.prod)
    count = 0 if order is None else min(_LOOKED_AT, order.length // rows)
    seen = {_shape(fetch(order.at(0, np.arange(n * rows, (n + 1) * rows)))) for n in range(count)} | planned
    if len(seen) == 1:
        return []
    text, *others = (" x ".join(map(str, each)) for each in (largest, *sorted(seen - {largest})))
    is_longest = with_longest(task, config, data, order, 1)[0] is not data
    hint = "with the longest example" if is_longest else "lengths() in the task would have the longest planned"
    return [f"batches differ in shape ({', '.join(others)}): planned is {text}; {hint}"]


def _validate(run: Run, task: Any, config: RunConfig, datasets: Datasets, ledger: Ledger) -> list[str]:
    """Measures a batch of each set: with averages of the weights, where they are measured. Says what it cannot."""
    engine, size = run._engine, config.evaluation_batch_size
    alone = config.validation.on == "rank0" and not engine.strategy.measures_together
    size = size if alone else -(-size // run.dp_size) * run.dp_size
    collate = getattr(task, "collate", None)
    averages = [each for each in engine.models.averages if each.settings.measured]

    def fetched(data: Any) -> Any:
        if is_stream(data):
            batches = engine.feed.streams.evaluating(data, size, collate, alone).micro_batches()
            return engine.strategy.move(next(iter(batches))[1])
        data, _ = with_longest(task, config, data, Sequential(len(data)), size)
        _, batch = engine.feed.loaders.for_evaluation(data, size, collate, alone=alone).first()
        return engine.strategy.move(batch)

    began = len(ledger.books.events)
    try:
        with ledger.during("validating"), torch.no_grad(), evaluating(run.modules.values()), in_place(averages):
            for data in (each for name, each in datasets.items() if name != "train"):
                batch = real(fetched, data)
                ledger.name(_tensors(batch), "batch")
                TaskMeasure(run, task)(batch)
                gc.collect()
    except Exception as error:  # of the user's code, which may read values here
        del ledger.books.events[began:]
        return [f"validation is not planned: {(str(error).strip() or type(error).__name__).splitlines()[0]}"]
    return []


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


def _shape(batch: Any) -> Shape:
    """Returns the shape of the largest tensor of a batch."""
    return max((tuple(each.shape) for each in _tensors(batch)), key=math.prod, default=())


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [each for each in torch.utils._pytree.tree_leaves(batch) if isinstance(each, torch.Tensor)]


def main(config: str, world_size: str, out: str, *overrides: str) -> int:
    logging.disable(logging.WARNING)
    gpu_rules.install()
    try:
        found = asdict(trace(load(Path(config), overrides), int(world_size)))
    except LockstepError as error:
        found = {"error": str(error)}
    Path(out).write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
