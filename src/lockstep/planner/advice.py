"""Advice on what would make a run fit or faster, with the expected gain."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lockstep.config.schema import RunConfig
from lockstep.config.strategy import BATCH_AXES, DATA_AXIS, dp_size
from lockstep.errors import LockstepError
from lockstep.planner.figures import Step, UnevenSize, Weight, estimate, peak, seconds
from lockstep.planner.plan import GIB, Plan

_WORTH_SAYING = 0.05  # of the peak, or of a step's arithmetic
_SHORT_OF_MEMORY = 0.7  # of a device's: from there on, what is slow may still be wanted
_BOUND_BY_TRAFFIC = 0.3  # of the time of products
_PATIENT_SECONDS = 60.0  # a step that took longer to trace is not traced again
_NAMED = 3

Trace = Callable[[Sequence[str]], Step]


@dataclass(frozen=True)
class Advice:
    text: str
    gib: float | None = None  # of memory that it saves on each device, where that is what it is for


def advice(plan: Plan, config: RunConfig, trace: Trace) -> Iterator[Advice]:
    """Yields advice; traces the step at most three more times, and not if that is slow."""
    yield from _copies(plan, config)
    yield from _barely_split(plan, config)
    yield from _activation_checkpointing(plan, config, trace)
    yield from _offload(plan, config, trace)
    yield from _optimizer(plan)
    yield from _exchange(plan)
    yield from _batch(plan, config)
    yield from _small_products(plan, config, trace)
    yield from _sizes(plan)


# What devices have whole, or more of than they need


def _copies(plan: Plan, config: RunConfig) -> Iterator[Advice]:
    """Parameters that every device holds unsharded, with their gradients and optimizer state."""
    step, count = plan.step, plan.target.count
    if count < 2 or step.host_bytes:
        return
    if not config.strategy.has_mesh:
        # Of a plan that names no parameters, all together.
        static = _with_state(step, step.weights) or 2 * step.weights_bytes + step.optimizer_bytes
        saved = static * (1 - 1 / count)
        if saved > _WORTH_SAYING * step.peak:
            yield _saving(
                "every device has all weights, gradients and optimizer state"
                f"{_largest(step.weights)}: strategy: fsdp splits them over the {count}", saved,
            )  # fmt: skip
        return
    if config.strategy.splits_all:
        return
    data = step.mesh.get(DATA_AXIS, 1)
    whole = [each for each in step.weights if each.local_bytes == each.bytes]
    saved = _with_state(step, whole) * (1 - 1 / count)
    if saved > _WORTH_SAYING * step.peak:
        yield _saving(
            f"what no rule splits, every device has whole{_largest(whole)}: a rule in strategy.shard splits it, or "
            "strategy: fsdp beside the rules", saved,
        )  # fmt: skip
    split = [each for each in step.weights if each.local_bytes < each.bytes]
    saved = _with_state(step, split, local=True) * (1 - 1 / data)
    if data > 1 and saved > _WORTH_SAYING * step.peak:
        yield _saving(
            f"what the rules split is there {data} times, once for every place of {DATA_AXIS}: strategy: fsdp beside "
            "the rules splits it over them too", saved,
        )  # fmt: skip


def _barely_split(plan: Plan, config: RunConfig) -> Iterator[Advice]:
    """fully_shard splits the first dimension: if it is shorter than the axis, some devices get nothing."""
    step, data = plan.step, plan.step.mesh.get(DATA_AXIS, 1)
    if not config.strategy.splits_all or data < 2:
        return
    found = [each for each in step.weights if each.shape and each.shape[0] < data and each.local_bytes > 0]
    saved = _with_state(step, found, local=True) - _with_state(step, found) / data
    if found and saved > _WORTH_SAYING * step.peak:
        yield _saving(
            f"{_shown(found[0])} is split along its first dimension, which has {found[0].shape[0]} places for {data} "
            "devices: transposed, it would be split over all of them", saved,
        )  # fmt: skip


def _with_state(step: Step, weights: Sequence[Weight], local: bool = False) -> float:
    """Returns the bytes of parameters on a device, with their gradients and optimizer state."""
    trained = sum(each.bytes * each.count for each in step.weights if each.trained)
    more = 1 + step.optimizer_bytes / trained if trained else 0.0
    sizes = [(each.local_bytes if local else each.bytes) * each.count * (1 + more * each.trained) for each in weights]
    return float(sum(sizes))


def _largest(weights: Sequence[Weight]) -> str:
    return f" (the largest: {'; '.join(map(_shown, weights[:_NAMED]))})" if weights else ""


def _shown(weight: Weight) -> str:
    times = f", {weight.count} of them" if weight.count > 1 else ""
    return f"{weight.name} {weight.shape}, {weight.bytes * weight.count / GIB:.3g} GiB{times}"


def _saving(text: str, saved: float) -> Advice:
    return Advice(f"{text}, {saved / GIB:.3g} GiB less on each", saved / GIB)


# What another trace tells


def _again(plan: Plan, trace: Trace, overrides: Sequence[str]) -> Step | None:
    if plan.step.seconds > _PATIENT_SECONDS:
        return None
    try:
        return trace(overrides)
    except LockstepError:
        return None  # it has no blocks, or they cannot be run twice; it cannot be split


def _activation_checkpointing(plan: Plan, config: RunConfig, trace: Trace) -> Iterator[Advice]:
    step = plan.step
    if (
        config.train.activation_checkpointing is not None
        or step.by_kind.get("activations", 0) < _WORTH_SAYING * step.peak
    ):
        return
    other = _again(plan, trace, ["train.activation_checkpointing=blocks"])
    if other is not None and step.peak - other.peak > _WORTH_SAYING * step.peak:
        more = other.flops / step.flops - 1 if step.flops else 0.0
        yield Advice(
            f"train.activation_checkpointing: blocks needs {other.peak / GIB:.3g} GiB instead of "
            f"{step.peak / GIB:.3g}, for "
            f"{more:.0%} more arithmetic",
            (step.peak - other.peak) / GIB,
        )


def _offload(plan: Plan, config: RunConfig, trace: Trace) -> Iterator[Advice]:
    """Only if memory is short: the transfers and the optimizer on the host are slow."""
    step = plan.step
    static = sum(step.by_kind.get(kind, 0) for kind in ("weights", "gradients", "optimizer"))
    if static < _WORTH_SAYING * step.peak or step.peak < _SHORT_OF_MEMORY * plan.capacity:
        return
    spread = ["strategy.offload=true"]
    if not config.strategy.has_mesh:
        spread = ["strategy={type: fsdp, mesh: {data: -1}, offload: true}"]
    other = _again(plan, trace, spread)
    if other is None or other.host_bytes == 0 or step.peak - other.peak <= _WORTH_SAYING * step.peak:
        return
    local = sum(each.local_bytes * each.count for each in other.weights)
    how = "strategy.offload" if config.strategy.has_mesh else "strategy: {type: fsdp, offload: true}"
    yield Advice(
        f"{how} needs {other.peak / GIB:.3g} GiB instead of {step.peak / GIB:.3g}: weights, gradients and optimizer "
        f"state are in the host's memory, {other.host_bytes / GIB:.3g} GiB for each device; about "
        f"{3 * local / 1e9:.3g} GB come and go in a step, and the optimizer steps on the host",
        (step.peak - other.peak) / GIB,
    )


# What a step does


def _optimizer(plan: Plan) -> Iterator[Advice]:
    step = plan.step
    made = step.by_kind.get("temporaries", 0)
    if step.phase == "optimizer" and made > _WORTH_SAYING * step.peak:
        yield Advice(
            f"the peak is in the optimizer's step, which makes {made / GIB:.3g} GiB on its way: one that is fused "
            "(fused: true, where it has that) makes nothing",
            made / GIB,
        )


def _exchange(plan: Plan) -> Iterator[Advice]:
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
            yield Advice(
                f"what is exchanged over {axis} takes {axes[axis] * 1e3:.3g} ms, and computing "
                f"{guess.compute * 1e3:.3g}: a larger batch"
                + (", hsdp within hosts" if plan.target.hosts > 1 and not waits else "")
                + (", or a smaller axis" if waits else "")
                + " would leave less of it to wait for"
            )


def _batch(plan: Plan, config: RunConfig) -> Iterator[Advice]:
    batch, places = plan.step.batch, _dp_size(plan)
    if batch < places:
        yield Advice(
            f"train.batch_size: {batch} is less than the {places} shares that the mesh divides it into: some devices "
            "have nothing to do"
        )
    elif plan.largest_batch is not None and plan.largest_batch >= 2 * batch and config.train.accumulate > 1:
        yield Advice(
            f"train.accumulate: {config.train.accumulate} is not needed: a batch of {plan.largest_batch} fits in one "
            "part"
        )


def _small_products(plan: Plan, config: RunConfig, trace: Trace) -> Iterator[Advice]:
    """Small batches make products that are bound by memory bandwidth."""
    step, places = plan.step, _dp_size(plan)
    larger = 2 * step.batch
    if plan.largest_batch is None or plan.largest_batch < larger or step.batch < places:
        return
    waiting = total = 0.0
    for each in step.work:
        if each.flops:
            arithmetic = each.flops / peak(plan.target, each.dtype, config.train.precision)
            moving = each.bytes / (plan.target.device.bandwidth * 1e9)
            total += each.count * max(arithmetic, moving)
            waiting += each.count * moving * (moving > arithmetic)
    if not total or waiting < _BOUND_BY_TRAFFIC * total:
        return
    larger = min(plan.largest_batch, 8 * step.batch) // places * places
    other = _again(plan, trace, [f"train.batch_size={larger}"])
    if other is None:
        return
    now, then = plan.estimate.step / step.batch, estimate(other, plan.target, config.train.precision).step / larger
    if then < (1 - _WORTH_SAYING) * now:
        at_once = math.ceil(step.batch / places / config.train.accumulate)
        yield Advice(
            f"products wait for memory in {waiting / total:.0%} of their time, with {at_once} example"
            f"{'s' * (at_once > 1)} at once on a device: a batch of {larger} fits, and takes {then * 1e6:.3g} us for "
            f"an example instead of {now * 1e6:.3g}"
        )


def _dp_size(plan: Plan) -> int:
    return dp_size(plan.step.mesh) if plan.step.mesh else plan.target.count


# Sizes


def _sizes(plan: Plan) -> Iterator[Advice]:
    """Matrix units load eight 16-bit numbers at once and compute tiles of 128."""
    for each in plan.step.uneven[:_NAMED]:
        part = each.flops / plan.step.flops if plan.step.flops else 0.0
        if part < _WORTH_SAYING:
            continue
        loads, tiles = _up(each.size, 8), _up(each.size, 128)
        yield Advice(
            f"{each.size} in {each.line}: not a multiple of 8{_where_from(each, plan.step)}, which matrix units pad or "
            f"pass by, in {part:.0%} of the arithmetic: {loads} is {_more(loads, each.size)} more"
            + (
                f", {tiles} (their tiles) {_more(tiles, each.size)}"
                if tiles <= 1.05 * each.size and tiles > loads
                else ""
            )
        )


def _where_from(uneven: UnevenSize, step: Step) -> str:
    """Names the parameter whose sharding leaves an uneven size."""
    for axis, places in step.mesh.items():
        for each in step.weights if axis not in BATCH_AXES and places > 1 else ():
            if uneven.size * places in each.shape:
                return f" ({uneven.size * places} of {each.name} over the {places} of {axis})"
    return ""


def _up(size: int, to: int) -> int:
    return -(-size // to) * to


def _more(size: int, than: int) -> str:
    return f"{100 * (size / than - 1):.2g} %"
