"""`python -m lockstep.planner.tpu.trace CONFIG SLICE FOLDER [KEY=VALUE ...]`: traces a step as one XLA program.

The run, its strategy and the task are the real ones; weights, optimizer state and batches are placeholders, so a model
and a mesh of any size can be traced. Needs torch_xla, no TPU.
"""

from __future__ import annotations

import faulthandler
import json
import linecache
import logging
import math
import os
import re
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.config.accelerators import Accelerator, check_slice
from lockstep.config.load import load
from lockstep.config.schema import RunConfig, Xla
from lockstep.distributed.watch.stacks import is_users
from lockstep.errors import LockstepError
from lockstep.planner.devices import slice_of

TRACED, PROGRAM = "traced.json", "program.hlo"
# More would not change what is traced: a mesh may be larger than this process, and two show what one device hides.
_VIRTUAL_DEVICES = 2


@dataclass(frozen=True)
class Argument:
    kind: str  # weights, optimizer, gradients, batch or other
    shape: list[int]  # of the whole
    dtype: str
    sharding: str
    result: int | None  # which result takes its place in memory


@dataclass(frozen=True)
class Traced:
    """A step as one XLA program: its arguments and results."""

    devices: int
    replicas: int  # programs that each device runs by itself (ddp), or 1: one program over all of them
    mesh: dict[str, int]
    batch: int
    programs: int  # of a step: micro-batches, each of which is one
    examples: int | None
    parameters: int
    weights_bytes: int
    optimizer_bytes: int
    arguments: list[Argument]
    results: list[str]  # the sharding of each
    seconds: float


def prepare() -> None:
    """Sets what torch_xla reads on import."""
    os.environ.update(
        PJRT_DEVICE="CPU",
        CPU_NUM_DEVICES=str(_VIRTUAL_DEVICES),
        XLA_ALWAYS_ALLREDUCE="1",  # also where this process is a world of its own
        OMP_NUM_THREADS="1",
    )


def trace(config: RunConfig, target: Accelerator) -> tuple[Traced, bytes]:
    began = time.monotonic()
    import torch_xla

    from lockstep.planner.step import LONG, new_run, optimizer_bytes, quiet, two_steps, weights_bytes
    from lockstep.planner.tpu import placeholders
    from lockstep.tasks.create import create_task
    from lockstep.tasks.setup import order_of, set_up
    from lockstep.tasks.trainer import datasets_of

    over_all = config.strategy.has_mesh
    ranks = 1 if over_all else target.devices
    settings = quiet(config, runtime="xla", xla=Xla(device="CPU"), init_from=None, processes=ranks)
    task = create_task(config.task)
    datasets = datasets_of(task, config)
    order = order_of(task, config, datasets["train"])
    register = placeholders.Register()
    runtime = placeholders.PlaceholderRuntime(settings, target.devices, register)
    with placeholders.world(ranks, register) as group, new_run(runtime, group, settings) as run:
        set_up(run, task, settings, LONG)
        state = placeholders.State(run, register)
        runtime.at_end_of_program = state.renew_gradients
        two_steps(run, task, config, datasets["train"], order, state.renew)
        results = state.changed()
        numbers, _ = torch_xla._XLAC._get_tensors_xla_device_data_node([each for each, _ in results])
        program: bytes = torch_xla._XLAC._get_xla_tensors_hlo_proto([each for each, _ in results])
    takes_place = {number: place for place, (_, number) in enumerate(results)}
    arguments = []
    for number in numbers:
        one = register.known.get(number)
        if one is None:  # a number that the host works out for every step, or the seed of random numbers
            arguments.append(Argument("other", [], "", REPLICATED, None))
        else:
            arguments.append(Argument(one.kind, one.shape, one.dtype, one.sharding, takes_place.get(number)))
    parameters = state.parameters()
    return (
        Traced(
            devices=target.devices,
            replicas=ranks,
            mesh=state.mesh() if over_all else {"data": target.devices},
            batch=config.train.batch_size,
            programs=config.train.accumulate,
            examples=order.length if order is not None else None,
            parameters=sum(each.numel() for each in parameters.values()),
            weights_bytes=weights_bytes(run),
            optimizer_bytes=optimizer_bytes(run),
            arguments=arguments,
            results=[register.known[number].sharding for _, number in results],
            seconds=round(time.monotonic() - began, 1),
        ),
        program,
    )


REPLICATED = "{replicated}"

Entry = str | tuple[str, ...] | None


def words(spec: Sequence[Entry], mesh: Mapping[str, int]) -> str:
    """Returns XLA's sharding, such as `{devices=[8,1,2]<=[16] last_tile_dim_replicate}`: 8 parts, 2 copies of each.

    Devices are numbered along the mesh, its last axis first; `T(...)` is the order of its axes.
    """
    names = list(mesh)
    parts = [math.prod(mesh[axis] for axis in _axes(entry)) for entry in spec]
    read = [names.index(axis) for entry in spec for axis in _axes(entry)]
    if math.prod(parts) == 1:
        return REPLICATED
    left = [number for number in range(len(names)) if number not in read]
    copies = math.prod(mesh[names[number]] for number in left)
    tiles = [*parts, copies] if copies > 1 else parts
    order = [*read, *left]
    sizes = list(mesh.values())
    devices = math.prod(sizes)
    source = f"[{devices}]" if order == sorted(order) else f"[{_joined(sizes)}]T({_joined(order)})"
    return f"{{devices=[{_joined(tiles)}]<={source}{' last_tile_dim_replicate' if copies > 1 else ''}}}"


def part(shape: Sequence[int], sharding: str) -> list[int]:
    match = re.match(r"\{devices=\[([\d,]+)\]", sharding)
    if match is None:
        return list(shape)
    tiles = [int(each) for each in match[1].split(",")][: len(shape)]
    return [-(-size // by) for size, by in zip(shape, tiles, strict=True)]


def _axes(entry: Entry) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _joined(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


_FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+) in ', re.MULTILINE)


def describe(error: Exception) -> str:
    frames = [each for each in traceback.extract_tb(error.__traceback__) if is_users(each.filename)]
    where = f" at {_place(frames[-1].filename, frames[-1].lineno or 0)}" if frames else ""
    first = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
    return f"the step cannot be traced: {type(error).__name__}{where}: {first}"


def of_crash(log: str) -> str | None:
    """Explains a process that crashed when a placeholder was asked for its value; returns None otherwise.

    Python's fault handler prints where that was, the innermost line first.
    """
    _, found, after = log.partition("Fatal Python error")
    frames = [each for each in _FRAME.finditer(after) if is_users(each["file"])] if found else []
    if not frames:
        return None
    place = _place(frames[0]["file"], int(frames[0]["line"]))
    return (
        f"the step reads a value at {place}: while it is traced there are none, so that it must not do so (.item(), "
        "print, a branch or a shape that depends on one)"
    )


def _place(file: str, line: int) -> str:
    return f"{file}:{line} ({linecache.getline(file, line).strip()})"


def main(config: str, target: str, folder: str, *overrides: str) -> int:
    faulthandler.enable()
    logging.disable(logging.WARNING)
    prepare()
    try:
        checked = load(Path(config), overrides)
        # A plan is for what the run would be there, whatever it is meant for now.
        free = {"runtime": "xla", "devices": "auto", "processes": "auto", "xla": Xla()}
        check_slice(checked.model_copy(update=free), slice_of(target), "--on")
        traced, program = trace(checked, slice_of(target))
        (Path(folder) / PROGRAM).write_bytes(program)
        found = asdict(traced)
    except LockstepError as error:
        found = {"error": str(error)}
    except Exception as error:  # the user's own code, and torch_xla's
        traceback.print_exc()
        found = {"error": describe(error)}
    (Path(folder) / TRACED).write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
