"""What there is to say of a run at a glance: how it went, what went wrong, and what is worth a look."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from lockstep.runs.reader import LOST, Run
from lockstep.runs.records import number, seconds_by_kind, text, typical

# A rank that is behind the fastest by less than this of a step, or by less than a millisecond, is not worth mentioning.
_SLOW_SHARE, _SLOW_SECONDS = 0.1, 0.001
# A share of the time that something else than training may take before it is told.
_LARGE_SHARE = 0.25
_SHORTEST = 60.0  # seconds of a run whose shares say something


@dataclass(frozen=True)
class Finding:
    kind: str  # good, bad or note
    text: str


def verdict(run: Run) -> Finding:
    """One sentence: how the run is, or how it ended."""
    summary = run.summary
    where = f"step {run.step}"
    if run.is_running and run.live is not None and run.live.total_steps:
        where += f" of {run.live.total_steps}"
    if (epoch := number(summary.get("epoch"))) is not None and not run.is_running:
        where = f"epoch {epoch:g}, {where}"
    seconds = number(summary.get("seconds"))
    took = f" after {duration(seconds)} of training" if seconds is not None and not run.is_running else ""
    reason = text(summary.get("reason"))
    if run.status == "failed":
        last = next((each for each in reversed(run.failures) if not each.restarted), None)
        return Finding("bad", f"failed after {where}: {first_line(last.headline if last else reason)}")
    if run.status == LOST:
        return Finding("bad", f"gone after {where}: nothing was heard of it any more, and it never said how it ended")
    if run.is_running:
        return Finding("note", f"running, at {where}")
    restarts = sum(each.restarted for each in run.failures)
    more = f", after {restarts} restart{'s' if restarts > 1 else ''}" if restarts else ""
    why = f": {first_line(reason)}" if reason else ""
    return Finding(kind_of(run.status), f"{run.status} at {where}{took}{more}{why}")


def kind_of(status: str) -> str:
    if status in ("failed", LOST):
        return "bad"
    return "good" if status in ("completed", "stopped early") else "note"


def findings(run: Run) -> list[Finding]:
    """What else is worth a look, the worst first."""
    found = [
        Finding("bad", f"restarted after step {_step_before(run, each.at)}: {first_line(each.headline)}")
        for each in run.failures
        if each.restarted
    ]
    found += [Finding("bad", f"stalled: {first_line(each.note)}") for each in run.timeline if each.kind == "stall"]
    found += _not_finite(run)
    found += _slow_ranks(run)
    found += _shares(run)
    found += [Finding("bad", f"checkpoint step-{each.step:08d}: {each.problem}") for each in run.checkpoints
              if each.problem]  # fmt: skip
    return found


def _step_before(run: Run, at: float | None) -> int:
    """The last step that is known of before a moment."""
    steps = [each.step for each in run.timeline if each.step is not None and at is not None and each.at <= at]
    steps += [step for end, step in zip(run.lags.ends, run.lags.steps, strict=True) if at is not None and end <= at]
    return max(steps, default=0)


def _not_finite(run: Run) -> list[Finding]:
    """Metrics that were no numbers, by name; several in one sentence."""
    first: dict[str, int] = {}
    for row in run.rows:
        for name, value in row.items():
            if value is None or (type(value) is float and not isfinite(value)):
                first.setdefault(name, int(number(row.get("step")) or 0))
    if not first:
        return []
    name, step = min(first.items(), key=lambda each: each[1])
    more = f", and {len(first) - 1} more metrics later" if len(first) > 1 else ""
    return [Finding("bad", f"{name} was not a finite number at step {step}{more}")]


def _slow_ranks(run: Run) -> list[Finding]:
    behind = typical(run.lags)
    if not behind:
        return []
    train = seconds_by_kind(run.spans).get("train", 0.0)
    per_step = train / max(run.step, 1)
    worst = sorted(range(len(behind)), key=lambda rank: -behind[rank])
    slow = [rank for rank in worst if behind[rank] > max(_SLOW_SECONDS, _SLOW_SHARE * per_step)]
    if not slow or len(slow) > max(len(behind) // 2, 1):
        return []
    hosts = {each.rank: each.host for each in run.topology.ranks}
    several = len(set(hosts.values())) > 1
    named = ", ".join(
        f"rank {rank}{f' on {hosts[rank]}' if several and rank in hosts else ''} by {milliseconds(behind[rank])}"
        for rank in slow[:4]
    )
    more = f" and {len(slow) - 4} more" if len(slow) > 4 else ""
    return [Finding("note", f"behind the fastest rank in a step: {named}{more}; the others wait for it")]


def _shares(run: Run) -> list[Finding]:
    spent = seconds_by_kind(run.spans)
    whole = sum(spent.values())
    if whole < _SHORTEST:
        return []
    told = {"start": "getting started", "roll call": "the roll call", "compile": "compiling the first step",
            "validate": "validation", "save": "saving", "restart": "restarting"}  # fmt: skip
    return [
        Finding("note", f"{told[kind]} took {100 * seconds / whole:.0f} % of the time ({duration(seconds)})")
        for kind, seconds in spent.items()
        if kind in told and seconds > _LARGE_SHARE * whole
    ]


def first_line(told: str) -> str:
    line = told.strip().split("\n")[0]
    return line if len(line) <= 400 else f"{line[:400]} ..."


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
