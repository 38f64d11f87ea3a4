"""One sentence on how a run went, and further ones on what is worth a look."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.config.plain import number, text
from lockstep.runs.reader import LOST, Run
from lockstep.runs.records import seconds_by_kind, typical_lags

# A rank is slow when it is behind the fastest by this fraction of a step and by so many seconds.
_SLOW_FRACTION, _SLOW_SECONDS = 0.1, 0.001
_SHOWN = 50  # restarts


@dataclass(frozen=True)
class Finding:
    kind: str  # good, bad or note
    text: str


def verdict(run: Run) -> Finding:
    """Says in one sentence how the run is, or how it ended."""
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
    """Returns what else is worth a look, the worst first."""
    found = [
        Finding("bad", f"restarted after step {_step_before(run, each.at)}: {first_line(each.headline)}")
        for each in run.failures[-_SHOWN:]
        if each.restarted
    ]
    found += [Finding("bad", f"stalled: {first_line(each.note)}") for each in run.timeline if each.kind == "stall"]
    found += _not_finite(run)
    found += _slow_ranks(run)
    found += [Finding("bad", f"checkpoint step-{each.step:08d}: {each.problem}") for each in run.checkpoints
              if each.problem]  # fmt: skip
    return found


def _step_before(run: Run, at: float | None) -> int:
    """The last step that is known of before a moment."""
    steps = [each.step for each in run.timeline if each.step is not None and at is not None and each.at <= at]
    steps += [step for end, step in zip(run.lags.ends, run.lags.steps, strict=True) if at is not None and end <= at]
    return max(steps, default=0)


def _not_finite(run: Run) -> list[Finding]:
    first = {name: curve.not_finite[0] for name, curve in run.curves.items() if curve.not_finite}
    if not first:
        return []
    name, step = min(first.items(), key=lambda each: each[1])
    more = f", and {len(first) - 1} more metrics later" if len(first) > 1 else ""
    return [Finding("bad", f"{name} was not a finite number at step {step:.0f}{more}")]


def _slow_ranks(run: Run) -> list[Finding]:
    behind = typical_lags(run.lags)
    if not behind:
        return []
    per_step = seconds_by_kind(run.spans).get("train", 0.0) / max(run.step, 1)
    worst = sorted(range(len(behind)), key=lambda rank: -behind[rank])
    slow = [rank for rank in worst if behind[rank] > max(_SLOW_SECONDS, _SLOW_FRACTION * per_step)]
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


def first_line(message: str) -> str:
    line = message.strip().split("\n")[0]
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
