"""Shows rank 0's progress: a live display on a terminal, plain lines anywhere else."""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
import weakref
from typing import TYPE_CHECKING, Any

from lockstep.record.writers import Row
from lockstep.shown import in_a_line

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)

NEW_BEST = "new best"  # marks a row for the display alone
_NOT_METRICS = ("step", "epoch", "lr", "tokens", "examples_per_second", NEW_BEST)
# A lag is shown where it costs this fraction of a step and at least so many seconds.
_LAG_FRACTION, _LAG_SECONDS = 0.05, 0.010


class Display:
    """Plain lines through the log; also the base of the live display."""

    def __init__(self) -> None:
        self._total_steps: int | None = None
        self._start_step = 0
        self._began = time.monotonic()

    def begin(self, step: int, epoch: int, total_steps: int | None) -> None:
        self._start_step, self._total_steps = step, total_steps
        self._began = time.monotonic()

    def row(self, row: Row, lags: list[float]) -> None:
        """Shows a row of metrics. The log file gets every row; logs.Pace decides which of them a pipe gets."""
        kind = "training" if "examples_per_second" in row else "validation"
        is_last = self._total_steps is not None and row["step"] >= self._total_steps
        logger.info(self.line(row, lags), extra={"repeats": kind, "is_last": is_last})

    def note(self, text: str) -> None:
        logger.info(text)

    def close(self) -> None:
        pass

    def line(self, row: Row, lags: list[float]) -> str:
        total = f"/{self._total_steps}" if self._total_steps else ""
        parts = [f"epoch {row['epoch']} step {row['step']}{total}", *_metrics(row)]
        if "examples_per_second" in row:
            parts.append(f"{row['examples_per_second']:,.0f} examples/s")
            if self._total_steps and row["step"] > self._start_step:
                seconds = int(self._step_seconds(row["step"]) * (self._total_steps - row["step"]))
                parts.append(f"{seconds // 60}:{seconds % 60:02d} left")
            parts += self._lag(row["step"], lags)
        return "  ".join([*parts, NEW_BEST] if row.get(NEW_BEST) else parts)

    def _lag(self, step: int, lags: list[float]) -> list[str]:
        """How much longer than the fastest each slower rank takes to get to the exchange of gradients."""
        least = max(_LAG_SECONDS, _LAG_FRACTION * self._step_seconds(step))
        behind = [lag - min(lags) for lag in lags]
        slow = [f"r{rank} +{lag * 1000:.0f}ms" for rank, lag in enumerate(behind) if lag >= least]
        return [f"lag {' '.join(slow)}"] if slow else []

    def _step_seconds(self, step: int) -> float:
        return (time.monotonic() - self._began) / max(step - self._start_step, 1)


class LiveDisplay(Display):
    """A progress bar that stays at the bottom of the terminal; validations and warnings scroll by above it."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = console
        self._progress = Progress(
            TextColumn("[bold]epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}", markup=False),  # a metric may be named val/[cls]
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=4,
        )
        self._bar: Any = None

    def begin(self, step: int, epoch: int, total_steps: int | None) -> None:
        super().begin(step, epoch, total_steps)
        self._bar = self._progress.add_task("train", total=total_steps, completed=step, epoch=epoch, numbers="")
        self._progress.start()
        _drawn().add(self)

    def row(self, row: Row, lags: list[float]) -> None:
        if self._bar is None:
            super().row(row, lags)
            return
        if "examples_per_second" in row:
            parts = [*_metrics(row), f"{row['examples_per_second']:,.0f} examples/s", *self._lag(row["step"], lags)]
            numbers = in_a_line("  ".join(parts))
            self._progress.update(self._bar, completed=row["step"], epoch=row["epoch"], numbers=numbers)
        else:
            self._progress.update(self._bar, completed=row["step"], epoch=row["epoch"])
            logger.info(self.line(row, lags))

    def close(self) -> None:
        self._progress.stop()

    def make_way(self) -> None:
        """Switches to plain lines: the bar would be drawn over a debugger's prompt."""
        self._bar = None
        self.close()


@functools.cache
def _drawn() -> weakref.WeakSet[LiveDisplay]:
    """Returns the displays that are drawn; a debugger that starts ends them."""
    displays: weakref.WeakSet[LiveDisplay] = weakref.WeakSet()

    def listen(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "pdb.Pdb":
            for each in list(displays):
                each.make_way()

    sys.addaudithook(listen)  # a hook cannot be removed, so there is one for all displays
    return displays


def create(console: Console | None) -> Display:
    return Display() if console is None else LiveDisplay(console)


def terminal() -> Console | None:
    """Returns the terminal to draw on, if there is one."""
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        return None
    from rich.console import Console

    return Console(highlight=False)


def _metrics(row: Row) -> list[str]:
    single = {name: value for name, value in row.items() if isinstance(value, (int, float))}
    return [f"{name} {value:.4g}" for name, value in single.items() if name not in _NOT_METRICS]
