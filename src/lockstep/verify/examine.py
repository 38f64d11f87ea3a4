"""The whole comparison: every combination from the start, then every one from the checkpoint of the one before it."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.checkpoint import manifest, merge
from lockstep.config.load import load
from lockstep.config.schema import RunConfig
from lockstep.errors import CheckpointError, ConfigError
from lockstep.launchers.ssh.commands import host_names
from lockstep.record.run_folder import CONFIG_FILE
from lockstep.verify import trial
from lockstep.verify.combinations import COMBINATIONS, REFERENCE, USUAL, Combination, halfway, missing, named, needed
from lockstep.verify.findings import (
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
from lockstep.verify.trial import Trial
from lockstep.verify.workers import Lanes


def examine(asked: Asked, work: Path, say: Callable[[str], None]) -> Report:
    """Run what can run here, side by side where there are cores for it, in folders below `work`; `say` is told what is
    under way, and what came of it."""
    required = named(asked.require, "--require")
    wanted = named(asked.only or ("*",), "--only") | required | {REFERENCE.name}
    config = load(asked.config, (*USUAL, *asked.overrides, *needed(asked.steps), *REFERENCE.overrides))
    allowed = tolerance(config.train.precision, asked.steps) if asked.tolerance is None else asked.tolerance
    lanes = Lanes(work, sum(each.name in wanted and not each.alone for each in COMBINATIONS[1:]))
    with lanes.open():
        runs = _Runs(asked, config, _hosts(asked), allowed, work, say, lanes)
        return _compared(runs, wanted, required)


def _compared(runs: _Runs, wanted: set[str], required: set[str]) -> Report:
    asked, config = runs.asked, runs.config
    rows = [Row(REFERENCE, runs.reference(), required=REFERENCE.name in required)]
    report = Report(asked, config.train.precision, runs.allowed, rows)
    reference = rows[0].fresh.trial
    if rows[0].fresh.verdict != "reference" or reference is None or reference.folder is None:
        return report  # there is nothing to compare the others with
    others = [each for each in COMBINATIONS[1:] if each.name in wanted]
    fresh = runs.each(others, lambda each: runs.from_the_start(each, reference), "from the start")
    rows += [Row(each, fresh[each.name], required=each.name in required) for each in others]

    report = replace(report, batch_norm=batch_statistics(reference.folder))
    if draws_random_numbers(reference.folder):
        return _unjudged(report, config)
    if any(row.fresh.comparison is not None and row.fresh.comparison.first_step for row in rows):
        report = replace(report, control=runs.control(reference))
    return replace(report, rows=runs.ring(rows, reference)) if asked.resume else report


@dataclass(frozen=True)
class _Runs:
    """Starts runs and judges them."""

    asked: Asked
    config: RunConfig
    hosts: list[str]
    allowed: float
    work: Path
    say: Callable[[str], None]
    lanes: Lanes

    def each(
        self, combinations: Sequence[Combination], judge: Callable[[Combination], Judged], what: str
    ) -> dict[str, Judged]:
        """What comes of all of them, by name: those that may be side by side first, then the rest one by one."""
        ended: list[str] = []

        def judged(combination: Combination) -> Judged:
            found = judge(combination)
            ended.append(combination.name)
            if found.trial is not None:
                took = f"{found.verdict} in {found.trial.seconds:.1f} s"
                self.say(f"{combination.name}: {took}; {len(ended)} of {len(combinations)} {what}")
            return found

        together = [each for each in combinations if not each.alone]
        results = self.lanes.side_by_side([partial(judged, each) for each in together])
        found = dict(zip((each.name for each in together), results, strict=True))
        return found | {each.name: judged(each) for each in combinations if each.alone}

    def reference(self) -> Judged:
        run = self._train(REFERENCE)
        without = [step for step in range(1, self.asked.steps + 1) if step not in run.losses]
        if without and not run.failure:
            failure = f"it wrote no loss of step {without[0]}: did the task stop it, or skip that step?"
            run = replace(run, failure=failure)
        return Judged("failed", run, reason=run.failure) if run.failure else Judged("reference", run)

    def from_the_start(self, combination: Combination, reference: Trial) -> Judged:
        lacking = missing(combination, self.hosts)
        if lacking is not None:
            return Judged("not here", reason=lacking)
        return self._judge(self._train(combination), reference.losses, reference.metrics)

    def control(self, reference: Trial) -> Comparison | None:
        """One process with its batches in halves: how far rounding alone takes this training, to tell an unstable one
        from a wrong one; and at step 1, whether the loss is the mean over the examples."""
        parts = 2 * self.config.train.accumulate
        if self.config.train.batch_size % parts:
            return None
        halves = (*REFERENCE.overrides, f"train.accumulate={parts}")
        run = self._train(replace(REFERENCE, name=f"{REFERENCE.name}-in-halves", overrides=halves))
        return None if run.failure else compare(reference.losses, run.losses, self.allowed)

    def ring(self, rows: list[Row], reference: Trial) -> list[Row]:
        """Hand every good run's half-way checkpoint to the next good combination, and the last one's to the first.

        Hosts give theirs, and take none: a run is brought from there, and none is brought there.
        """
        half = halfway(self.asked.steps)
        rest = {step: loss for step, loss in reference.losses.items() if step > half}
        good = [row for row in rows if row.good]
        if len(good) == 1:
            return rows  # nobody to hand anything to
        givers = {
            taker.combination.name: (giver, taker) for giver, taker in zip([good[-1], *good[:-1]], good, strict=True)
        }

        def resume(combination: Combination) -> Judged:
            (giver, taker), name = givers[combination.name], combination.name
            before = giver.combination.name
            self.say(f"{name}: from the checkpoint of {before} at step {half}")
            run = _handed_over(giver.fresh.trial, taker.fresh.trial, half, self.work / f"{name}-resumed")
            gone_on = trial.resume(combination, run, self.asked.limit, self.lanes)
            return replace(self._judge(gone_on, rest, reference.metrics), resumed_from=before)

        resumed = self.each([row.combination for row in good if not row.combination.hosts], resume, "resumed")
        return [replace(row, resumed=resumed.get(row.combination.name)) for row in rows]

    def _train(self, combination: Combination) -> Trial:
        self.say(f"{combination.name}: {self.asked.steps} steps")
        overrides = (*USUAL, *self.asked.overrides, *needed(self.asked.steps), *combination.overrides)
        given = (combination, self.asked.config, overrides, self.work / combination.name, self.asked.limit)
        return trial.train_on_hosts(*given) if combination.hosts else trial.train(*given, self.lanes)

    def _judge(self, run: Trial, reference: Losses, metrics: Mapping[str, float]) -> Judged:
        if run.failure:
            return Judged("failed", run, reason=run.failure)
        comparison = compare(reference, run.losses, self.allowed)
        names = metrics_apart(metrics, run.metrics, self.allowed)
        apart = {name: (run.metrics.get(name), metrics.get(name)) for name in names}
        verdict: Verdict = "agrees" if comparison.agrees and not apart else "differs"
        return Judged(verdict, run, comparison, metrics_apart=apart)


def _hosts(asked: Asked) -> list[str]:
    """Those that train, by the config as it stands."""
    config = load(asked.config, (*USUAL, *asked.overrides, *needed(asked.steps)))
    return host_names(config)[: config.launch.nodes] if config.launch.type == "ssh" else []


def _unjudged(report: Report, config: RunConfig) -> Report:
    """Of a task that draws random numbers: neither agreement nor difference of its losses means anything."""
    likely = [name for name in config.task.arguments if any(part in name.lower() for part in ("drop", "augment"))]
    rows = [
        replace(row, fresh=replace(row.fresh, verdict="random")) if row.fresh.comparison is not None else row
        for row in report.rows
    ]
    return replace(report, rows=rows, random=True, random_arguments=likely)


def _handed_over(giver: Trial | None, taker: Trial | None, step: int, out: Path) -> Path:
    """A run's folder with one's checkpoint and the other's config. Moved, not copied: nobody else needs it."""
    if giver is None or giver.folder is None or taker is None or taker.folder is None:
        raise AssertionError("only runs that ended well are in the ring")
    name = f"step-{step:08d}"
    checkpoint = giver.folder / "checkpoints" / name
    if not checkpoint.is_dir():
        raise CheckpointError(f"{giver.folder}: the run saved no {name}; its log is {giver.log}")
    run = out / "runs" / taker.folder.name
    (run / "checkpoints").mkdir(parents=True)
    (run / "logs").mkdir()
    checkpoint.rename(run / "checkpoints" / name)
    shutil.copy(taker.folder / CONFIG_FILE, run / CONFIG_FILE)
    return run


def draws_random_numbers(run: Path) -> bool:
    """Whether any generator moved between the run's checkpoints: dropout, or another draw of the training step.

    Every rank draws numbers of its own, so that the losses of such a task differ with the number of ranks by design.
    What a dataset draws is the same on any number of ranks, and moves none of these generators.
    """
    states = [_generators(folder) for folder in sorted((run / "checkpoints").glob("step-*"))]
    return any(state != states[0] for state in states)


def batch_statistics(run: Path) -> list[str]:
    """The layers that normalise by statistics of a rank's share of the batch."""
    newest = max((run / "checkpoints").glob("step-*"), default=None)
    if newest is None:
        return []
    return [name.removesuffix(".running_mean") for name in _tensors(newest) if name.endswith(".running_mean")]


def _generators(checkpoint: Path) -> Any:
    return json.loads((checkpoint / manifest.TREE_FILE).read_text(encoding="utf-8"))["state"]["generators"]


def _tensors(checkpoint: Path) -> list[str]:
    return [each.name for each in merge.weights(checkpoint, manifest.read(checkpoint))[0]]


@dataclass
class Place:
    path: Path
    keep: bool


@contextlib.contextmanager
def work_folder(out: Path | None) -> Iterator[Place]:
    """A new folder: the one that was asked for, or a temporary one that goes unless it is to be kept."""
    if out is None:
        place = Place(Path(tempfile.mkdtemp(prefix="lockstep-verify-")), keep=False)
    else:
        try:
            out.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(f"--out {out}: a new folder cannot be made there: {error.strerror}") from None
        place = Place(out.resolve(), keep=True)
    try:
        with _ending_like_an_interrupt():
            yield place
    finally:
        if not place.keep:
            shutil.rmtree(place.path, ignore_errors=True)


@contextlib.contextmanager
def _ending_like_an_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does: the run under way is ended, nothing stays behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
