"""What rank 0 writes down as it goes: rows of metrics to files, progress to the screen."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from lockstep.config.schema import Log
from lockstep.data.progress import Progress
from lockstep.record.display import Display
from lockstep.record.writers import SPEED, JsonlWriter, Row, TensorBoardWriter, Writer, drop_rows_after

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"


class Recorder:
    """Opens its files when the first row comes, since only then it is known whether the run was restored."""

    def __init__(self, folder: Path, settings: Log, display: Display) -> None:
        self._folder, self._settings, self._display = folder, settings, display
        self._writers: list[Writer] | None = None
        self._restored_step: int | None = None
        self._last = (time.perf_counter(), 0)  # when, and examples so far
        self.rows = 0  # written so far, of the whole run
        self.lags: list[float] = []

    def forget_after(self, step: int, row_step: int, rows: int | None) -> None:
        """Drop what is about to be written again: all but the first rows, where it is known how many there were, else
        rows of later steps."""
        self._restored_step = step
        self.rows = drop_rows_after(self._folder / METRICS_FILE, step, row_step, rows)

    def begin(self, progress: Progress, total_steps: int | None) -> None:
        self._last = (time.perf_counter(), progress.examples)
        self._display.begin(progress.step, progress.epochs_done, total_steps)

    def write(self, row: Row, at: float) -> None:
        """Write a row whose values are of a moment that may be a little past."""
        if "examples" in row:
            row = self._with_speed(row, at)
        for writer in self._open():
            writer.write(row)
        self.rows += 1
        self._display.row(row, self.lags)

    def close(self) -> None:
        for writer in self._writers or []:
            writer.close()

    def _with_speed(self, row: Row, now: float) -> Row:
        then, before = self._last
        examples = row.pop("examples")
        self._last = (now, examples)
        row[SPEED] = round((examples - before) / max(now - then, 1e-9), 1)
        return row

    def _open(self) -> list[Writer]:
        if self._writers is None:
            self._writers = []
            if self._settings.jsonl:
                self._writers.append(JsonlWriter(self._folder / METRICS_FILE))
            if self._settings.tensorboard:
                self._writers.append(TensorBoardWriter(self._folder / "tensorboard", self._restored_step))
        return self._writers
