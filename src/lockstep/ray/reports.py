"""What a run tells Ray Train as it goes: metrics after every validation, and the newest checkpoint that is whole."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping
from pathlib import Path

import ray.train
from ray.train import Checkpoint, CheckpointUploadMode

from lockstep.checkpoint.store import Store
from lockstep.errors import LaunchError
from lockstep.train.run import Run

# How long Ray Train may take to receive the last reports.
_FINISH_SECONDS = 120.0


class Reports:
    """Reports from a thread of its own: Ray Train takes the next one only when its controller has seen the last.

    Every rank makes the same reports in the same order, as Ray Train expects; the checkpoint is rank 0's to name. It
    stays where it is, in the run's folder, which is Ray Train's storage as well.
    """

    def __init__(self, rank: int, folder: Path) -> None:
        self._rank, self._store = rank, Store(folder / "checkpoints")
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="lockstep-reports")
        self._pending: list[concurrent.futures.Future[None]] = []
        self._latest: dict[str, float] = {}
        self._reported: int | None = None

    def measured(self, run: Run, metrics: Mapping[str, float]) -> None:
        self._latest = dict(metrics)
        self._report(self._latest)

    def finish(self) -> None:
        """The last report, with the last checkpoint; all of them have arrived when this returns."""
        self._report(self._latest)
        done, late = concurrent.futures.wait(self._pending, timeout=_FINISH_SECONDS)
        if late:
            raise LaunchError(f"Ray Train did not take {len(late)} reports of rank {self._rank} in {_FINISH_SECONDS:g} s")
        for each in done:
            each.result()
        self._thread.shutdown()

    def _report(self, metrics: dict[str, float]) -> None:
        self._pending = [each for each in self._pending if not each.done() or each.exception()]
        self._pending.append(self._thread.submit(self._send, dict(metrics)))

    def _send(self, metrics: dict[str, float]) -> None:
        ray.train.report(
            metrics, checkpoint=self._newest(), checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD
        )

    def _newest(self) -> Checkpoint | None:
        steps = self._store.steps() if self._rank == 0 else []
        if not steps or steps[-1] == self._reported:
            return None
        self._reported = steps[-1]
        return Checkpoint.from_directory(str(self._store.path(steps[-1])))
