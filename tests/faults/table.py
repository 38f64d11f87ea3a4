"""The table of docs/reliability.md: what `make faults` saw, between two marks; the prose around them stays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cells import CELLS, NOT_A_CELL, NOT_A_CELL_BY_FSDP, Cell, Expected
from experiment import Outcome
from sabotage import (
    ACTS,
    BEFORE_JOINING,
    DECIDING,
    FIRST_STEP,
    FULL_DISK,
    IDENTITIES,
    LAST,
    MID_EPOCH,
    RENAMING,
    ROLL_CALL,
    SAVING,
    VALIDATION,
    WRITING,
    WRITING_ELSEWHERE,
)

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
_CELLS, _REASONS, _END = "<!-- cells -->", "<!-- no cells -->", "<!-- end -->"
_HEADER = (
    "kind", "moment", "ranks", "what was done", "seconds to the message", "what it names", "exit code",
    "steps to do again", "resumed",
)  # fmt: skip
_DONE = {
    BEFORE_JOINING: "as its task is imported",
    ROLL_CALL: "as it is about to report",
    FIRST_STEP: "in the loss of step 1",
    MID_EPOCH: "in the loss of step 10",
    VALIDATION: "in the metrics, after step 7",
    SAVING: "as it writes step 8, before the manifest",
    WRITING: "as it writes its part of step 8",
    WRITING_ELSEWHERE: "as it writes its part of step 8",
    RENAMING: "as step 8 is to get its name",
    DECIDING: "after the validation of step 7",
    LAST: "after step 14, the last",
}


@dataclass(frozen=True)
class Row:
    cells: tuple[str, ...]

    @classmethod
    def of(cls, cell: Cell, wanted: Expected, outcome: Outcome) -> Row:
        identity = cell.kind in IDENTITIES
        done = "ranks started one by one" if cell.starts_by_hand else f"rank {cell.rank}, {_DONE[cell.moment]}"
        return cls(
            (
                cell.kind,
                cell.moment,
                cell.ranks,
                done,
                f"{max(outcome.seconds, 0):.1f}",
                wanted.names,
                str(wanted.code),
                "-" if identity else str(outcome.lost),
                "-" if identity else "bit-identical",
            )
        )

    def __str__(self) -> str:
        return f"| {' | '.join(self.cells)} |"


def write(seen: Mapping[Cell, Row | None]) -> None:
    """Replace the rows of the cells that were run; one that failed has none."""
    text = PAGE.read_text(encoding="utf-8")
    known = {tuple(line.strip("| \n").split(" | ")[:3]): line for line in _parts(text, _CELLS)[1].splitlines()[2:]}
    lines = [f"| {' | '.join(_HEADER)} |", "|" + " --- |" * len(_HEADER)]
    for cell in CELLS:
        key = (cell.kind, cell.moment, cell.ranks)
        line = str(seen[cell] or "") if cell in seen else known.get(key)
        if line:
            lines.append(line)
    text = _replaced(text, _CELLS, "\n".join(lines))
    PAGE.write_text(_replaced(text, _REASONS, _reasons()), encoding="utf-8")


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
