"""`python -m lockstep.planner.tpu.trace CONFIG SLICE OUT [KEY=VALUE ...]`: a step of a run as one program of XLA's.

The run, its strategy and the task are the real ones; weights, optimizer state and batches are placeholders, so that a
model of any size and a mesh of any size can be traced on a machine that has neither. Needs torch_xla, no TPU.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from lockstep.config.accelerators import Accelerator
from lockstep.config.load import load
from lockstep.config.on_slice import check_slice
from lockstep.config.schema import Checkpoint, Log, RunConfig, Xla
from lockstep.config.values import Interval
from lockstep.errors import LockstepError
from lockstep.planner.devices import slice_of
from lockstep.planner.tpu.blame import told
from lockstep.planner.tpu.stored import Argument, Traced, write

_NEVER = Interval(10**9, "step")
# More would not change what is traced: a mesh may be larger than this process, and two show what one device hides.
_VIRTUAL_DEVICES = 2


def prepare() -> None:
    """What torch_xla reads once, when it is imported."""
    os.environ.update(
        PJRT_DEVICE="CPU",
        CPU_NUM_DEVICES=str(_VIRTUAL_DEVICES),
        XLA_ALWAYS_ALLREDUCE="1",  # also where this process is a world of its own
        XLA_HLO_DEBUG="1",
        OMP_NUM_THREADS="1",
    )


def trace(config: RunConfig, target: Accelerator, name: str) -> tuple[Traced, bytes]:
    began = time.monotonic()
    import torch
    import torch_xla

    from lockstep.distributed.topology import Topology
    from lockstep.engine.engine import Engine
    from lockstep.engine.run import Run
    from lockstep.engine.stop_requests import StopRequests
    from lockstep.planner.tpu import noted
    from lockstep.record.display import Display
    from lockstep.tasks.create import create_task
    from lockstep.tasks.schedules import RunLength
    from lockstep.tasks.setup import order_of, set_up
    from lockstep.tasks.trainer import datasets_of

    over_all = config.strategy.has_mesh
    ranks = 1 if over_all else target.devices
    settings = config.model_copy(
        update={
            "runtime": "xla",
            "xla": Xla(device="CPU"),
            "log": Log(every=_NEVER),
            "checkpoint": Checkpoint(every=None),
            "profile": None,
            "init_from": None,
            "processes": ranks,
        }
    )
    task = create_task(config.task)
    datasets = datasets_of(task, config)
    order = order_of(task, config, datasets["train"])
    torch_xla._XLAC._set_ir_debug(True)  # which line made what
    register = noted.Register()
    runtime = noted.NotedRuntime(settings, target.devices, register)
    with noted.world(ranks, register) as group, tempfile.TemporaryDirectory(prefix="lockstep-plan-") as folder:
        run = Run(Engine(Topology(), runtime, group, settings, Path(folder), Display(), StopRequests()))
        set_up(run, task, settings, RunLength(10**9, 10**6))
        state = noted.State(run, register)
        runtime.at_end_of_program = state.renew_gradients
        noted.steps(run, task, config, datasets["train"], order, state)
        results = state.changed()
        numbers, _ = torch_xla._XLAC._get_tensors_xla_device_data_node([each for each, _ in results])
        program: bytes = torch_xla._XLAC._get_xla_tensors_hlo_proto([each for each, _ in results])
    takes_place = {number: place for place, (_, number) in enumerate(results)}
    arguments = []
    for number in numbers:
        one = register.known.get(number)
        if one is None:  # a number that the host works out for every step, or the seed of random numbers
            arguments.append(Argument("other", "", [], "", noted.REPLICATED, None))
        else:
            place = takes_place.get(number)
            arguments.append(Argument(one.kind, one.name, one.shape, one.dtype, one.sharding, place))
    parameters = state.parameters()
    return (
        Traced(
            slice=target.type,
            devices=target.devices,
            replicas=ranks,
            mesh=state.mesh() if over_all else {"data": target.devices},
            batch=config.train.batch_size,
            programs=config.train.accumulate,
            examples=order.length if order is not None else None,
            parameters=sum(each.numel() for each in parameters.values()),
            weights_bytes=state.weights_bytes(),
            optimizer_bytes=state.optimizer_bytes(),
            precision=config.train.precision,
            arguments=arguments,
            results=[register.known[number].sharding for _, number in results],
            seconds=round(time.monotonic() - began, 1),
            name=name,
            versions={"torch": torch.__version__, "torch_xla": torch_xla.__version__},
        ),
        program,
    )


def main(config: str, target: str, out: str, *overrides: str) -> int:
    faulthandler.enable()
    logging.disable(logging.WARNING)
    prepare()
    said: dict[str, Any] = {}
    try:
        checked = load(Path(config), overrides)
        # A plan is for what the run would be there, whatever it is meant for now.
        free = {"runtime": "xla", "devices": "auto", "processes": "auto", "xla": Xla()}
        check_slice(checked.model_copy(update=free), slice_of(target), "--on")
        traced, program = trace(checked, slice_of(target), checked.name or Path(config).stem)
        write(traced, program, Path(out))
    except LockstepError as error:
        said = {"error": str(error)}
    except Exception as error:  # the user's own code, and torch_xla's
        traceback.print_exc()
        said = {"error": told(error)}
    Path(out).with_suffix(".json").write_text(json.dumps(said), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
