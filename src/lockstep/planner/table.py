"""A plan as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.planner.figures import KINDS
from lockstep.planner.plan import GIB, Plan

_SHOWN = 10
WHEN = {"forward": "the forward pass", "backward": "the backward pass", "optimizer": "the optimizer's step"}


def lines(plan: Plan, per_hour: float | None = None) -> Iterator[str]:
    step, target = plan.step, plan.target
    verdict = f"{plan.margin / GIB:.1f} GiB left" if plan.fits else f"{-plan.margin / GIB:.1f} GiB too much"
    yield f"{target.title}: {'fits' if plan.fits else 'DOES NOT FIT'}, {verdict}"
    kept = f", of which {plan.reserved / GIB:.1f} are kept back for the driver" if plan.reserved else ""
    when = f" in {WHEN[step.phase]}" if step.phase in WHEN else ""  # a compiler says nothing of it
    yield f"memory per device, at its peak{when}: {step.peak / GIB:.2f} of {target.device.memory:.1f} GiB{kept}"
    for kind in KINDS:
        if size := step.by_kind.get(kind):
            yield f"  {kind:<14}{size / GIB:8.2f} GiB"
    if step.host_bytes:
        yield f"  {step.host_bytes / GIB:.2f} GiB more are in the memory of its host (strategy.offload)"
    if step.largest:
        yield "the largest tensors then"
    for each in step.largest[:_SHOWN]:
        shape = " x ".join(map(str, each.shape))
        yield f"  {each.bytes / GIB:8.3f} GiB  {each.kind:<13} {shape} {each.dtype}  {each.line or each.operation}"
    if not step.work:
        yield "the compiler makes no program that does not fit: what it would compute and exchange is not known"
        return
    done = f"{step.flops / 1e12:.2f} TFLOP, {step.bytes / 1e9:.1f} GB moved"
    yield f"a step of {step.batch} examples, of each device: {done}"
    for one in step.collectives:
        yield f"  {one.name} over {one.axis}: {one.count} of {one.bytes / 1e9:.3f} GB together"
    guess = plan.estimate
    yield (
        f"at least {guess.step * 1e3:.1f} ms by the datasheet (an estimate): products {guess.products * 1e3:.1f}, "
        f"other traffic {guess.traffic * 1e3:.1f}, exchanged beside it {guess.beside * 1e3:.1f}, waited for "
        f"{guess.between * 1e3:.1f}"
    )
    if plan.largest_batch:
        how = "traced" if plan.tried else "worked out from this one, not traced"
        yield f"largest batch that fits: {plan.largest_batch} ({how})"
    if per_hour is not None:
        price = plan.price_per_epoch(per_hour)
        told = (
            "of a stream nobody knows the length"
            if price is None
            else f"{price:,.2f} at {per_hour:g} per device and hour"
        )
        yield f"an epoch: {told}"
