"""Reports a run's metrics and newest checkpoint to Ray Train."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping
from typing import Any

import ray.train
from ray.train import Checkpoint, CheckpointUploadMode

from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.engine.run import Run
from lockstep.errors import LaunchError

# How long Ray Train may take to receive the last reports.
_FINISH_SECONDS = 120.0


class Reporter:
    """Collects the newest values of all metrics. Every rank makes the same calls in the same order."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._metrics: dict[str, Any] = {}
        self._reported: int | None = None  # the step of the newest checkpoint that Ray knows
        self.ending = False  # set before the last rows: these wait for the last report

    def on_row(self, row: Mapping[str, Any]) -> None:
        """Takes a row of metrics that was written."""
        self._metrics.update({name: value for name, value in row.items() if value is not None})
        if not self.ending and self._due(row):
            self._report()

    def finish(self, more: Mapping[str, Any]) -> None:
        """Sends the last report, with the last checkpoint."""
        self._metrics.update(more)
        self._report()

    def _due(self, row: Mapping[str, Any]) -> bool:
        raise NotImplementedError

    def _report(self) -> None:
        raise NotImplementedError


class BlockingReporter(Reporter):
    """For the user's training function: a report waits for all workers, and Ray copies the newest checkpoint.

    Ray fetches a report every two seconds at most. So one is made at rows of metrics, which all ranks write at the same
    steps, but at most every so many seconds of the clock that all ranks share, and at the end.
    """

    def __init__(self, run: Run, every: float) -> None:
        super().__init__(run)
        self._every, self._last = every, -every

    def finish(self, more: Mapping[str, Any]) -> None:
        self._reported = None  # Ray's Result has the metrics that came with a checkpoint
        super().finish(more)

    def _due(self, row: Mapping[str, Any]) -> bool:
        return self._run._engine.seconds_since_start - self._last >= self._every

    def _report(self) -> None:
        self._last = self._run._engine.seconds_since_start
        self._run.barrier("the report to Ray")  # a rank that does not come is named here, and not waited for by Ray
        with self._run.working("the report to Ray", limit=self._run._engine.settings.timeouts.checkpoint):
            ray.train.report(dict(self._metrics), checkpoint=self._checkpoint())

    def _checkpoint(self) -> Checkpoint | None:
        """Rank 0's newest that Ray does not have yet. Ray copies it while nothing else is being saved."""
        if not self._run.is_main:
            return None
        step, folder = self._run._engine.checkpointer.newest() or (None, None)
        if step is None or step == self._reported:
            return None
        self._reported = step
        return Checkpoint.from_directory(str(folder))


class BackgroundReporter(Reporter):
    """For `lockstep train`: sends metrics of every validation and the newest checkpoint from a thread.

    Ray Train takes a report only once its controller has seen the one before, and training does not wait for that. The
    checkpoint stays where it is: the run's folder is Ray Train's storage as well.
    """

    def __init__(self, run: Run, before_checkpoint: Callable[[], None] | None = None) -> None:
        """`before_checkpoint` brings a checkpoint to where Ray Train looks for it."""
        super().__init__(run)
        self._before_checkpoint = before_checkpoint
        self._storage = CheckpointStorage(run.folder / "checkpoints")
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="lockstep-reports")
        self._pending: list[concurrent.futures.Future[None]] = []

    def finish(self, more: Mapping[str, Any]) -> None:
        """All reports have arrived when this returns."""
        super().finish(more)
        done, late = concurrent.futures.wait(self._pending, timeout=_FINISH_SECONDS)
        if late:
            raise LaunchError(
                f"rank {self._run.rank}: Ray Train did not take {len(late)} reports within {_FINISH_SECONDS:g} s: its "
                "controller, on the driver's node, does not answer"
            )
        for each in done:
            each.result()
        self._thread.shutdown()

    def _due(self, row: Mapping[str, Any]) -> bool:
        return "examples" not in row and any("/" in name for name in row)  # rows of log.every count examples

    def _report(self) -> None:
        self._pending = [each for each in self._pending if not each.done() or each.exception()]
        self._pending.append(self._thread.submit(self._send, dict(self._metrics)))

    def _send(self, metrics: dict[str, Any]) -> None:
        ray.train.report(metrics, checkpoint=self._newest(), checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)

    def _newest(self) -> Checkpoint | None:
        if not self._run.is_main:
            return None
        # What is newer than the run itself is damaged or of a branch that was left, and about to be set aside.
        steps = [each for each in self._storage.steps() if each <= self._run.progress.step]
        if not steps or steps[-1] == self._reported:
            return None
        if self._before_checkpoint is not None:
            self._before_checkpoint()
        self._reported = steps[-1]
        return Checkpoint.from_directory(str(self._storage.path(steps[-1])))
