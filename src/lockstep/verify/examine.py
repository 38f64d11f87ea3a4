"""The whole comparison: every combination from the start, then every one from the checkpoint of the one before it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockstep.config.load import load
from lockstep.errors import ConfigError
from lockstep.runfolder import CONFIG_FILE
from lockstep.verify import byproduct, trial
from lockstep.verify.available import missing
from lockstep.verify.combinations import COMBINATIONS, REFERENCE, Combination, named
from lockstep.verify.judge import Comparison, Losses, Verdict, compare, tolerance
from lockstep.verify.overrides import USUAL, halfway, needed
from lockstep.verify.trial import Trial

Say = Callable[[str], None]


@dataclass(frozen=True)
class Asked:
    """What to compare, and how strictly."""

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
    """A run and what it came to."""

    verdict: Verdict
    trial: Trial | None = None
    comparison: Comparison | None = None
    reason: str = ""  # why it is not here, or failed
    resumed_from: str = ""


@dataclass(frozen=True)
class Row:
    """A combination: from the start, and from another's checkpoint (None where that was not tried)."""

    combination: Combination
    fresh: Judged
    resumed: Judged | None = None
    required: bool = False

    @property
    def good(self) -> bool:
        runs = [self.fresh] if self.resumed is None else [self.fresh, self.resumed]
        return all(each.verdict in ("reference", "agrees") for each in runs)


@dataclass(frozen=True)
class Report:
    asked: Asked
    precision: str
    tolerance: float
    rows: Sequence[Row]
    random: bool = False  # the task draws random numbers while it trains
    random_arguments: Sequence[str] = ()  # of the task, that look as if they were the reason
    batch_norm: Sequence[str] = field(default_factory=list)

    @property
    def ran(self) -> list[Row]:
        return [row for row in self.rows if row.fresh.verdict != "not here"]

    @property
    def agrees(self) -> bool:
        """At least one was compared, all that were are right, and none that is required is missing."""
        return len(self.ran) > 1 and all(row.good for row in self.rows if row.required or row in self.ran)


def examine(asked: Asked, work: Path, say: Say) -> Report:
    """Run what can run here, one after the other, in folders below `work`."""
    required = named(asked.require, "--require")
    wanted = named(asked.only, "--only") | required | {REFERENCE.name} if asked.only else {c.name for c in COMBINATIONS}
    config = load(asked.config, (*USUAL, *asked.overrides, *needed(asked.steps), *REFERENCE.overrides))
    allowed = tolerance(config.train.precision, asked.steps) if asked.tolerance is None else asked.tolerance

    rows: list[Row] = []
    for combination in (each for each in COMBINATIONS if each.name in wanted):
        reference = rows[0].fresh.trial if rows else None
        lacking = missing(combination, config.train)
        if lacking is not None:
            fresh = Judged("not here", reason=lacking)
        else:
            say(f"{combination.name}: {asked.steps} steps")
            fresh = _judge_fresh(_train(combination, asked, work), reference, allowed)
        rows.append(Row(combination, fresh, required=combination.name in required))
        if combination is REFERENCE and fresh.verdict != "reference":
            break  # there is nothing to compare the others with
    return _with_resumed(Report(asked, config.train.precision, allowed, rows), config.task.arguments, work, say)


def _train(combination: Combination, asked: Asked, work: Path) -> Trial:
    overrides = (*USUAL, *asked.overrides, *needed(asked.steps), *combination.overrides)
    return trial.train(combination, asked.config, overrides, work / combination.name, asked.limit)


def _judge_fresh(run: Trial, reference: Trial | None, allowed: float) -> Judged:
    if reference is None and not run.failure:
        if not run.losses:
            return Judged("failed", run, reason=f"it wrote no losses to {run.folder}")
        return Judged("reference", run)
    return _judge(run, reference.losses if reference else {}, allowed)


def _judge(run: Trial, reference: Losses, allowed: float) -> Judged:
    if run.failure:
        return Judged("failed", run, reason=run.failure)
    comparison = compare(reference, run.losses, allowed)
    return Judged("agrees" if comparison.agrees else "differs", run, comparison)


def _with_resumed(report: Report, arguments: dict[str, object], work: Path, say: Say) -> Report:
    reference = report.rows[0].fresh.trial
    if report.rows[0].fresh.verdict != "reference" or reference is None or reference.folder is None:
        return report
    report = replace(report, batch_norm=byproduct.batch_statistics(reference.folder))
    if byproduct.draws_random_numbers(reference.folder):
        # Neither agreement nor difference of other numbers of ranks means anything.
        rows = [_unjudged(row) for row in report.rows]
        likely = [name for name in arguments if any(part in name.lower() for part in ("drop", "augment", "noise"))]
        return replace(report, rows=rows, random=True, random_arguments=likely)
    return replace(report, rows=_ring(report, reference, work, say)) if report.asked.resume else report


def _unjudged(row: Row) -> Row:
    if row.fresh.verdict not in ("agrees", "differs"):
        return row
    return replace(row, fresh=replace(row.fresh, verdict="random"))


def _ring(report: Report, reference: Trial, work: Path, say: Say) -> list[Row]:
    """Hand every good run's half-way checkpoint to the next good combination, and the last one's to the first."""
    half = halfway(report.asked.steps)
    rest = {step: loss for step, loss in reference.losses.items() if step > half}
    good = [row for row in report.rows if row.good]
    resumed: dict[str, Judged] = {}
    for giver, taker in zip([good[-1], *good[:-1]], good, strict=True):
        say(f"{taker.combination.name}: from the checkpoint of {giver.combination.name} at step {half}")
        run = _handed_over(giver.fresh.trial, taker.fresh.trial, half, work / f"{taker.combination.name}-resumed")
        judged = _judge(trial.resume(taker.combination, run, report.asked.limit), rest, report.tolerance)
        resumed[taker.combination.name] = replace(judged, resumed_from=giver.combination.name)
    return [replace(row, resumed=resumed.get(row.combination.name)) for row in report.rows]


def _handed_over(giver: Trial | None, taker: Trial | None, step: int, out: Path) -> Path:
    """A run's folder with one's checkpoint and the other's config. Moved, not copied: nobody else needs it."""
    if giver is None or giver.folder is None or taker is None or taker.folder is None:
        raise AssertionError("only runs that ended well are in the ring")
    name = f"step-{step:08d}"
    checkpoint = giver.folder / "checkpoints" / name
    if not checkpoint.is_dir():
        raise ConfigError(f"{giver.folder}: the run saved no {name}; its log is {giver.log}")
    run = out / "runs" / taker.folder.name
    (run / "checkpoints").mkdir(parents=True)
    (run / "logs").mkdir()
    checkpoint.rename(run / "checkpoints" / name)
    shutil.copy(taker.folder / CONFIG_FILE, run / CONFIG_FILE)
    return run
