"""Compares losses and metrics, and shows what was found: a table for people, Markdown, an object for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lockstep.config.plain import columns, finite
from lockstep.verify.combinations import Combination, halfway
from lockstep.verify.trial import Trial

Losses = Mapping[int, float]
Verdict = Literal["reference", "agrees", "differs", "failed", "random"]

# Per step, relative; docs/verify.md says where it comes from. That of fp8 is a guess: ten times that of bf16.
TOLERANCE_PER_STEP = {"float32": 2e-6, "tf32": 1e-3, "bf16": 2e-3, "fp16": 2e-3, "fp8": 2e-2}

# Of a metric at the end, relative: of a hundred examples, one.
METRIC_TOLERANCE = 0.01


def tolerance(precision: str, steps: int) -> float:
    """Returns the difference that another order of summation may make after so many steps, with room to spare."""
    return TOLERANCE_PER_STEP[precision] * steps


@dataclass(frozen=True)
class Comparison:
    """The largest relative difference, the first step at which it is more than allowed, and the difference there."""

    largest: float
    first_step: int | None = None
    at_first: float = 0.0

    @property
    def agrees(self) -> bool:
        return self.first_step is None


def compare(reference: Losses, losses: Losses, allowed: float) -> Comparison:
    """Compares step by step. A step that only one of them has is infinitely different."""
    apart = {step: _apart(reference.get(step), losses.get(step)) for step in sorted({*reference, *losses})}
    first = next((step for step, difference in apart.items() if not difference <= allowed), None)
    return Comparison(max(apart.values(), default=math.inf), first if apart else 0, apart.get(first or 0, 0.0))


def metrics_apart(reference: Mapping[str, float], metrics: Mapping[str, float], allowed: float) -> dict[str, float]:
    """Returns the final metrics that differ by more than is allowed, and by how much.

    A loss moves with the weights. Other metrics may jump: one example on the other side of a threshold is no fault.
    """
    apart = {name: _apart(reference.get(name), metrics.get(name)) for name in sorted({*reference, *metrics})}
    return {
        name: difference
        for name, difference in apart.items()
        if not difference <= (allowed * 10 if "loss" in name else max(allowed, METRIC_TOLERANCE))
    }


def _apart(reference: float | None, other: float | None) -> float:
    if reference is None or other is None or not (math.isfinite(reference) and math.isfinite(other)):
        return math.inf
    if reference == other:
        return 0.0
    return abs(other - reference) / abs(reference) if reference else math.inf


@dataclass(frozen=True)
class Asked:
    config: Path
    steps: int
    overrides: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    require: tuple[str, ...] = ()
    tolerance: float | None = None
    limit: float = 300.0
    resume: bool = True


@dataclass(frozen=True)
class Judged:
    """A run and its verdict."""

    verdict: Verdict
    trial: Trial
    comparison: Comparison | None = None
    metrics_apart: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)  # here, reference
    resumed_from: str = ""


@dataclass(frozen=True)
class Row:
    """A combination: from the start, and from another's checkpoint (None where that was not tried)."""

    combination: Combination
    fresh: Judged
    resumed: Judged | None = None

    @property
    def good(self) -> bool:
        runs = [self.fresh] if self.resumed is None else [self.fresh, self.resumed]
        return all(each.verdict in ("reference", "agrees") for each in runs)


@dataclass(frozen=True)
class Report:
    """The first row is the reference."""

    asked: Asked
    precision: str
    tolerance: float
    rows: Sequence[Row]
    not_here: Mapping[str, str] = field(default_factory=dict)  # combinations that cannot run -> why
    required: Collection[str] = ()
    random: bool = False  # the task draws random numbers while it trains
    random_arguments: Sequence[str] = ()  # of the task, that are probably the reason
    batch_norm: Sequence[str] = ()  # layers that normalise by a rank's part of the batch
    # The reference with its batches taken in halves: another order of summation, and nothing else.
    control: Comparison | None = None
    exact: Sequence[Row] = ()  # with train.exact; the first is the reference of the others

    @property
    def agrees(self) -> bool:
        """At least one was compared, all that were agree, and none that is required is missing.

        What draws random numbers is judged by the runs with train.exact.
        """
        judged = [row for row in (*self.rows, *self.exact) if row.fresh.verdict != "random"]
        compared = len(self.exact if self.random else [*self.rows, *self.exact[1:]])
        return compared > 1 and all(row.good for row in judged) and not self.required_missing

    @property
    def required_missing(self) -> dict[str, str]:
        return {name: reason for name, reason in self.not_here.items() if name in self.required}


_ALL_SHOWN = 5  # steps; of more, the first three and the last
# Rounding grows from step to step. In units of the tolerance, so much at once is something else.
_JUMP = 20
_SUM_DIFFERENCE = 0.4  # relative, of halves: a loss that is a sum over the examples differs by half


def text(report: Report) -> str:
    return "\n".join(columns(_table(report)))


def markdown(report: Report) -> str:
    head, *rows = _table(report)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def conclusion(report: Report) -> str:
    """Says what the comparison found, and what to do about what differs."""
    required = report.required_missing
    bad = [row for row in (*report.rows, *report.exact) if not row.good]
    lines = _not_here(report) + [f"{name} is required and not here: {reason}" for name, reason in required.items()]
    for row in bad:
        if row.resumed is not None and row.fresh.verdict in ("reference", "agrees"):
            which = f", resumed from the checkpoint of {row.resumed.resumed_from},"
            lines.append(f"{row.combination.name}{which} {_failed_or_differs(row.resumed)}")
        elif row.fresh.verdict != "random":
            lines.append(f"{row.combination.name} {_failed_or_differs(row.fresh)}")
    lines += [*_by_halves(report), *_by_design(report)]
    allowed = f"tolerance {report.tolerance:.3g}, {report.precision}, {report.asked.steps} steps"
    count = len(report.rows)
    same = f"{len(report.exact)} with train.exact have the same bits"
    if report.agrees and report.random:
        lines.append(f"{same}, on any number of ranks; the others are not comparable: random")
    elif report.agrees:
        runs = [each for row in report.rows for each in (row.fresh, row.resumed) if each is not None]
        largest = max((each.comparison.largest for each in runs if each.comparison is not None), default=0.0)
        bits = f"; {same}" if len(report.exact) > 1 else ""
        lines.append(f"all {count} agree: the largest difference is {largest:.1e} ({allowed}){bits}")
    elif report.rows[0].fresh.verdict != "reference":
        lines.append(f"nothing was compared: {report.rows[0].combination.name}, the reference, did not run")
    elif count == 1:
        lines.append("nothing was compared: no combination but the reference can run here with this config")
    elif report.random:
        failed = sum(row.fresh.verdict == "failed" for row in report.rows)
        lines.append("not comparable: random" + (f"; {failed} of {count} failed" if failed else ""))
    else:
        count += len(report.exact)
        lines.append(f"{len(bad) + len(required)} of {count + len(required)} do not agree ({allowed})")
    return "\n".join(lines)


def as_json(report: Report) -> str:
    """JSON has no NaN: an infinite difference is null."""
    asked = report.asked
    everything = {
        "agrees": report.agrees,
        "config": str(asked.config),
        "steps": asked.steps,
        "resumed_at": halfway(asked.steps) if asked.resume else None,
        "precision": report.precision,
        "tolerance": report.tolerance,
        "reference": report.rows[0].combination.name,
        "draws_random_numbers": report.random,
        "control_difference": report.control.largest if report.control else None,
        "combinations": [
            {
                "name": row.combination.name,
                "required": row.combination.name in report.required,
                **_plain(row.fresh),
                "resumed": None if row.resumed is None else _plain(row.resumed),
            }
            for row in (*report.rows, *report.exact)
        ],
        "not_here": dict(report.not_here),
        "conclusion": conclusion(report).splitlines(),
    }
    return json.dumps(finite(everything), indent=2)


def _table(report: Report) -> list[list[str]]:
    """Returns a head, and a row for every combination that ran."""
    steps = list(range(1, report.asked.steps + 1))
    if len(steps) > _ALL_SHOWN:
        steps = [1, 2, 3, report.asked.steps]
    head = ["combination", "verdict", f"loss at step {steps[0]}", *map(str, steps[1:]), "largest difference"]
    if report.asked.resume:
        head += [f"resumed at {halfway(report.asked.steps)} from", "largest difference", "verdict"]
    rows = [head]
    for row in (*report.rows, *report.exact):
        fresh, resumed = row.fresh, row.resumed
        known = fresh.trial.losses
        losses = [f"{known[step]:.7g}" if step in known else "none" for step in steps]
        cells = [row.combination.name, fresh.verdict, *losses, _difference(fresh)]
        if report.asked.resume:
            cells += ["-"] * 3 if resumed is None else [resumed.resumed_from, _difference(resumed), resumed.verdict]
        rows.append(cells)
    return rows


def _not_here(report: Report) -> list[str]:
    """Returns one line for all combinations that cannot run, by reason."""
    absent: dict[str, list[str]] = {}
    for name, reason in report.not_here.items():
        if name not in report.required:
            absent.setdefault(reason, []).append(name)
    listed = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in absent.items())
    return [f"not here: {listed}"] if listed else []


def _difference(judged: Judged) -> str:
    if judged.comparison is None:
        return "-"
    return f"{judged.comparison.largest:.1e}" if judged.comparison.largest else "0"


def _number(value: float | None) -> str:
    return "not there" if value is None else f"{value:.6g}"


def _failed_or_differs(judged: Judged) -> str:
    log = f"; log: {judged.trial.log}"
    if judged.comparison is None:
        return f"failed: {judged.trial.failure}{log}"
    first = judged.comparison.first_step
    if first is None:
        shown = ", ".join(f"{name} is {_number(here)} and not {_number(there)}"
                          for name, (here, there) in judged.metrics_apart.items())  # fmt: skip
        return (
            f"has the losses of the reference, but not its metrics: {shown}. A metric must be one value per example, "
            f"or a lockstep.Mean, and must not depend on how examples fall into batches{log}"
        )
    if judged.resumed_from:
        return f"differs from step {first} on: the checkpoint does not bring back the same state{log}"
    if first == 1:
        return (
            "differs at step 1: equal weights and an equal batch give another loss. Look for a loss that is not the "
            f"mean over the examples (a sum, or a mean over tokens that count) or that depends on the rank{log}"
        )
    return (
        f"differs from step {first} on and agrees before: the forward pass is the same, the gradients, their reduction "
        f"or the update are not{log}"
    )


def _by_halves(report: Report) -> Sequence[str]:
    """Says what one process that takes its batches in halves shows about the reason."""
    control = report.control
    if control is None:
        return []
    if control.first_step == 1 or control.at_first > _JUMP * report.tolerance:
        return _by_counts(report, control)
    if not any(row.fresh.comparison is not None and (row.fresh.comparison.first_step or 0) > 1 for row in report.rows):
        return []
    alone = "one process that takes its batches in halves, which is the same sum in another order,"
    if control.first_step is None:
        return [f"rounding is not the reason: {alone} agrees with the reference to {control.largest:.1e}"]
    fewer = f"--steps {control.first_step - 1}" if control.first_step > 2 else "a lower learning rate"
    return [
        f"rounding may be the reason: {alone} differs from the reference as well, from step {control.first_step} on "
        f"and by up to {control.largest:.1e}. The training is unstable there; compare with {fewer}"
    ]


def _by_counts(report: Report, control: Comparison) -> Sequence[str]:
    """The mean of two halves is the mean of the whole only if both have the same count."""
    if report.batch_norm or control.at_first >= _SUM_DIFFERENCE:  # other reasons, which are named elsewhere
        return []
    return [
        "the loss is a mean over unequal counts: one process that takes its batches in halves differs as well, at step "
        f"{control.first_step} by {control.at_first:.1e}, without any other rank. It is a mean over tokens, or over "
        "labels that are not -100, as `model(**batch).loss` of Hugging Face is. Divide by the count of the whole "
        'batch: `n = (batch["labels"][:, 1:] != -100).sum()`, then `return lockstep.Mean(model(**batch).loss * n, n)` '
        "(docs/coming-from.md)"
    ]


def _by_design(report: Report) -> Sequence[str]:
    """Names what makes losses depend on the number of ranks although nothing is broken."""
    notes = []
    if report.random:
        likely = " ".join(f"--set task.{name}=0" for name in report.random_arguments)
        notes.append(
            "the task draws random numbers while it trains (dropout, a VAE, diffusion). Every rank draws its own, so "
            "that losses differ with the number of ranks, and chance hides what would be wrong. Only train.exact makes "
            "them comparable (the rows exact-1 to exact-8). Or compare without them: "
            f"{likely or '--set task.dropout=0, or whatever your task calls it'}"
        )
    if report.batch_norm and any(row.fresh.verdict == "differs" for row in report.rows):
        notes.append(
            f"{', '.join(report.batch_norm[:3])}{' ...' if len(report.batch_norm) > 3 else ''} normalise by the "
            "statistics of a rank's part of the batch, so that the loss depends on the number of ranks; a norm over "
            "the features of an example (LayerNorm, GroupNorm) does not"
        )
    return notes


def _plain(judged: Judged) -> dict[str, Any]:
    run, comparison = judged.trial, judged.comparison
    return {
        "verdict": judged.verdict,
        "reason": run.failure or None,
        "resumed_from": judged.resumed_from or None,
        "losses": {str(step): loss for step, loss in run.losses.items()},
        "largest_difference": comparison.largest if comparison else None,
        "differs_from_step": comparison.first_step if comparison else None,
        "metrics": dict(run.metrics),
        "metrics_that_differ": sorted(judged.metrics_apart),
        "seconds": round(run.seconds, 3),
        "command": run.command,
        "log": str(run.log),
    }
