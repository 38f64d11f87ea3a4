"""The table of docs/reliability.md: what `make faults` saw, between two marks; the prose around them stays."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cells import CELLS, NOT_A_CELL, NOT_A_CELL_BY_FSDP, Cell, Expected
from experiment import Outcome
from sabotage import ACTS, FULL_DISK, IDENTITIES

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
_CELLS, _REASONS, _END = "<!-- cells -->", "<!-- no cells -->", "<!-- end -->"
_COLUMNS = ("2", "4", "2, fsdp", "4, hsdp")
_HEADER = ("kind", "moment", "exit code", "the message names", *_COLUMNS)


@dataclass(frozen=True)
class Row:
    """One cell of the matrix as it was seen; cells of a kind and a moment share a line of the table."""

    kind: str
    moment: str
    code: str
    names: str
    ranks: str
    seen: str

    @classmethod
    def of(cls, cell: Cell, wanted: Expected, outcome: Outcome) -> Row:
        again = "" if cell.kind in IDENTITIES else f", {outcome.lost}"
        rank = "" if cell.starts_by_hand else f"{cell.rank}: "
        seen = f"{rank}{max(outcome.seconds, 0):.1f}{again}"
        return cls(cell.kind, cell.moment, str(wanted.code), _generic(wanted.names), cell.ranks, seen)


def write(seen: Mapping[Cell, Row | None]) -> None:
    """Replace the cells that were run; one that failed is empty."""
    text = PAGE.read_text(encoding="utf-8")
    lines = {(line[0], line[1]): line for line in _table(_parts(text, _CELLS)[1])}
    for cell, row in seen.items():
        line = lines.setdefault((cell.kind, cell.moment), [cell.kind, cell.moment, "", "", *("-" for _ in _COLUMNS)])
        if row:
            line[2:4] = row.code, max(line[3], row.names, key=len)
        line[4 + _COLUMNS.index(cell.ranks)] = row.seen if row else "-"
    kinds = list(dict.fromkeys(cell.kind for cell in CELLS))
    pairs = sorted(dict.fromkeys((cell.kind, cell.moment) for cell in CELLS), key=lambda pair: kinds.index(pair[0]))
    table = [_HEADER, ["---"] * len(_HEADER), *(lines[pair] for pair in pairs if pair in lines)]
    text = _replaced(text, _CELLS, "\n".join(f"| {' | '.join(line)} |" for line in table))
    PAGE.write_text(_replaced(text, _REASONS, _reasons()), encoding="utf-8")


def _table(text: str) -> list[list[str]]:
    return [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in text.splitlines()[2:]]


def _generic(names: str) -> str:
    """What a message names, for any rank: `rank 1, the line` is the rank and the line."""
    return re.sub(r"\branks \d+ and \d+", "the ranks", re.sub(r"^rank \d+(?! is)|(?<=, )rank \d+", "the rank", names))


def _reasons() -> str:
    """The pairs that are no cells, brought together by reason."""
    by_reason: dict[str, dict[str, list[str]]] = {}
    by_fsdp = {(f"{kind} by fsdp", moment): reason for (kind, moment), reason in NOT_A_CELL_BY_FSDP.items()}
    for (kind, moment), reason in {**NOT_A_CELL, **by_fsdp}.items():
        who = "identity faults" if kind in IDENTITIES else kind
        moments = by_reason.setdefault(reason, {}).setdefault(who, [])
        if moment not in moments:
            moments.append(moment)
    return "\n".join(
        f"- {'; '.join(f'{who}, {_moments(who, moments)}' for who, moments in found.items())}: {reason}."
        for reason, found in by_reason.items()
    )


def _moments(who: str, moments: list[str]) -> str:
    if who == FULL_DISK:
        return "anywhere but where a checkpoint is written"
    if who in ACTS:
        return ", ".join(moments)
    return "anywhere" if who not in ACTS and who.endswith("by fsdp") else "anywhere but at roll call"


def _parts(text: str, mark: str) -> tuple[str, str, str]:
    before, rest = text.split(f"{mark}\n")
    inner, after = rest.split(_END, 1)
    return f"{before}{mark}\n", inner, f"{_END}{after}"


def _replaced(text: str, mark: str, inner: str) -> str:
    before, _, after = _parts(text, mark)
    return f"{before}{inner}\n{after}"
