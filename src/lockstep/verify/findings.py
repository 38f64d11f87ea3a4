"""What was asked of a comparison, and what it found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.verify.combinations import Combination
from lockstep.verify.judge import Comparison, Verdict
from lockstep.verify.trial import Trial


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
    metrics_apart: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)  # here, reference
    resumed_from: str = ""


@dataclass(frozen=True)
class Row:
    """A combination: from the start, and from another's checkpoint (None where that was not tried)."""

    combination: Combination
    fresh: Judged
    resumed: Judged | None = None
    required: bool = False

    @property
    def ran(self) -> bool:
        return self.fresh.verdict != "not here"

    @property
    def good(self) -> bool:
        runs = [self.fresh] if self.resumed is None else [self.fresh, self.resumed]
        return all(each.verdict in ("reference", "agrees") for each in runs)


@dataclass(frozen=True)
class Report:
    """The first row is the reference."""

    asked: Asked
    precision: str
    tolerance: float
    rows: Sequence[Row]
    random: bool = False  # the task draws random numbers while it trains
    random_arguments: Sequence[str] = ()  # of the task, that look as if they were the reason
    batch_norm: Sequence[str] = ()  # layers that normalise by a rank's share of the batch
    # The reference with its batches taken in halves: another order of summation, and nothing else.
    control: Comparison | None = None

    @property
    def agrees(self) -> bool:
        """At least one was compared, all that were are right, and none that is required is missing."""
        compared = [row for row in self.rows[1:] if row.ran]
        return bool(compared) and all(row.good for row in self.rows if row.ran or row.required)
