"""A plan: whether a config fits a target, and what it needs there."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError, LockstepError
from lockstep.planner.devices import Target
from lockstep.planner.figures import KINDS, Estimate, Step, estimate

GIB = 2**30
# Kept back for what a process has on a GPU beside its tensors: the driver's context and libraries. On an H200 it was
# 0.82 GiB (benchmarks/plan.py).
_RESERVED = 0.82 * GIB
_LIMIT_SECONDS = 900.0
_PATIENT_SECONDS = 60.0  # a step that is traced in less is traced again, to try a batch size
_TRIES = 3


@dataclass(frozen=True)
class Plan:
    target: Target
    step: Step
    estimate: Estimate
    largest_batch: int | None
    tried: bool  # whether the largest batch was traced, or worked out from this one

    @property
    def capacity(self) -> float:
        return self.target.device.memory * GIB - self.reserved

    @property
    def reserved(self) -> float:
        """A TPU's compiler counts everything itself."""
        return _RESERVED if self.target.slice is None else 0.0

    @property
    def fits(self) -> bool:
        return self.step.peak <= self.capacity

    @property
    def margin(self) -> float:
        return self.capacity - self.step.peak

    def plain(self) -> dict[str, Any]:
        return {
            "target": self.target.title,
            "fits": self.fits,
            "capacity": self.capacity,
            "margin": self.margin,
            "largest_batch": self.largest_batch,
            "largest_batch_was_traced": self.tried,
            "estimate": {**asdict(self.estimate), "step": self.estimate.step},
            **self.step.plain(),
        }


def make(
    config: Path,
    overrides: Sequence[str],
    target: Target,
    precision: str,
    seek_batch: bool,
    note: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Traces the config's step for a target; with `seek_batch`, also finds the largest batch that fits.

    `note` is called with what is under way.
    """
    note(f"{target.title}: tracing a step")
    step = traced(config, overrides, target)
    plan = Plan(target, step, estimate(step, target, precision), None, False)
    if not seek_batch:
        return plan

    def peak_of(batch: int) -> int:
        note(f"{target.title}: the largest batch: trying {batch}")
        return traced(config, [*overrides, f"train.batch_size={batch}"], target).peak

    largest, tried = _largest_batch(plan, peak_of)
    return Plan(target, step, plan.estimate, largest, tried)


def _largest_batch(plan: Plan, peak_of: Callable[[int], int]) -> tuple[int | None, bool]:
    """Memory is linear in the batch size: two points predict where it reaches the capacity."""
    step, dp_size = plan.step, max(plan.target.count, 1)
    varies = sum(step.by_kind.get(kind, 0) for kind in ("activations", "temporaries", "batch"))
    fixed = step.peak - varies
    if fixed >= plan.capacity or not varies:
        return None, False
    # With more than an epoch has, a batch would be smaller than it says.
    most = step.examples if step.examples is not None else math.inf
    guess = _multiple(min(step.batch * (plan.capacity - fixed) / varies, most), dp_size)
    if step.seconds > _PATIENT_SECONDS or not guess:
        return guess or None, False
    points = {step.batch: step.peak}
    for _ in range(_TRIES):
        if guess in points:
            break
        points[guess] = peak_of(guess)
        (small, low), (large, high) = sorted(points.items())[0], sorted(points.items())[-1]
        slope = (high - low) / (large - small)
        guess = _multiple(min(small + (plan.capacity - low) / slope, most), dp_size) if slope > 0 else guess
    fitting = [batch for batch, peak in points.items() if peak <= plan.capacity]
    return (max(fitting), True) if fitting else (guess or None, False)


def _multiple(batch: float, of: int) -> int:
    return int(batch // of) * of


def traced(config: Path, overrides: Sequence[str], target: Target) -> Step:
    """Traces one step on a target: on fake tensors, or compiled for a slice of TPUs."""
    if target.slice is None:
        return _on_fake_tensors(config, overrides, target.count)
    from lockstep.planner.tpu import engine

    return engine.planned(config, overrides, target.slice)


def _on_fake_tensors(config: Path, overrides: Sequence[str], world_size: int) -> Step:
    """Runs in a separate process, since tracing patches torch."""
    with tempfile.TemporaryDirectory(prefix="lockstep-plan-") as folder:
        out = Path(folder) / "step.json"
        arguments = [str(config), str(world_size), str(out), *overrides]
        log, code = run_module("lockstep.planner.step", arguments, _LIMIT_SECONDS, f"{config}: tracing a step")
        found = json.loads(out.read_text(encoding="utf-8")) if code == 0 and out.exists() else None
    if found is None:
        lines = log.strip().splitlines()
        last = lines[-1].removeprefix("[rank0]:").strip()[:300] if lines else "the process ended without output"
        raise NotPlanned(f"{config}: the step cannot be traced: {last}. {kept(log)}")
    if "error" in found:
        raise ConfigError(found["error"])
    return Step.parse(found)


class NotPlanned(LockstepError):
    """The step could not be traced or compiled."""

    exit_code = 2


def run_module(module: str, arguments: Sequence[str], limit: float, what: str) -> tuple[str, int]:
    """Runs `python -m MODULE` without the variables of a rank or of XLA, and returns its output and exit code."""
    left_out = ("RANK", "WORLD_SIZE", "PJRT_DEVICE", "XLA_FLAGS", "LIBTPU_INIT_ARGS")
    environment = {key: value for key, value in os.environ.items() if key not in left_out}
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment["CUDA_VISIBLE_DEVICES"] = ""  # a plan is the same on machines with GPUs and without
    with tempfile.TemporaryFile() as log:
        try:
            code = subprocess.run(
                [sys.executable, "-P", "-m", module, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=environment, timeout=limit, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            raise NotPlanned(f"{what} took more than {limit:g} s") from None
        log.seek(0)
        return log.read().decode(errors="replace"), code


def kept(log: str) -> str:
    """Keeps the output of a process in a temporary file, and returns a sentence that names it."""
    descriptor, file = tempfile.mkstemp(prefix="lockstep-plan-", suffix=".log")
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as out:
        out.write(log)
    return f"All that was said: {file}"


_SHOWN = 10
_WHEN = {"forward": "the forward pass", "backward": "the backward pass", "optimizer": "the optimizer's step"}


def lines(plan: Plan) -> Iterator[str]:
    step, target = plan.step, plan.target
    verdict = f"{plan.margin / GIB:.1f} GiB left" if plan.fits else f"{-plan.margin / GIB:.1f} GiB too much"
    yield f"{target.title}: {'fits' if plan.fits else 'DOES NOT FIT'}, {verdict}"
    kept = f", of which {plan.reserved / GIB:.1f} are kept back for the driver" if plan.reserved else ""
    when = f" in {_WHEN[step.phase]}" if step.phase in _WHEN else ""  # a compiler says nothing of it
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
