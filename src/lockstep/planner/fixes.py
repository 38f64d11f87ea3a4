"""What would make a step fit, the cheapest first: each fix is traced, and its time estimated.

Some change only how the step is computed (accumulation, activation checkpointing, fsdp, compile); others say that they
change what is computed (bf16, a smaller batch). If none is enough, some are combined.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.config.schema import RunConfig
from lockstep.config.strategy import DATA_AXIS, batch_shares
from lockstep.planner.figures import Step, estimate
from lockstep.planner.plan import Plan
from lockstep.planner.traces import NO_TIME

# For each of some overrides its step, or why there is none.
Trace = Callable[[Sequence[Sequence[str]]], list[Step | str]]

Asked = tuple[Mapping[str, Any], str]  # what to set, and what else to say of it

SHOWN = 3
OFF_BY = 0.06  # of what is really needed, plans were too low by this at most (docs/decisions/030)
_GROWS = ("activations", "temporaries", "batch")  # with the examples that are computed at once
_MOST_PARTS = 64
_LESS = 0.1  # of the peak: a remedy that brings no more is none
_GUESSES = 2  # of a number of parts, or of a batch: the second by the trace of the first
_RECOMPUTE = {"train.activation_checkpointing": "blocks"}


@dataclass(frozen=True)
class Fix:
    values: Mapping[str, Any]
    plan: Plan
    more_time: float  # per example, as a share of what it takes now; less than 0: it is faster
    note: str = ""

    @property
    def command(self) -> str:
        return " ".join(f"--set {shlex.quote(each)}" for each in _overrides(self.values))


@dataclass(frozen=True)
class Found:
    """The fixes that are enough, the cheapest first, and those there was no time to try."""

    fixes: list[Fix]
    least: Fix | None  # what needs the least, where none is enough
    untried: list[str]


def size(count: float) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if count >= 0.1 * unit:
            return f"{count / unit:.1f} {name}"
    return f"{count / 2**10:.1f} KiB"


def find(plan: Plan, config: RunConfig, trace: Trace) -> Found:
    """Finds what fits with a margin for the error of plans; for a step that should fit but failed, what needs less."""
    certain = plan.capacity * (1 - OFF_BY)
    search = _Search(plan, config, trace, min(certain, plan.step.peak * (1 - _LESS)))
    singles = list(_singles(plan, config))
    search.several([*singles, *search.guesses()])
    search.several(list(search.guesses()))
    if not search.enough:
        together = {**_RECOMPUTE, **next((each for each, _ in singles if "strategy" in each), {})}
        search.several([(together, "")])
        for _ in range(_GUESSES):
            search.several(list(search.more_parts(together)))
    return search.found()


def lines(found: Found, plan: Plan) -> Iterator[str]:
    if found.fixes:
        yield "cheapest remedies, by the plan and the estimate of its time:"
    for each in found.fixes[:SHOWN]:
        yield from _told(each, plan)
    if not found.fixes and not found.untried:
        yield f"nothing that was tried {'needs much less' if plan.fits else 'fits'}: more devices, or a smaller model"
    if not found.fixes and found.least is not None:
        yield "what needs the least:"
        yield from _told(found.least, plan)
    if found.untried:
        yield f"there was no time to try {', '.join(found.untried)}"


def _told(one: Fix, plan: Plan) -> Iterator[str]:
    peak = one.plan.step.peak
    note = f"; {one.note}" if one.note else ""
    yield f"  {one.command}"
    yield f"      needs {size(peak)}, {size(plan.step.peak - peak)} less; {_time(one.more_time)}{note}"


def _time(more: float) -> str:
    if abs(more) < 0.005:
        return "takes the same time"
    return f"takes {abs(more):.0%} {'more' if more > 0 else 'less'} time"


def _singles(plan: Plan, config: RunConfig) -> Iterator[Asked]:
    count, train, own = plan.target.count, config.train, config.strategy
    if train.activation_checkpointing is None:
        yield dict(_RECOMPUTE), ""
    if count > 1 and own.type in ("auto", "ddp"):
        kept = {"blocks": own.blocks} if own.blocks is not None else {}
        yield {"strategy": {"type": "fsdp", "mesh": {DATA_AXIS: count}, **kept}}, ""
    if train.precision in ("float32", "tf32") and "bf16" in plan.target.device.peak:
        yield {"train.precision": "bf16"}, "rounds more"
    if not train.compile and config.runtime != "cpu":
        yield {"train.compile": True}, ""


class _Search:
    def __init__(self, plan: Plan, config: RunConfig, trace: Trace, enough: float) -> None:
        self._plan, self._config, self._trace, self._limit = plan, config, trace, enough
        self._tried: list[Fix] = []
        self._untried: list[str] = []
        self._asked: list[Mapping[str, Any]] = []

    @property
    def enough(self) -> list[Fix]:
        return [each for each in self._tried if each.plan.step.peak <= self._limit]

    def found(self) -> Found:
        less = [each for each in self._tried if each.plan.step.peak < self._plan.step.peak]
        least = min(less, key=lambda each: each.plan.step.peak, default=None)
        # Of those that take as long, first what computes the same.
        enough = sorted(self.enough, key=lambda each: (round(each.more_time, 2), "train.batch_size" in each.values))
        return Found(enough, None if enough else least, self._untried)

    def several(self, asked: Sequence[Asked]) -> None:
        """Traces them in parallel. What cannot be traced is left out."""
        new = [(values, note) for values, note in asked if values not in self._asked]
        self._asked += [values for values, _ in new]
        steps = self._trace([_overrides(values) for values, _ in new]) if new else []
        for (values, note), step in zip(new, steps, strict=True):
            self._note(values, note, step)

    def guesses(self) -> Iterator[Asked]:
        """Estimates a number of micro-batches and a batch size from the traces so far."""
        yield from self.more_parts({}, "the same batch in more parts")
        yield from self._smaller_batch()

    def more_parts(self, beside: Mapping[str, Any], note: str = "") -> Iterator[Asked]:
        """A power of two, at most the number of examples."""
        dp_size = batch_shares(self._config.strategy, "cuda", self._plan.target.count)
        most = min(self._plan.step.batch // max(dp_size, 1), _MOST_PARTS)
        before = self._with({*beside, "train.accumulate"})
        step = before[-1].plan.step if before else self._of(beside)
        parts = before[-1].values["train.accumulate"] if before else self._config.train.accumulate
        if before and step.peak <= self._limit:
            return
        growing = _growing(step)
        wanted = parts * 2
        while wanted < most and step.peak - growing + growing * parts / wanted > self._limit:
            wanted *= 2
        if wanted <= most:
            yield {**beside, "train.accumulate": wanted}, note

    def _smaller_batch(self) -> Iterator[Asked]:
        """Memory is linear in the batch size."""
        steps = [self._plan.step, *(each.plan.step for each in self._with({"train.batch_size"}))]
        count, last = max(self._plan.target.count, 1), steps[-1]
        if len(steps) > 1 and last.peak <= self._limit:
            return
        slope = _growing(last) / last.batch
        if len(steps) > 1:
            slope = (steps[-2].peak - last.peak) / (steps[-2].batch - last.batch)
        wanted = int((last.batch - (last.peak - self._limit) / slope) // count) * count if slope > 0 else 0
        if count <= wanted < last.batch:
            yield {"train.batch_size": wanted}, "another batch, which a resumed run cannot change to"

    def _with(self, keys: set[str]) -> list[Fix]:
        """Returns the fixes that set just these keys, in the order they were tried."""
        return [each for each in self._tried if set(each.values) == keys]

    def _of(self, values: Mapping[str, Any]) -> Step:
        return next((each.plan.step for each in self._tried if each.values == values), self._plan.step)

    def _note(self, values: Mapping[str, Any], note: str, step: Step | str) -> None:
        if isinstance(step, str):
            if step == NO_TIME:
                self._untried.append(" with ".join(values))
            return
        target = self._plan.target
        plan = Plan(target, step, estimate(step, target, self._config.train.precision), None, False)
        before, after = self._plan.estimate.step / self._plan.step.batch, plan.estimate.step / step.batch
        self._tried.append(Fix(values, plan, after / before - 1 if before else 0.0, note))


def _growing(step: Step) -> int:
    return sum(step.by_kind.get(kind, 0) for kind in _GROWS)


def _overrides(values: Mapping[str, Any]) -> list[str]:
    return [f"{path}={value if isinstance(value, str) else json.dumps(value)}" for path, value in values.items()]
