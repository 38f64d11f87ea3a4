"""Turns what ranks measured into findings: which tensor, how it differs, and the line to look at."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from lockstep.config.plain import finite

DATA_AXES = "data|replica|batch|fsdp|dp.*"  # along which ranks have different rows
OTHER_AXES = "model|tensor|context|sequence|expert|pipeline|tp|cp|sp|ep|pp"
AXES = tuple[str, ...]
# In the order of a step: what differs in one of them is the reason of what follows.
PHASES = {"outputs": "output", "gradients": "gradient", "weights": "weight", "buffers": "buffer"}
_SHOWN = 8


@dataclass
class Difference:
    """A tensor of one rank that is not that of the reference."""

    phase: str
    name: str
    kind: str = "differs"  # or zero, missing (no gradient), stale (a buffer), gone, new, shape
    apart: float = math.inf  # relative to the largest value of the tensor
    factor: float | None = None  # where it is a multiple of the reference
    unequal: AXES = ()  # along which ranks differ that must be equal
    # Reductions that make it equal to the reference: sum or mean, over these axes, averaged over others by mistake.
    reductions: list[tuple[str, AXES, AXES]] = field(default_factory=list)

    @property
    def is_part_of_sum(self) -> bool:
        return any(how == "sum" and not mixed for how, _, mixed in self.reductions)


@dataclass
class RankFound:
    """What one rank found, up to the first step that differs."""

    rank: int
    dp_rank: int
    places: Mapping[str, str]  # the class and line of every module
    sources: Sequence[tuple[str, int, list[str]]]  # file, first line and text: loss, parallelize, after_backward
    tied: Mapping[str, str]
    step: int = 0
    loss: float | None = None
    reference_loss: float | None = None
    draws: bool = False
    tolerance: float = 0.0
    differences: list[Difference] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)
    largest: float = 0.0

    @property
    def has_fault(self) -> bool:
        """Modules inside of the model may return a part of a sum: they only show where a fault begins."""
        outside = [each for each in self.differences if each.phase != "outputs" or each.name.startswith("|")]
        return any(each.phase != "outputs" or not each.is_part_of_sum for each in outside)


@dataclass(frozen=True)
class Finding:
    """One thing that differs; `text` says all of it."""

    phase: str
    name: str
    kind: str
    text: str
    ranks: tuple[int, ...]
    factor: float | None = None
    look_at: str = ""
    also: tuple[str, ...] = ()  # other tensors of which the same is true


@dataclass(frozen=True)
class ParityReport:
    """The result of a check; `str()` is what `lockstep verify` prints."""

    program: str
    mesh: Mapping[str, int]
    dtype: str
    steps: int  # that were compared
    tolerance: float
    findings: Sequence[Finding]
    compared: Mapping[str, int]
    largest: float
    seconds: float
    note: str = ""

    @property
    def agrees(self) -> bool:
        return not self.findings

    def as_json(self) -> str:
        return json.dumps(finite({"agrees": self.agrees, **asdict(self), "text": str(self).splitlines()}), indent=2)

    def __str__(self) -> str:
        mesh = ",".join(f"{axis}={size}" for axis, size in self.mesh.items())
        head = f"{self.program} on {mesh}: {math.prod(self.mesh.values())} gloo processes beside one, {self.dtype}"
        if self.agrees:
            counts = ", ".join(_count(count, PHASES[phase]) for phase, count in self.compared.items())
            return (
                f"{head}\nall {self.steps} steps agree (loss, {counts}): the largest difference is {self.largest:.1e}, "
                f"tolerance {self.tolerance:g}"
            )
        lines = [head, f"step {self.steps} differs:" if self.steps else "the model differs before the first step:"]
        for each in self.findings[:_SHOWN]:
            more = f" and {len(each.also) - 4} more" if len(each.also) > 4 else ""
            lines.append(f"  {each.text}")
            lines += [f"    the same: {', '.join(each.also[:4])}{more}"] if each.also else []
            lines += [f"    look at {each.look_at}"] if each.look_at else []
        if len(self.findings) > _SHOWN:
            lines.append(f"  and {len(self.findings) - _SHOWN} more findings: --json has all")
        return "\n".join([*lines, *filter(None, [self.note])])


def losses_agree(losses: Sequence[tuple[int, float | None]], reference: float, tolerance: float) -> bool:
    """Whether the mean (or sum) over data ranks is the reference, and ranks with the same rows have the same loss."""
    by_rows: dict[int, float] = {}
    near = tolerance * (abs(reference) or 1.0)
    for dp_rank, loss in losses:
        if loss is None or not abs(by_rows.setdefault(dp_rank, loss) - loss) <= near:
            return False
    total = sum(by_rows.values())
    return any(abs(each - reference) <= near for each in (total / len(by_rows), total))


def concluded(
    program: str, mesh: Mapping[str, int], dtype: str, ranks: Sequence[RankFound], seconds: float
) -> ParityReport:
    findings, first = _Judge(mesh, ranks).findings(), ranks[0]
    note = "the step draws random numbers (dropout), which ranks cannot draw alike: check the model without them"
    return ParityReport(
        program, mesh, dtype, first.step, first.tolerance, findings, first.compared,
        max(each.largest for each in ranks), round(seconds, 2), note if findings and first.draws else "",
    )  # fmt: skip


class _Judge:
    def __init__(self, mesh: Mapping[str, int], ranks: Sequence[RankFound]) -> None:
        self._mesh, self._ranks, self._first = mesh, ranks, ranks[0]
        self._found: dict[str, dict[str, dict[int, Difference]]] = {phase: {} for phase in PHASES}
        for rank in ranks:
            for each in rank.differences:
                self._found[each.phase].setdefault(each.name, {})[rank.rank] = each

    def findings(self) -> list[Finding]:
        """Returns all findings of what differs first, and counts what follows from it."""
        loss = self._loss()
        if loss is None and not any(each.has_fault for each in self._ranks):
            return []
        found = [self._output(name, each) for name, each in self._found["outputs"].items()
                 if not all(one.is_part_of_sum for one in each.values())][:1]  # fmt: skip
        found = found or ([loss] if loss else [])
        for phase in ("gradients", "weights", "buffers"):
            differing = self._found[phase]
            if differing and not found:
                found = _grouped([self._tensor(phase, name, each) for name, each in differing.items()])
            elif differing and phase != "weights":
                text = f"{phase} that differ as well: {len(differing)}; check again once this is fixed"
                found.append(Finding(phase, "", "follows", text, ()))
        return found

    def _output(self, key: str, by_rank: Mapping[int, Difference]) -> Finding:
        name = key.split("|")[0]
        how, factor = self._how_much(by_rank)
        text = f"{name or 'the model'}: the first module whose output differs; it {how} {self._who(by_rank)}"
        place = "; ".join(filter(None, (self._first.places.get(name, ""), self._line(name))))
        return Finding("outputs", name, "output", text, tuple(by_rank), factor, place)

    def _loss(self) -> Finding | None:
        first, reference, ranks = self._first, self._first.reference_loss, self._ranks
        if reference is None or losses_agree([(each.dp_rank, each.loss) for each in ranks], reference, first.tolerance):
            return None
        shown = ", ".join(f"{math.nan if each.loss is None else each.loss:.6g} on rank {each.rank}" for each in ranks)
        text = (
            f"loss: {shown}, of which neither mean nor sum is the {reference:.6g} of the whole batch, though outputs "
            "agree: normalised by a local count of tokens? Divide by that of all data ranks, times their number"
        )
        file, line, lines = first.sources[0]
        where = f"{file}:{line}: {lines[0].strip()}"
        return Finding("loss", "loss", "local count", text, tuple(each.rank for each in ranks), None, where)

    def _tensor(self, phase: str, name: str, by_rank: Mapping[int, Difference]) -> Finding:
        kind, how = self._described(PHASES[phase], name, by_rank)
        factor = self._how_much(by_rank)[1]
        return Finding(phase, name, kind, f"{name}: {how}", tuple(sorted(by_rank)), factor, self._line(name))

    def _described(self, what: str, name: str, by_rank: Mapping[int, Difference]) -> tuple[str, str]:
        kinds, who = {each.kind for each in by_rank.values()}, self._who(by_rank)
        tie = self._first.tied.get(name)
        fixed = {
            "new": f"{what} is there after parallelize alone{f': parallelize breaks its tie to {tie}' if tie else ''}",
            "gone": f"{what} is not there after parallelize",
            "shape": f"{what} has a shape {who} that no axis of the mesh explains",
            "missing": f"has no gradient {who}: not reached",
            "zero": f"{what} is zero {who}: not reached",
            "stale": f"{what} is stale {who}: the step does not change it, and that of the reference does",
        }
        if len(kinds) == 1 and (kind := kinds.pop()) in fixed:
            return kind, fixed[kind]
        how, factor = self._how_much(by_rank)
        everywhere = len(by_rank) == len(self._ranks)
        if everywhere and factor is None and (missing := self._missing_reduction(what, by_rank)) is not None:
            return missing
        factors = {rank: each.factor for rank, each in sorted(by_rank.items()) if each.factor is not None}
        if factor is not None:
            return "factor", f"{what} {how} {who}{self._reason(factor) if everywhere else ''}"
        if len(factors) == len(self._ranks):
            times = ", ".join(f"{value:.3f} times the reference on rank {rank}" for rank, value in factors.items())
            return "local norm", f"{what} is {times}: scaled by a norm over local shards? Sum its squares over ranks"
        if unequal := next((each.unequal for each in by_rank.values() if each.unequal), None):
            return "unequal", f"{what} differs between ranks that must be equal, along {' and '.join(unequal)}"
        return "differs", f"{what} {how} {who}"

    def _missing_reduction(self, what: str, by_rank: Mapping[int, Difference]) -> tuple[str, str] | None:
        """Names the reduction that would make the tensor right on every rank."""
        common = set.intersection(*(set(each.reductions) for each in by_rank.values()))
        if not common:
            return None
        how, axes, mixed = min(common, key=lambda each: (len(each[1]) + len(each[2]), each))
        missing = f"not {'summed' if how == 'sum' else 'averaged'} over {' and '.join(axes)}" if axes else ""
        if not mixed:
            return "not reduced", f"{what} differs between ranks that must be equal: it is {missing}"
        wrong = f"averaged over {' and '.join(mixed)}, where ranks have different parts of it"
        return "wrong axis", f"{what} is {wrong}{f', and {missing}' if axes else ''}"

    def _reason(self, factor: float) -> str:
        sizes = {axis: size for axis, size in self._mesh.items() if size > 1} | {"all ranks": len(self._ranks)}
        summed = [axis for axis, size in sizes.items() if math.isclose(factor, size, rel_tol=1e-4)]
        averaged = [axis for axis, size in sizes.items() if math.isclose(factor, 1 / size, rel_tol=1e-4)]
        if summed:
            return f": a sum over {summed[0]} where a mean was meant? Divide by its size"
        return f": a mean over {averaged[0]} where a sum was meant?" if averaged else ""

    @staticmethod
    def _how_much(by_rank: Mapping[int, Difference]) -> tuple[str, float | None]:
        values = [each.factor for each in by_rank.values()]
        first = values[0]
        if first is not None and all(each is not None and math.isclose(each, first, rel_tol=1e-5) for each in values):
            return f"is {first:.2f} times the reference", first
        return f"differs by {max(each.apart for each in by_rank.values()):.1e}", None

    def _who(self, by_rank: Mapping[int, Difference]) -> str:
        if len(by_rank) == len(self._ranks):
            return "on all ranks"
        return f"on rank{'s' if len(by_rank) > 1 else ''} {', '.join(map(str, sorted(by_rank)))} alone"

    def _line(self, name: str) -> str:
        """Returns the line of parallelize or after_backward that names a module, else the first line of the last."""
        sources = [each for each in self._first.sources[1:] if each[2]]
        *modules, last = name.split(".")
        for part in (each for each in (*reversed(modules), last) if each and not each.isdigit()):
            for file, first, lines in sources:
                for number, line in enumerate(lines[1:], start=first + 1):
                    if re.search(rf"(?<![a-zA-Z]){re.escape(part)}(?![a-zA-Z])", line.partition("#")[0]):
                        return f"{file}:{number}: {line.partition('#')[0].strip()}"
        return f"{sources[-1][0]}:{sources[-1][1]}: {sources[-1][2][0].partition('#')[0].strip()}" if sources else ""


def _grouped(found: Sequence[Finding]) -> list[Finding]:
    """Brings together findings that differ in their name alone."""
    groups: dict[str, list[Finding]] = {}
    for each in found:
        groups.setdefault(each.text.removeprefix(each.name), []).append(each)
    return [replace(first, also=tuple(each.name for each in rest)) for first, *rest in groups.values()]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"
