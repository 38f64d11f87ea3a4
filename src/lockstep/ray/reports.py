"""What `lockstep train` tells Ray Train as it goes: metrics of every validation, and the newest whole checkpoint."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping
from typing import Any

import ray.train
from ray.train import Checkpoint, CheckpointUploadMode

from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.errors import LaunchError
from lockstep.train.run import Run

# How long Ray Train may take to receive the last reports.
_FINISH_SECONDS = 120.0


class Reports:
    """Reports from a thread of its own: Ray Train takes the next one only when its controller has seen the last.

    Every rank makes the same reports in the same order, as Ray Train expects; the checkpoint is rank 0's to name. It
    stays where it is: the run's folder is Ray Train's storage as well, so nothing is copied.
    """

    def __init__(self, run: Run, before: Callable[[], None] | None = None) -> None:
        self._before = before  # what has to be done so that the checkpoint is where Ray Train looks for it
        self._rank, self._store = run.rank, CheckpointStorage(run.folder / "checkpoints")
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="lockstep-reports")
        self._pending: list[concurrent.futures.Future[None]] = []
        self._metrics: dict[str, Any] = {}
        self._reported: int | None = None
        self.ending = False  # from here on, what is heard waits for the last report

    def heard(self, row: Mapping[str, Any]) -> None:
        self._metrics.update({name: value for name, value in row.items() if value is not None})
        if not self.ending and any(
            "/" in name for name in row
        ):  # train/loss, val/..., test/...: not one of the rows in between
            self._report()

    def last(self, more: Mapping[str, Any]) -> None:
        """The last report, with the last checkpoint; all of them have arrived when this returns."""
        self._metrics.update(more)
        self._report()
        done, late = concurrent.futures.wait(self._pending, timeout=_FINISH_SECONDS)
        if late:
            raise LaunchError(
                f"rank {self._rank}: Ray Train did not take {len(late)} reports within {_FINISH_SECONDS:g} s: its "
                "controller, on the driver's node, does not answer"
            )
        for each in done:
            each.result()
        self._thread.shutdown()

    def _report(self) -> None:
        self._pending = [each for each in self._pending if not each.done() or each.exception()]
        self._pending.append(self._thread.submit(self._send, dict(self._metrics)))

    def _send(self, metrics: dict[str, Any]) -> None:
        ray.train.report(metrics, checkpoint=self._newest(), checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)

    def _newest(self) -> Checkpoint | None:
        steps = self._store.steps() if self._rank == 0 else []
        if not steps or steps[-1] == self._reported:
            return None
        if self._before is not None:
            self._before()
        self._reported = steps[-1]
        return Checkpoint.from_directory(str(self._store.path(steps[-1])))
