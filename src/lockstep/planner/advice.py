"""What would make a run fit, or faster: each with what it would bring, by the plan's figures or by another trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from lockstep.config.mesh import BATCH_AXES
from lockstep.config.schema import RunConfig
from lockstep.errors import LockstepError
from lockstep.planner.figures import Step
from lockstep.planner.plan import GIB, Plan
from lockstep.planner.roofline import seconds

_WORTH_SAYING = 0.05  # of the peak
_PATIENT_SECONDS = 60.0


def advice(plan: Plan, config: RunConfig, trace: Callable[[Sequence[str]], Step]) -> Iterator[str]:
    yield from _copies(plan, config)
    yield from _recompute(plan, config, trace)
    yield from _optimizer(plan)
    yield from _exchange(plan)
    yield from _batch(plan, config)
    yield from _sizes(plan)


def _copies(plan: Plan, config: RunConfig) -> Iterator[str]:
    """What every device has whole, and could have a part of."""
    step, count = plan.step, plan.target.count
    if count < 2 or config.strategy.type == "spmd":
        return
    whole = step.weights_bytes + step.optimizer_bytes + step.weights_bytes  # and gradients
    saved = whole * (1 - 1 / count)
    if saved > _WORTH_SAYING * step.peak:
        yield (
            f"every device has all weights, gradients and optimizer state: strategy: {{type: spmd, preset: fsdp}} "
            f"splits them over the {count}, {saved / GIB:.1f} GiB less on each"
        )


def _recompute(plan: Plan, config: RunConfig, trace: Callable[[Sequence[str]], Step]) -> Iterator[str]:
    step = plan.step
    kept = step.by_kind.get("activations", 0)
    if config.train.recompute is not None or kept < _WORTH_SAYING * step.peak or step.seconds > _PATIENT_SECONDS:
        return
    try:
        other = trace(["train.recompute=blocks"])
    except LockstepError:
        return  # it has no blocks, or they cannot be run twice
    if step.peak - other.peak > _WORTH_SAYING * step.peak:
        more = other.flops / step.flops - 1 if step.flops else 0.0
        yield (
            f"train.recompute: blocks needs {other.peak / GIB:.1f} GiB instead of {step.peak / GIB:.1f}, for "
            f"{more:.0%} more arithmetic"
        )


def _optimizer(plan: Plan) -> Iterator[str]:
    step = plan.step
    made = step.by_kind.get("temporaries", 0)
    if step.phase == "optimizer" and made > _WORTH_SAYING * step.peak:
        yield (
            f"the peak is in the optimizer's step, which makes {made / GIB:.1f} GiB on its way: one that is fused "
            "(fused: true, where it has that) makes nothing"
        )


def _exchange(plan: Plan) -> Iterator[str]:
    guess = plan.estimate
    for waits, total in ((False, guess.beside), (True, guess.between)):
        if total <= (guess.compute if not waits else 0.3 * guess.compute):
            continue
        axes: dict[str, float] = {}
        for one in plan.step.collectives:
            if (one.axis not in BATCH_AXES and one.axis != "all ranks") is waits:
                axes[one.axis] = axes.get(one.axis, 0.0) + seconds(one, plan.target)
        if axes:
            axis = max(axes, key=lambda each: axes[each])
            yield (
                f"what is exchanged over {axis} takes {axes[axis] * 1e3:.0f} ms, and computing "
                f"{guess.compute * 1e3:.0f}: a larger batch"
                + (", hsdp within hosts" if plan.target.hosts > 1 and not waits else "")
                + (", or a smaller axis" if waits else "")
                + " would leave less of it to wait for"
            )


def _batch(plan: Plan, config: RunConfig) -> Iterator[str]:
    batch, count = plan.step.batch, plan.target.count
    if batch < count:
        yield f"train.batch_size: {batch} is less than the {count} devices: some of them have nothing to do"
    elif plan.largest_batch is not None and plan.largest_batch >= 2 * batch and config.train.accumulate > 1:
        yield (
            f"train.accumulate: {config.train.accumulate} is not needed: a batch of {plan.largest_batch} fits in one "
            "part"
        )


def _sizes(plan: Plan) -> Iterator[str]:
    for each in plan.step.uneven[:3]:
        yield f"{each}: not a multiple of 8, which matrix units pad or pass by: round it up"
