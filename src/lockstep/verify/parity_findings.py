"""Turns what ranks measured into findings: which tensor, how it differs, and the line to look at."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

AXES = tuple[str, ...]
# In the order of a step: what differs in one of them is the reason of what follows.
PHASES = ("outputs", "gradients", "weights", "buffers")
_WHAT = {"outputs": "output", "gradients": "gradient", "weights": "weight", "buffers": "buffer"}
_SHOWN = 8  # findings of one step


@dataclass
class Difference:
    """A tensor of one rank that is not that of the reference."""

    phase: str
    name: str
    kind: str  # differs, zero, missing (no gradient), gone, new, shape
    apart: float = math.inf  # relative to the largest value of the tensor
    factor: float | None = None  # where it is a multiple of the reference
    probe: float = 0.0  # a random projection: ranks with the same part must have the same
    part: tuple[tuple[int, ...], float] = ((), 0.0)  # which part of the tensor a rank has
    text: str = ""
    # Reductions that make it equal to the reference: sum or mean, over these axes, averaged over others by mistake.
    reductions: list[tuple[str, AXES, AXES]] = field(default_factory=list)


@dataclass
class RankFound:
    """What one rank found, up to the first step that differs."""

    rank: int
    dp_rank: int
    places: Mapping[str, str]  # the class and line of every module
    sources: Sequence[tuple[str, int, list[str]]]  # file, first line and text of parallelize and others
    step: int = 0
    loss: float | None = None
    reference_loss: float | None = None
    reference_parts: Sequence[float] = ()  # the reference's loss of each data rank's rows
    draws: bool = False
    tolerance: float = 0.0
    differences: list[Difference] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)
    largest: tuple[float, str, str] = (0.0, "", "")
    tied: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """One thing that differs: `text` says all of it."""

    phase: str
    name: str
    kind: str
    text: str
    ranks: tuple[int, ...]
    factor: float | None = None
    look_at: str = ""
    also: tuple[str, ...] = ()  # other tensors with the same finding


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
        return json.dumps({"agrees": self.agrees, **asdict(self), "text": str(self).splitlines()}, indent=2)

    def __str__(self) -> str:
        mesh = ",".join(f"{axis}={size}" for axis, size in self.mesh.items())
        head = f"{self.program} on {mesh}: {math.prod(self.mesh.values())} gloo processes and one, {self.dtype}"
        if self.agrees:
            counts = ", ".join(f"{count} {phase}" for phase, count in self.compared.items())
            return (
                f"{head}\nall {self.steps} steps agree: {counts}; the largest difference is {self.largest:.1e} "
                f"(tolerance {self.tolerance:g})"
            )
        lines = [head, f"step {self.steps} differs:" if self.steps else "the model differs before the first step:"]
        for each in self.findings[:_SHOWN]:
            lines.append(f"  {each.text}")
            if each.also:
                rest = f" and {len(each.also) - 4} more" if len(each.also) > 4 else ""
                lines.append(f"    the same: {', '.join(each.also[:4])}{rest}")
            if each.look_at:
                lines.append(f"    look at {each.look_at}")
        if len(self.findings) > _SHOWN:
            lines.append(f"  and {len(self.findings) - _SHOWN} more findings (--json has all)")
        return "\n".join([*lines, *([self.note] if self.note else [])])


def losses_agree(losses: Sequence[tuple[int, float | None]], reference: float, tolerance: float) -> bool:
    """Whether the losses of data ranks have the reference as their mean (or sum), and those of one data rank agree."""
    by_rank: dict[int, list[float]] = {}
    for dp_rank, loss in losses:
        by_rank.setdefault(dp_rank, []).append(math.nan if loss is None else loss)
    scale = abs(reference) or 1.0
    if any(not abs(each - values[0]) <= tolerance * scale for values in by_rank.values() for each in values):
        return False
    total = sum(values[0] for values in by_rank.values())
    return any(abs(each - reference) <= tolerance * scale for each in (total / len(by_rank), total))


def concluded(
    program: str, mesh: Mapping[str, int], dtype: str, ranks: Sequence[RankFound], seconds: float
) -> ParityReport:
    first = ranks[0]
    names: dict[tuple[str, str], dict[int, Difference]] = {}
    for rank in ranks:
        for each in rank.differences:
            names.setdefault((each.phase, each.name), {})[rank.rank] = each
    findings = _findings(names, mesh, ranks)
    note = ""
    if findings and first.draws:
        note = "the step draws random numbers (dropout): ranks cannot draw the same. Check the model without them"
    return ParityReport(
        program, mesh, dtype, first.step, first.tolerance, findings, first.compared,
        max(each.largest[0] for each in ranks), round(seconds, 2), note,
    )  # fmt: skip


def _findings(
    names: Mapping[tuple[str, str], Mapping[int, Difference]], mesh: Mapping[str, int], ranks: Sequence[RankFound]
) -> list[Finding]:
    """Returns the findings of the first phase that differs, and a count of what follows from it."""
    judge = _Judge(mesh, ranks)
    outputs = [key for key in names if key[0] == "outputs"]
    found = [judge.output(outputs[0][1], names[outputs[0]])] if outputs else []
    if (loss := judge.loss()) is not None and not found:
        found = [loss]
    for phase in PHASES[1:]:
        keys = [key for key in names if key[0] == phase]
        if keys and not found:
            scaled = judge.scaled_by_rank({key: names[key] for key in keys}) if phase == "gradients" else None
            found = [scaled] if scaled else _grouped([judge.tensor(*key, names[key]) for key in keys])
        elif keys and phase != "weights":
            text = f"{len(keys)} {phase} differ too: look at them again when this is right"
            found.append(Finding(phase, "", "follows", text, ()))
    return found


def _grouped(found: Sequence[Finding]) -> list[Finding]:
    """Brings together findings that differ in their name alone."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for each in found:
        groups.setdefault((each.kind, each.text.removeprefix(each.name)), []).append(each)
    return [
        Finding(**{**vars(first), "also": tuple(each.name for each in rest)}) for first, *rest in groups.values()
    ]


class _Judge:
    def __init__(self, mesh: Mapping[str, int], ranks: Sequence[RankFound]) -> None:
        self._mesh, self._ranks, self._all = mesh, ranks, tuple(each.rank for each in ranks)
        self._dp_size = len({each.dp_rank for each in ranks})
        self._tolerance = ranks[0].tolerance

    def output(self, key: str, by_rank: Mapping[int, Difference]) -> Finding:
        name = key.split("|")[0]
        first = next(iter(by_rank.values()))
        factor = self._common_factor(by_rank)
        how = f"is {factor:.2f} times the reference" if factor is not None else f"differs by {first.apart:.1e}"
        what = name or "the model"
        text = f"{what}: the first module whose output differs ({how} {self._who(by_rank)}); its inputs agree"
        place = self._ranks[0].places.get(name, "")
        line = self._line(name)
        return Finding("outputs", name, "output", text, tuple(by_rank), factor, "; ".join(filter(None, (place, line))))

    def loss(self) -> Finding | None:
        ranks, reference = self._ranks, self._ranks[0].reference_loss
        losses = [(each.dp_rank, each.loss) for each in ranks]
        if reference is None or losses_agree(losses, reference, self._tolerance):
            return None
        parts = ranks[0].reference_parts
        own = [abs((each.loss or 0.0) - parts[each.dp_rank]) <= self._tolerance * abs(reference) for each in ranks] if parts else []
        by_dp = {each.dp_rank: each.loss or 0.0 for each in ranks}
        mean = sum(by_dp.values()) / len(by_dp)
        if own and all(own):
            text = (
                f"loss: every rank has the loss of its own rows, and their mean, {mean:.6g}, is not that of the whole "
                f"batch, {reference:.6g}: normalised by a local count (tokens)? Divide by the count of all data ranks, "
                "and multiply by their number"
            )
            kind = "local count"
        elif any(each.loss != by_dp[each.dp_rank] for each in ranks):
            shown = ", ".join(f"{each.loss:.6g} on rank {each.rank}" for each in ranks)
            text, kind = f"loss: differs between ranks that have the same rows ({shown}); {reference:.6g} in the reference", "unequal"
        else:
            text, kind = f"loss: its mean over data ranks is {mean:.6g}, in the reference {reference:.6g}; all outputs agree", "differs"
        file, line, _ = ranks[0].sources[-1]
        return Finding("loss", "loss", kind, text, self._all, mean / reference if reference else None, f"{file}:{line}: loss")

    def scaled_by_rank(self, names: Mapping[tuple[str, str], Mapping[int, Difference]]) -> Finding | None:
        """All gradients of a rank have one factor, but not that of other ranks: they were clipped by another norm."""
        factors: dict[int, set[float]] = {}
        for by_rank in names.values():
            for rank, each in by_rank.items():
                if each.part[0] and math.prod(each.part[0]) > 1:
                    factors.setdefault(rank, set()).add(math.nan if each.factor is None else round(each.factor, 6))
        if len(factors) != len(self._all) or any(len(each) > 1 for each in factors.values()):
            return None
        values = {rank: next(iter(each)) for rank, each in factors.items()}
        if any(math.isnan(each) for each in values.values()) or len(set(values.values())) == 1:
            return None
        shown = ", ".join(f"{value:.3f} on rank {rank}" for rank, value in sorted(values.items()))
        text = (
            f"all gradients are scaled by a factor of the rank's own ({shown}): clipped by a norm over local shards? Sum "
            "its squares over the ranks that have other parts"
        )
        return Finding("gradients", "", "local norm", text, self._all, None, self._line("", later=True))

    def tensor(self, phase: str, name: str, by_rank: Mapping[int, Difference]) -> Finding:
        kind, how = self._described(phase, name, by_rank)
        factor = self._common_factor(by_rank)
        return Finding(phase, name, kind, f"{name}: {how}", tuple(sorted(by_rank)), factor, self._line(name))

    def _described(self, phase: str, name: str, by_rank: Mapping[int, Difference]) -> tuple[str, str]:
        kinds = {each.kind for each in by_rank.values()}
        what, who = _WHAT[phase], self._who(by_rank)
        first = next(iter(by_rank.values()))
        tied = self._ranks[0].tied
        if "new" in kinds:
            tie = f": it is tied to {tied[name]} in the reference, and parallelize breaks the tie" if name in tied else ""
            return "new", f"is a parameter after parallelize alone{tie}"
        if "gone" in kinds:
            return "gone", "is no parameter after parallelize"
        if "shape" in kinds:
            return "shape", f"{what} has the shape {first.text}, which no axis of the mesh explains"
        if "missing" in kinds:
            return "missing", f"has no gradient {who}: not reached by the backward pass"
        if kinds == {"zero"}:
            return "zero", f"{what} is zero {who}: not reached"
        if (reduction := self._reduction(by_rank)) is not None:
            return reduction
        factor = self._common_factor(by_rank)
        if factor is not None and len(by_rank) == len(self._all):
            return "factor", f"{what} is {factor:.2f} times the reference {who}{self._reason(factor)}"
        if unequal := self._unequal(by_rank):
            return "unequal", f"{what} differs between ranks that must be equal ({unequal})"
        times = f"is {factor:.2f} times the reference" if factor is not None else f"differs by {first.apart:.1e}"
        return "differs", f"{what} {times} {who}"

    def _reduction(self, by_rank: Mapping[int, Difference]) -> tuple[str, str] | None:
        """Names the reduction that is missing, where one makes the tensor equal on every rank."""
        fitting = [set(each.reductions) for each in by_rank.values()]
        common = [each for each in next(iter(by_rank.values())).reductions if all(each in some for some in fitting)]
        if not common or len(by_rank) < len(self._all):
            return None
        how, axes, mixed = min(common, key=lambda each: (len(each[1]) + len(each[2]), each[0]))
        over = " and ".join(axes)
        wrong = f"is averaged over {' and '.join(mixed)}, along which ranks have different parts of it" if mixed else ""
        if not axes:
            return "wrong axis", wrong
        verb = "summed" if how == "sum" else "averaged"
        if wrong:
            return "wrong axis", f"gradient {wrong}, and not {verb} over {over}"
        return "not reduced", f"differs between ranks that must be equal: it is not {verb} over {over}"

    def _unequal(self, by_rank: Mapping[int, Difference]) -> str:
        """Names ranks that have the same part of the reference, and not the same tensor."""
        if len(by_rank) < len(self._all):
            return ""
        seen: dict[tuple[tuple[int, ...], float], tuple[int, float]] = {}
        for rank, each in sorted(by_rank.items()):
            other, probe = seen.setdefault(each.part, (rank, each.probe))
            if abs(probe - each.probe) > 100 * self._tolerance:
                return f"ranks {other} and {rank}"
        return ""

    def _reason(self, factor: float) -> str:
        sizes = {axis: size for axis, size in self._mesh.items() if size > 1}
        sizes |= {"all ranks": len(self._all)} if len(sizes) > 1 else {}
        summed = [axis for axis, size in sizes.items() if math.isclose(factor, size, rel_tol=1e-4)]
        averaged = [axis for axis, size in sizes.items() if math.isclose(factor, 1 / size, rel_tol=1e-4)]
        if summed:
            return f": a sum over {' or '.join(summed)} where a mean was meant? Divide by its size"
        return f": a mean over {' or '.join(averaged)} where a sum was meant?" if averaged else ""

    def _common_factor(self, by_rank: Mapping[int, Difference]) -> float | None:
        factors = [each.factor for each in by_rank.values()]
        if any(each is None for each in factors):
            return None
        values = [each for each in factors if each is not None]
        return values[0] if all(math.isclose(each, values[0], rel_tol=1e-5) for each in values) else None

    def _who(self, by_rank: Mapping[int, Difference]) -> str:
        if len(by_rank) == len(self._all):
            return "on all ranks"
        return f"on rank{'s' if len(by_rank) > 1 else ''} {', '.join(map(str, sorted(by_rank)))} alone"

    def _line(self, name: str, later: bool = False) -> str:
        """Returns the line of parallelize (or what follows it) that names a module, else its first line."""
        sources = [each for each in self._ranks[0].sources[:-1] if each[2]]
        parts = [each for each in reversed(name.split(".")) if each and not each.isdigit()]
        for part in parts:
            for file, first, lines in sources:
                for number, line in enumerate(lines):
                    if re.search(rf"\b{re.escape(part)}\b", line) and not line.strip().startswith(("def ", "#", '"""')):
                        return f"{file}:{first + number}: {line.strip()}"
        if not sources:
            return ""
        file, first, lines = sources[-1 if later else 0]
        return f"{file}:{first}: {lines[0].strip()}"
