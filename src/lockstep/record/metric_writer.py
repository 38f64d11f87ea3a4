"""Writes rank 0's rows of metrics to files and loggers, samples to the folder, and progress to the display."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.config.schema import Keep, Log
from lockstep.data.cursors import Progress
from lockstep.record.display import NEW_BEST, Display
from lockstep.record.logger import Kind
from lockstep.record.loggers import LoggerQueue
from lockstep.record.samples import Samples
from lockstep.record.timeline import Timeline
from lockstep.record.writers import METRICS_FILE, SPEED, JsonlWriter, Row, keep_rows, read_rows


class MetricWriter:
    """Opens files and loggers when the run begins or the first row comes: only then it is known whether the run was
    restored."""

    def __init__(
        self,
        folder: Path,
        settings: Log,
        display: Display,
        loggers: Sequence[LoggerQueue] = (),
        timeline: Timeline | None = None,
        keep: Keep | None = None,
    ) -> None:
        self._folder, self._settings, self._display, self._loggers = folder, settings, display, loggers
        self._best = Best(keep) if keep is not None and keep.best else None
        self._timeline = timeline
        self._samples = Samples(folder)
        self._jsonl: JsonlWriter | None = None
        self._opened = False
        self._restored_step = 0
        self._last = (time.perf_counter(), 0)  # the time, and examples so far
        self.rows = 0  # in metrics.jsonl
        self._lags: list[float] = []

    def forget_after(self, step: int, rows: int) -> None:
        """Drops what is about to be written again: all but the first rows, and the samples of later steps."""
        self._restored_step = step
        self.rows = keep_rows(self._folder / METRICS_FILE, rows)
        self._samples.forget_after(step)
        if self._best is not None and self.rows:
            for row in read_rows(self._folder / METRICS_FILE, having=json.dumps(self._best.metric)):
                self._best.reached(row)

    def begin(self, progress: Progress, total_steps: int | None) -> None:
        self._open()
        self._last = (time.perf_counter(), progress.examples)
        self._display.begin(progress.step, progress.epochs_done, total_steps)

    def write(self, row: Row, at: float) -> None:
        """Writes a row whose values are of the moment `at`."""
        if "examples" in row:
            row = self._with_speed(row, at)
        self._open()
        if self._jsonl is not None:
            self._jsonl.write(row)
            self.rows += 1
        values = _numbers(row)
        for each in self._loggers:
            each.log(row["step"], values)
        is_best = self._best is not None and self._best.reached(row)
        self._display.row({**row, NEW_BEST: True} if is_best else row, self._lags)

    def note_lags(self, step: int, busy: list[float]) -> None:
        """Notes by rank how long each took for a step until it was ready to exchange gradients."""
        self._lags = busy
        if self._timeline is not None and len(busy) > 1:
            self._timeline.lags(step, busy)

    def sample(self, step: int, name: str, kind: Kind, value: Any) -> None:
        """Keeps a sample in the run's folder, and sends it to the loggers that can show it."""
        self._open()
        found = self._samples.keep(step, name, kind, value)
        if found is not None:
            for each in self._loggers:
                each.log_sample(*found)

    def close(self, status: str, limit: float | None = None) -> None:
        """Ends the loggers, which together may take `log.timeout` or a lower limit."""
        if self._jsonl is not None:
            self._jsonl.close()
        self._jsonl, self._opened = None, False  # a later row opens them again
        for each in self._loggers:
            each.close(status)
        until = time.monotonic() + min(self._settings.timeout, math.inf if limit is None else limit)
        for each in self._loggers:
            each.wait(until)
        self._loggers = ()

    def _with_speed(self, row: Row, now: float) -> Row:
        then, before = self._last
        examples = row.pop("examples")
        self._last = (now, examples)
        row[SPEED] = round((examples - before) / max(now - then, 1e-9), 1)
        return row

    def _written(self, count: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields the first rows of metrics.jsonl, which a resumed run has behind it."""
        for row in itertools.islice(read_rows(self._folder / METRICS_FILE), count):
            yield row.get("step", 0), _numbers(row)

    def _open(self) -> None:
        if self._opened:
            return
        self._opened = True
        if self._settings.jsonl:
            self._jsonl = JsonlWriter(self._folder / METRICS_FILE)
        for each in self._loggers:
            each.start(self._restored_step, partial(self._written, self.rows))


def _numbers(row: Row) -> dict[str, Any]:
    return {
        name: value for name, value in row.items() if name not in ("step", "epoch") and isinstance(value, (int, float))
    }


class Best:
    """The best value so far, over the rows of a run in their order."""

    def __init__(self, keep: Keep) -> None:
        self.metric, self._keep = keep.metric, keep
        self._value: float | None = None

    def reached(self, row: Mapping[str, Any]) -> bool:
        """Whether a row's value is better than all before it."""
        value = row.get(self.metric)
        if SPEED in row or isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return False
        better = self._value is None or (value < self._value if self._keep.mode == "min" else value > self._value)
        if better:
            self._value = float(value)
        return better
