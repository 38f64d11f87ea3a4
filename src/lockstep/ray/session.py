"""A worker's part in a run: the Run inside the training function, and how it ends.

Ray calls the training function in a thread of its own; joining and leaving happen in the worker's main thread.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import ray.train

from lockstep import worker
from lockstep.config.schema import RunConfig, RunSettings
from lockstep.distributed.topology import ranks_text
from lockstep.engine.run import Run
from lockstep.engine.stop_requests import Preempted
from lockstep.engine.summary import conclude
from lockstep.errors import ConfigError, LaunchError
from lockstep.ray.reporting import BlockingReporter, Reporter
from lockstep.ray.worker_settings import WorkerSettings

# How long a folder that rank 0 made may take to be seen on other nodes.
_SEEN_SECONDS = 10.0


class Session:
    """One worker's part in a run, from joining to leaving."""

    def __init__(self, config: WorkerSettings, settings: RunSettings, present: worker.Rank) -> None:
        self.config, self.settings, self.present = config, settings, present
        self.requests = (
            present.requests
        )  # to save and leave, to stop, to save: set by whoever hears of it on this worker
        self.outlet: worker.Outlet | None = None  # where rank 0's words go, where a driver of ours shows them
        self.make_reporter: Callable[[Run], Reporter] = lambda run: BlockingReporter(run, config.report_every_s)
        self.ended: Callable[[BaseException | None], None] = lambda error: None  # told last, how it ended here
        self.shares_folder = True  # all workers see one folder; else somebody takes care of it
        self.folder_is_held = False  # by a driver of ours
        self.outcome: dict[str, Any] = {}
        self.training = False
        self._run: Run | None = None
        self._reporter: Reporter | None = None

    def run(self) -> Run:
        if self._run is None:
            make_folder = _folder_maker(self.config.folder)
            redirect = self.outlet is not None
            run = self.present.open(make_folder, redirect, self.outlet, held=self.folder_is_held)
            if self.shares_folder:
                _check_shared(run)
            self._reporter = self.make_reporter(run)
            run._engine.aggregator.listener = self._reporter.on_row
            self._run = run
        return self._run

    def begin(self) -> None:
        """The training function starts, in a thread of its own."""
        self.training = True
        self.present.heartbeat.follow_this_thread()
        self.present.runtime.prepare()  # again, since torch's current GPU is the thread's
        # A function of one's own need not use anything of the run: until it does, nothing says whether it gets on.
        self.present.group.activity.enter("main", limit=math.inf)

    def end(self, error: BaseException | None) -> bool:
        """The training function is over. Whether its error has been dealt with: leaving on request is no failure."""
        try:
            dealt_with = self._end(error)
        except BaseException as later:
            self.ended(later)
            raise
        self.ended(error)
        return dealt_with

    def _end(self, error: BaseException | None) -> bool:
        try:
            if self._run is None:
                return False
            assert self._reporter is not None
            self._reporter.ending = True
            if error is None:
                self._run._engine.finish(
                    str(self.outcome.get("status", "stopped early" if self._run.stopped else "completed"))
                )
                self._conclude(self._run, self.outcome or _outcome(self._run))
            elif isinstance(error, Preempted):
                self._conclude(self._run, {"status": "preempted", "reason": error.reason})
                return True
            return False
        finally:
            with contextlib.suppress(BaseException):  # it goes on its way by itself
                self.present.close(error)
            if error is None or isinstance(error, Preempted):
                self.training = False
                self.present.group.activity.enter("the end of the other workers", waits=True)

    def _conclude(self, run: Run, outcome: dict[str, Any]) -> None:
        conclude(run, outcome)
        assert self._reporter is not None
        self._reporter.finish({"status": outcome["status"]})

    def leave(self) -> None:
        """Take the group apart where all is done; a training function that is still at work loses it by itself."""
        if not self.training:
            self.present.leave()
        self.present.stop()


_session: Session | None = None  # of this process


class Training:
    """Ray enters this around the training function."""

    def __enter__(self) -> None:
        if _session is not None:
            _session.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return _session is not None and _session.end(error)


def current() -> Session:
    """The session of this worker."""
    if _session is None:
        raise LaunchError(
            "lockstep.ray.run() works inside the training function of a TorchTrainer that has "
            "torch_config=lockstep.ray.TorchConfig(...), on its workers (num_workers of at least 1)"
        )
    return _session


def begin(session: Session) -> None:
    """This worker has joined."""
    global _session
    _session = session


def end() -> None:
    """This worker leaves, if it has joined."""
    global _session
    if _session is not None:
        _session.leave()
        _session = None


def run() -> Run:
    """The Run of this worker: group joined, roll called, device and folder known. All workers call it."""
    return current().run()


def fit(config: RunConfig) -> dict[str, Any]:
    """Train a config's task in the run of this worker, as `lockstep train` does; the metrics it ended with."""
    session = current()
    session.outcome = worker.carry_out(session.run(), config)
    return dict(session.outcome["metrics"])


def _folder_maker(folder: str | None) -> Callable[[], Path]:
    def make() -> Path:
        chosen = Path(folder) if folder is not None else _default_folder()
        try:
            (chosen / "logs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"TorchConfig: folder={str(chosen)!r} cannot be made: {error.strerror}") from None
        return chosen

    return make


def _default_folder() -> Path:
    storage = ray.train.get_context().get_storage()
    if storage.storage_filesystem.type_name != "local":
        raise ConfigError(
            f"the run's folder cannot be on Ray's storage path {storage.storage_fs_path!r} "
            f"({storage.storage_filesystem.type_name}): name one on a file system that all nodes see with "
            "TorchConfig(folder=...); checkpoints are also copied to Ray's storage"
        )
    return Path(getattr(storage, "trial_fs_path", storage.experiment_fs_path)) / "lockstep"


def _check_shared(run: Run) -> None:
    """Make sure that workers on other nodes see the folder: they read checkpoints from it."""
    if run._engine.topology.host_count == 1:
        return
    name = run.agree(lambda: f".seen-{os.getpid()}-{time.time_ns()}", "the name of a file to look for")
    mark = run.folder / name
    if run.is_main:
        mark.touch()
    run.barrier("a file to look for")
    deadline = time.monotonic() + _SEEN_SECONDS
    while not (seen := mark.exists()) and time.monotonic() < deadline:
        time.sleep(0.2)
    blind = [rank for rank, sees in enumerate(run.gather(seen, "whether the run's folder is seen")) if not sees]
    if run.is_main:
        mark.unlink(missing_ok=True)
    if blind:
        raise ConfigError(
            f"{ranks_text(blind)}: the run's folder {run.folder} of rank 0 is not seen there within "
            f"{_SEEN_SECONDS:g} s: name one on storage that all nodes share with TorchConfig(folder=...) or "
            "ray.train.RunConfig(storage_path=...)"
        )


def _outcome(run: Run) -> dict[str, Any]:
    return {"status": "stopped early" if run.stopped else "completed", "reason": run.stopped}
