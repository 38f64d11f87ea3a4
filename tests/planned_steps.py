"""Steps and plans as a trace would give them, made up: for what is done with a plan once it is there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lockstep.planner.devices import Device, Target
from lockstep.planner.plan import GIB, Collective, Plan, Step, Tensor, Work, estimate

DEVICE = Device(memory=16.8, peak={"float32": 20, "bf16": 200}, bandwidth=1000, link=300, network=12, per_host=8)


def step(**values: Any) -> Step:
    """Of 16 ranks under ddp: a model of 2 GiB with Adam's state, and 6 GiB of activations."""
    weights, phases = 2 * GIB, [("forward", 0), ("backward", 400), ("forward", 800), ("optimizer", 900)]
    timeline = [
        {"weights": weights, "optimizer": 2 * weights, "activations": round(6 * GIB * min(n, max(240 - n, 0)) / 120)}
        for n in range(300)
    ]
    made = Step(
        world_size=16, batch=64, examples=6400, parameters=weights // 4, weights_bytes=weights,
        optimizer_bytes=2 * weights, peak=12 * GIB, phase="backward",
        by_kind={"weights": weights, "optimizer": 2 * weights, "activations": 6 * GIB},
        largest=[Tensor(GIB, "activations", [4096, 65536], "float32", "aten.mm.default", "gpt.py:9 return x < 1 & y")],
        flops=8 * 10**12, bytes=10**11,
        work=[Work("bfloat16", 10**11, 10**9, 60), Work("float32", 10**9, 10**8, 9), Work("float32", 0, 10**10, 9)],
        collectives=[Collective("allreduce", "data", 16, 16, 20, weights)],
        timeline=timeline, phases=phases, seconds=3.0, events=1000, mesh={"data": 16}, axes=[],
    )  # fmt: skip
    return replace(made, **values)


def plan(made: Step | None = None, device: Device = DEVICE, name: str = "card", **values: Any) -> Plan:
    made = made or step(**values)
    target = Target(name, device, made.world_size)
    return Plan(target, made, estimate(made, target, "bf16"), None, False)


def compiled(world_size: int = 16) -> Step:
    """As a compiler tells it: no timeline, no phases, no products."""
    return step(world_size=world_size, phase="", largest=[], work=[], timeline=[], phases=[], events=0, mesh={},
                collectives=[])  # fmt: skip
