"""The data of the page of runs: plain JSON, at most 2 MB whatever the length of the runs."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lockstep.config.plain import finite, leaves, number, text, whole
from lockstep.config.secrets import redacted
from lockstep.record.writers import SPEED
from lockstep.runs.findings import Finding, duration, findings, verdict
from lockstep.runs.reader import Run
from lockstep.runs.records import PHASES, Curve, Span, seconds_by_kind, thinned_lags


def thinned(curve: Curve, most: int) -> dict[str, list[float]]:
    """Returns at most so many points `x` and `y`, each the mean of the same number of neighbouring values.

    Where several values became one, `low` and `high` are the lowest and the highest of them.
    """
    steps, values = list(curve.steps), list(curve.values)
    if any(after < before for before, after in itertools.pairwise(steps)):
        order = sorted(range(len(steps)), key=steps.__getitem__)
        steps, values = [steps[at] for at in order], [values[at] for at in order]
    count = len(steps)
    if count <= most:
        return {"x": steps, "y": values}
    bounds = [count * at // most for at in range(most + 1)]
    parts = [values[begin:end] for begin, end in itertools.pairwise(bounds)]
    means = [math.fsum(each / len(part) for each in part) for part in parts]
    low, high = [min(part) for part in parts], [max(part) for part in parts]
    within = [min(max(mean, least), largest) for mean, least, largest in zip(means, low, high, strict=True)]
    return {"x": [steps[end - 1] for end in bounds[1:]], "y": within, "low": low, "high": high}


# Together these keep a page below 2 MB.
_POINTS, _FEWEST, _MOST, _MOST_CURVES = 36_000, 60, 600, 400
_CELLS, _SPANS, _LEAVES, _TEXT = 30_000, 1500, 2000, 4000
_RANKS = 512
_MARKS = 200
_SETS = ("train", "val", "test")
_LAST = ("learning rate", "gradient norm", "examples per second")


def page_data(runs: Sequence[Run]) -> dict[str, Any]:
    charts = _charts({name for run in runs for name in run.curves})
    names = [name for chart in charts for name in chart["names"]]
    drawn = set(names[:_MOST_CURVES])
    most = min(max(_POINTS // max(len(drawn) * len(runs), 1), _FEWEST), _MOST)
    kept = [{**chart, "names": [name for name in chart["names"] if name in drawn]} for chart in charts]
    return {
        "charts": [chart for chart in kept if chart["names"]],
        "left_out": len(names) - len(drawn),
        "phases": list(PHASES),
        "runs": [_run(run, drawn, most, len(runs)) for run in runs],
    }


def _run(run: Run, drawn: set[str], most: int, runs: int) -> dict[str, Any]:
    config = [(path, "null" if value is None else str(finite(value))) for path, value in leaves(redacted(run.config))]
    return {
        "name": run.name,
        "folder": str(run.folder),
        "status": run.status,
        "running": run.is_running,
        "verdict": _finding(verdict(run)),
        "findings": [_finding(each) for each in findings(run)[:50]],
        "facts": _facts(run),
        "series": {name: _series(curve, most) for name, curve in run.curves.items() if name in drawn},
        "timeline": _timeline(run, max(_SPANS // runs, 1)),
        "lags": _lags(run, max(_CELLS // runs, 1)),
        "topology": _topology(run),
        "checkpoints": [asdict(each) for each in run.checkpoints[-_MARKS:]],
        "failures": [
            {"at": each.at, "headline": redacted(_short(each.headline)),
             "traceback": redacted(_short(each.traceback)), "restarted": each.restarted}
            for each in run.failures[-20:]
        ],
        "config": [[path, _short(value)] for path, value in config[:_LEAVES] if path],
        "live": _live(run),
    }  # fmt: skip


def _finding(finding: Finding) -> Any:
    return redacted({"kind": finding.kind, "text": _short(finding.text)})


def _facts(run: Run) -> list[list[str]]:
    summary, spent = run.summary, sum(seconds_by_kind(run.spans).values())
    place = run.topology
    hosts = len({each.host for each in place.ranks})
    facts = []
    if place.world_size:
        over = f" on {hosts} hosts" if hosts > 1 else ""
        facts.append(["ranks", f"{place.world_size}{over}"])
    facts += [[name, text(summary.get(name))] for name in ("runtime", "strategy") if text(summary.get(name))]
    if spent:
        facts.append(["time in all", duration(spent)])
    if (speed := number(summary.get("samples_per_second"))) is not None:
        facts.append(["examples per second", f"{speed:,.0f}"])
    best = summary.get("best")
    if isinstance(best, dict) and (value := number(best.get("value"))) is not None:
        facts.append([f"best {text(best.get('metric'))}".strip(), f"{value:.5g} at step {whole(best.get('step'))}"])
    metrics = summary.get("metrics")
    for name, value in list(metrics.items())[:6] if isinstance(metrics, dict) else ():
        if (point := number(value)) is not None:
            facts.append([f"last {name}", f"{point:.5g}"])
    facts += [[name, version] for name, version in place.versions.items()]
    return facts


def _series(curve: Curve, most: int) -> dict[str, Any]:
    points = thinned(curve, most)
    found: dict[str, Any] = {name: _numbers(each, 12 if name == "x" else 5) for name, each in points.items()}
    if "low" in points:
        found["of"] = len(curve.steps)
    if curve.not_finite:
        found |= {"bad": _numbers(curve.not_finite[:_MARKS], 12), "bad_count": len(curve.not_finite)}
    return found


def _numbers(values: Sequence[float], digits: int) -> list[float]:
    rounded = (float(f"{value:.{digits}g}") for value in values)
    return [int(value) if value.is_integer() and abs(value) < 1e15 else value for value in rounded]


def _charts(names: set[str]) -> list[dict[str, Any]]:
    """Groups metrics that belong into one picture: a loss in training and validation."""
    grouped: dict[str, list[str]] = {}
    for name in names:
        grouped.setdefault(title_of(name), []).append(name)

    def order(title: str) -> tuple[Any, ...]:
        sets = {name.partition("/")[0] for name in grouped[title]}
        last = _LAST.index(title) + 1 if title in _LAST else 0
        return (title != "loss", last, not sets & {"val", "test"}, "train" not in sets, title)

    def inside(name: str) -> tuple[Any, ...]:
        first = name.partition("/")[0]
        return (_SETS.index(first) if first in _SETS else len(_SETS), name)

    return [{"title": title, "names": sorted(grouped[title], key=inside)} for title in sorted(grouped, key=order)]


def title_of(name: str) -> str:
    first, _, rest = name.partition("/")
    if first in _SETS and rest:
        return (rest.rpartition("/")[2] or rest).removeprefix("epoch_")  # beside what it is the mean of
    if re.fullmatch(r"lr(/.*)?", name):
        return "learning rate"
    if re.fullmatch(r"(epoch_)?gradient_norm(/.*)?", name):
        return "gradient norm"
    return "examples per second" if name == SPEED else name


def _timeline(run: Run, most: int) -> dict[str, Any]:
    spans = list(run.spans)
    drawn = merged(spans, most)
    shortest = (spans[-1].end - spans[0].begin) / most if len(drawn) < len(spans) else 0.0
    marks: list[dict[str, Any]] = [
        {"at": each.at, "kind": each.kind, "text": _short(each.note or each.status)}
        for each in run.timeline
        if each.kind in ("restart", "stall", "preempt", "end")
    ]
    starts = [each.at for each in run.timeline if each.kind == "start"]
    marks += [{"at": at, "kind": "resume", "text": "started again"} for at in starts[1:]]
    return {
        "spans": [[PHASES.index(each.kind) if each.kind in PHASES else -1, round(each.begin, 3), round(each.end, 3),
                   each.step, _short(each.note)[:200]] for each in drawn],
        "seconds": {kind: round(seconds, 3) for kind, seconds in seconds_by_kind(spans).items()},
        "counts": {kind: sum(each.kind == kind for each in spans) for kind in ("validate", "save")},
        "marks": sorted(marks, key=lambda each: each["at"])[-_MARKS:],
        "shortest": round(shortest, 3),
    }  # fmt: skip


def merged(spans: Sequence[Span], most: int) -> list[Span]:
    """Returns about so many spans at most: one that is too short to be seen becomes part of the one before it."""
    if len(spans) <= most:
        return list(spans)
    bins = (spans[-1].end - spans[0].begin) / most
    found: list[Span] = []
    for each in spans:
        before = found[-1] if found else None
        joins = before is not None and each.begin - before.end < bins
        if before is not None and joins and (each.seconds < bins or each.kind == before.kind):
            found[-1] = Span(before.kind, before.begin, each.end, before.step, before.note)
        else:
            found.append(each)
    return found


def _lags(run: Run, cells: int) -> dict[str, Any] | None:
    if not run.lags:
        return None
    found = thinned_lags(run.lags, cells)
    return {
        "begins": found.begins,
        "ends": found.ends,
        "steps": found.steps,
        "ms": [_numbers([1000 * each for each in column], 3) for column in found.behind],
        "ranks": max(map(len, run.lags.behind)),
        "ranks_in_a_row": found.ranks_in_a_row,
        "merged": found.merged,
    }


def _topology(run: Run) -> dict[str, Any]:
    place = run.topology
    hosts: dict[str, list[dict[str, Any]]] = {}
    for each in place.ranks[:_RANKS]:
        rank = {"rank": each.rank, "device": each.device, "physical": each.physical_device,
                "place": _place(place.mesh, each.rank)}  # fmt: skip
        hosts.setdefault(each.host, []).append(rank)
    return {
        "hosts": [{"name": name, "ranks": ranks} for name, ranks in hosts.items()],
        "mesh": [[axis, size] for axis, size in place.mesh.items()],
        "more": max(len(place.ranks) - _RANKS, 0),
    }


def _place(mesh: Mapping[str, int], rank: int) -> list[int]:
    """Returns the index of a rank along every axis; the last axis changes fastest."""
    found = []
    for size in reversed(list(mesh.values())):
        rank, at = divmod(rank, max(size, 1))
        found.append(at)
    return found[::-1]


def _live(run: Run) -> dict[str, Any] | None:
    if not run.is_running or run.live is None:
        return None
    live = run.live
    ranks = [asdict(each) for each in live.ranks[:_RANKS]]
    return {"at": live.at, "step": live.step, "total_steps": live.total_steps, "ranks": ranks}


def _short(value: str) -> str:
    return value if len(value) <= _TEXT else f"{value[:_TEXT]} ..."
