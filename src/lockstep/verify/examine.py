"""The whole comparison: every combination from the start, then every one from the checkpoint of the one before it."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lockstep.checkpoint import manifest
from lockstep.checkpoint.header import read_header
from lockstep.config.load import load
from lockstep.config.schema import RunConfig
from lockstep.errors import CheckpointError, ConfigError
from lockstep.record.run_folder import CONFIG_FILE
from lockstep.verify import trial
from lockstep.verify.combinations import COMBINATIONS, REFERENCE, USUAL, Combination, halfway, missing, named, needed
from lockstep.verify.report import (
    Asked,
    Comparison,
    Judged,
    Losses,
    Report,
    Row,
    Verdict,
    compare,
    metrics_apart,
    tolerance,
)
from lockstep.verify.trial import RunPool, Trial


def examine(asked: Asked, work: Path, say: Callable[[str], None]) -> Report:
    """Runs what can run here, side by side if there are cores for it, in folders below `work`; `say` shows progress."""
    required = named(asked.require, "--require")
    wanted = named(asked.only or ("*",), "--only") | required | {REFERENCE.name}
    overrides = (*USUAL, *asked.overrides, *needed(asked.steps))
    config = load(asked.config, (*overrides, *REFERENCE.overrides))
    allowed = tolerance(config.train.precision, asked.steps) if asked.tolerance is None else asked.tolerance
    chosen = [each for each in COMBINATIONS[1:] if each.name in wanted]
    pool = RunPool(work, sum(not each.alone for each in chosen))
    with pool.open():
        runs = _Runs(asked, config, allowed, work, say, pool)
        report = Report(asked, config.train.precision, allowed, [Row(REFERENCE, runs.reference())], required=required)
        if report.rows[0].fresh.verdict != "reference":
            return report  # there is nothing to compare the others with
        not_here = {each.name: lacking for each in chosen if (lacking := missing(each)) is not None}
        chosen = [each for each in chosen if each.name not in not_here]
        return _compared(runs, chosen, replace(report, not_here=not_here))


def _compared(runs: _Runs, others: Sequence[Combination], report: Report) -> Report:
    reference = report.rows[0].fresh.trial

    def judged(each: Combination) -> Judged:
        run = runs.train(each)
        if each.exact and not run.failure:
            return Judged("reference", run)  # judged below, once all of them are there
        return runs.judge(run, reference.losses, reference)

    fresh = runs.each(others, judged, "from the start")
    refused = {
        each.name: failure
        for each in others
        if each.refusal and each.refusal in (failure := fresh[each.name].trial.failure)
    }
    others = [each for each in others if each.name not in refused]
    exact = [Row(each, fresh[each.name]) for each in others if each.exact]
    report = replace(report, exact=runs.in_every_bit(exact), not_here={**report.not_here, **refused})
    rows = [*report.rows, *(Row(each, fresh[each.name]) for each in others if not each.exact)]
    report = replace(report, rows=rows, batch_norm=batch_statistics(_folder(reference)))
    if draws_random_numbers(_folder(reference)):
        return _unjudged(report, runs.config)
    if any(row.fresh.comparison is not None and row.fresh.comparison.first_step for row in rows):
        report = replace(report, control=runs.control(reference))
    return replace(report, rows=runs.ring(rows, reference)) if report.asked.resume else report


@dataclass(frozen=True)
class _Runs:
    """Starts runs and judges them."""

    asked: Asked
    config: RunConfig
    allowed: float
    work: Path
    say: Callable[[str], None]
    pool: RunPool

    def each(
        self, combinations: Sequence[Combination], judge: Callable[[Combination], Judged], what: str
    ) -> dict[str, Judged]:
        """Returns all verdicts by name; judges those that may run side by side first, then the rest one by one."""
        ended: list[str] = []

        def judged(combination: Combination) -> Judged:
            found = judge(combination)
            ended.append(combination.name)
            verdict = "trained" if found.verdict == "reference" else found.verdict
            took = f"{verdict} in {found.trial.seconds:.1f} s"
            self.say(f"{combination.name}: {took}; {len(ended)} of {len(combinations)} {what}")
            return found

        together = [each for each in combinations if not each.alone]
        results = self.pool.side_by_side([partial(judged, each) for each in together])
        found = dict(zip((each.name for each in together), results, strict=True))
        return found | {each.name: judged(each) for each in combinations if each.alone}

    def reference(self) -> Judged:
        run = self.train(REFERENCE)
        without = [step for step in range(1, self.asked.steps + 1) if step not in run.losses]
        if without and not run.failure:
            failure = f"it wrote no loss of step {without[0]}: did the task stop it, or skip that step?"
            run = replace(run, failure=failure)
        return Judged("failed", run) if run.failure else Judged("reference", run)

    def control(self, reference: Trial) -> Comparison | None:
        """Runs one process with its batches in halves. It shows how far rounding alone takes this training, and at step
        1 whether the loss is the mean over the examples."""
        parts = 2 * self.config.train.accumulate
        if self.config.train.batch_size % parts:
            return None
        halves = (*REFERENCE.overrides, f"train.accumulate={parts}")
        run = self.train(replace(REFERENCE, name=f"{REFERENCE.name}-in-halves", overrides=halves))
        return None if run.failure else compare(reference.losses, run.losses, self.allowed)

    def ring(self, rows: list[Row], reference: Trial) -> list[Row]:
        """Resumes every good run from the half-way checkpoint of the one before it, and the first from the last."""
        half = halfway(self.asked.steps)
        rest = {step: loss for step, loss in reference.losses.items() if step > half}
        good = [row for row in rows if row.good]
        if len(good) == 1:
            return rows
        givers = {
            taker.combination.name: (giver, taker) for giver, taker in zip([good[-1], *good[:-1]], good, strict=True)
        }

        def resume(combination: Combination) -> Judged:
            (giver, taker), name = givers[combination.name], combination.name
            before = giver.combination.name
            self.say(f"{name}: from the checkpoint of {before} at step {half}")
            run = _handed_over(giver.fresh.trial, taker.fresh.trial, half, self.work / f"{name}-resumed")
            resumed = trial.resume(combination, run, self.asked.limit, self.pool)
            return replace(self.judge(resumed, rest, reference), resumed_from=before)

        resumed = self.each([row.combination for row in good], resume, "resumed")
        return [replace(row, resumed=resumed.get(row.combination.name)) for row in rows]

    def in_every_bit(self, rows: list[Row]) -> list[Row]:
        """Compares the runs with train.exact with the first of them, and resumes them from each other."""
        good = [row for row in rows if not row.fresh.trial.failure]
        if len(good) < 2:
            return rows
        first, strict = good[0].fresh.trial, replace(self, allowed=0.0)
        rows = [
            replace(row, fresh=strict.judge(row.fresh.trial, first.losses, first)) if row in good[1:] else row
            for row in rows
        ]
        return strict.ring(rows, first) if self.asked.resume else rows

    def train(self, combination: Combination) -> Trial:
        self.say(f"{combination.name}: {self.asked.steps} steps")
        overrides = (*USUAL, *self.asked.overrides, *needed(self.asked.steps), *combination.overrides)
        out = self.work / combination.name
        return trial.train(combination, self.asked.config, overrides, out, self.asked.limit, self.pool)

    def judge(self, run: Trial, losses: Losses, reference: Trial) -> Judged:
        if run.failure:
            return Judged("failed", run)
        comparison = compare(losses, run.losses, self.allowed)
        names = metrics_apart(reference.metrics, run.metrics, self.allowed)
        apart = {name: (run.metrics.get(name), reference.metrics.get(name)) for name in names}
        if not self.allowed and comparison.agrees and _last_weights(run) != _last_weights(reference):
            comparison = replace(comparison, first_step=self.asked.steps)
        verdict: Verdict = "agrees" if comparison.agrees and not apart else "differs"
        return Judged(verdict, run, comparison, metrics_apart=apart)


def _unjudged(report: Report, config: RunConfig) -> Report:
    """For a task that draws random numbers: neither agreement nor difference of its losses means anything."""
    likely = [name for name in config.task.arguments if any(part in name.lower() for part in ("drop", "augment"))]
    rows = [
        replace(row, fresh=replace(row.fresh, verdict="random")) if row.fresh.comparison is not None else row
        for row in report.rows
    ]
    return replace(report, rows=rows, random=True, random_arguments=likely)


def _handed_over(giver: Trial, taker: Trial, step: int, out: Path) -> Path:
    """Returns a run's folder with the giver's checkpoint, which is moved there, and the taker's config."""
    name = f"step-{step:08d}"
    checkpoint = _folder(giver) / "checkpoints" / name
    if not checkpoint.is_dir():
        raise CheckpointError(f"{giver.folder}: the run saved no {name}; its log is {giver.log}")
    run = out / "runs" / _folder(taker).name
    (run / "checkpoints").mkdir(parents=True)
    (run / "logs").mkdir()
    checkpoint.rename(run / "checkpoints" / name)
    shutil.copy(_folder(taker) / CONFIG_FILE, run / CONFIG_FILE)
    return run


def _last_weights(run: Trial) -> bytes:
    return max(_folder(run).glob("checkpoints/step-*/model.safetensors")).read_bytes()


def _folder(run: Trial) -> Path:
    assert run.folder is not None, "a run that ended well has a folder"
    return run.folder


def draws_random_numbers(run: Path) -> bool:
    """Whether any generator moved between the run's checkpoints: dropout, or another draw of the training step.

    Every rank draws other numbers, so that the losses of such a task differ with the number of ranks by design. What a
    dataset draws is the same on any number of ranks, and moves none of these generators.
    """
    files = sorted((run / "checkpoints").glob(f"step-*/{manifest.TREE_FILE}"))
    states = [json.loads(file.read_text(encoding="utf-8"))["state"]["generators"] for file in files]
    return any(state != states[0] for state in states)


def batch_statistics(run: Path) -> list[str]:
    """Returns the layers that normalise by statistics of a rank's part of the batch."""
    names: set[str] = set()
    newest = max((run / "checkpoints").glob("step-*"), default=None)
    for file in [] if newest is None else sorted(newest.glob("model*.safetensors")):
        with file.open("rb") as stream:
            names |= {each.tensor for each in read_header(stream, file.stat().st_size)}
    return sorted(name.removesuffix(".running_mean") for name in names if name.endswith(".running_mean"))


@contextlib.contextmanager
def work_folder(out: Path | None) -> Iterator[tuple[Path, contextlib.ExitStack]]:
    """Yields the folder that was asked for, or a temporary one, with what removes it in the end: `pop_all` keeps it.

    SIGTERM and SIGHUP raise KeyboardInterrupt meanwhile, as Ctrl-C does: nothing stays behind.
    """
    with contextlib.ExitStack() as ending:
        if out is None:
            folder = Path(tempfile.mkdtemp(prefix="lockstep-verify-"))
            ending.callback(shutil.rmtree, folder, ignore_errors=True)
        else:
            try:
                out.mkdir(parents=True)
            except OSError as error:
                raise ConfigError(f"--out {out}: a new folder cannot be made there: {error.strerror}") from None
            folder = out.resolve()
        before = {each: signal.signal(each, signal.default_int_handler) for each in (signal.SIGTERM, signal.SIGHUP)}
        try:
            yield folder, ending
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
