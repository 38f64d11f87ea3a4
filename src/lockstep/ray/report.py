"""What Ray Train hears of a run: metrics, and the newest checkpoint.

A report is a meeting of all workers, and Ray fetches one every two seconds at most: so it is made at rows of metrics,
which all ranks write at the same steps, and not at each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray.train

from lockstep.train.run import Run


class Reporter:
    """Reports at most every so many seconds of the clock that all ranks share, and once at the end."""

    def __init__(self, run: Run, every: float) -> None:
        self._run, self._every = run, every
        self._metrics: dict[str, Any] = {}
        self._last = -every
        self._reported_step: int | None = None
        self.ending = False  # from here on, what is heard waits for the last report

    def heard(self, row: Mapping[str, Any]) -> None:
        """A row of metrics was written; called on every rank."""
        self._metrics.update({name: value for name, value in row.items() if value is not None})
        if not self.ending and self._run.seconds_since_start - self._last >= self._every:
            self._report()

    def last(self, more: Mapping[str, Any]) -> None:
        """The end of the run; called on every rank. Ray's Result has the metrics that came with a checkpoint."""
        self._metrics.update(more)
        self._reported_step = None
        self._report()

    def _report(self) -> None:
        self._last = self._run.seconds_since_start
        self._run.barrier("the report to Ray")  # a rank that does not come is named here, and not waited for by Ray
        with self._run.working("the report to Ray", limit=self._run.settings.checkpoint.timeout):
            ray.train.report(dict(self._metrics), checkpoint=self._checkpoint())

    def _checkpoint(self) -> ray.train.Checkpoint | None:
        """Rank 0's newest that Ray does not have yet. Ray copies it while nothing else is being saved."""
        if not self._run.is_main:
            return None
        step, folder = self._run.newest_saved() or (None, None)
        if step is None or step == self._reported_step:
            return None
        self._reported_step = step
        return ray.train.Checkpoint.from_directory(str(folder))
