"""A worker's part in a run: it joins the group, has a Run inside the training function, and leaves.

Ray calls the training function in its own thread; joining and leaving happen in the worker's main thread.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import ray.train
from ray.train.torch import TorchConfig  # here always the one of `backend`, which is a subclass

from lockstep import worker
from lockstep.config.objects import import_object
from lockstep.config.schema import RunConfig, RunSettings
from lockstep.distributed.rollcall.report import Report
from lockstep.distributed.topology import Topology
from lockstep.engine.run import Run
from lockstep.engine.stop_requests import Preempted
from lockstep.engine.summary import conclude
from lockstep.errors import ConfigError, LaunchError
from lockstep.ray import xla
from lockstep.ray.placement import WorkerInfo, device_index
from lockstep.ray.xla import XLA_BACKENDS
from lockstep.record import run_folder
from lockstep.runtime.base import Runtime

# Ray brings what its own logger writes to the driver; ours has no handler until the run's folder is known.
_logger = logging.getLogger("ray.train.lockstep")

# How long a folder that rank 0 made may take to be seen on other nodes.
_SEEN_SECONDS = 10.0


class Reporter:
    """Reports the newest values of all metrics, and the newest checkpoint, to Ray Train.

    Every rank reports at the same rows of metrics, since a report waits for all workers; and Ray fetches one every two
    seconds at most, so that one is made every so many seconds of the clock that all ranks share, and at the end.
    """

    def __init__(self, run: Run, every: float, validations_only: bool = False) -> None:
        """`validations_only` is for a sweep, which needs each of them, and finds checkpoints in the run's folder."""
        self._run, self._every, self._validations_only = run, every, validations_only
        self._metrics: dict[str, Any] = {}
        self._last = -every
        self._reported: int | None = None  # the step of the newest checkpoint that Ray knows
        self.ending = False  # set before the last rows: these wait for the last report

    def on_row(self, row: Mapping[str, Any]) -> None:
        """Takes a row of metrics that was written."""
        self._metrics.update({name: value for name, value in row.items() if value is not None})
        validation = "examples" not in row and any("/" in name for name in row)  # rows of log.every count examples
        late = self._run._engine.seconds_since_start - self._last >= self._every
        if not self.ending and (validation if self._validations_only else late):
            self._report()

    def finish(self, status: str) -> None:
        self._metrics["status"] = status
        self._reported = None  # Ray's Result has the metrics that came with a checkpoint
        self._report()

    def _report(self) -> None:
        self._last = self._run._engine.seconds_since_start
        self._run.barrier("the report to Ray")  # a rank that does not come is named here, and not waited for by Ray
        with self._run.working("the report to Ray", limit=self._run._engine.settings.timeouts.checkpoint):
            ray.train.report(dict(self._metrics), checkpoint=self._checkpoint())

    def _checkpoint(self) -> ray.train.Checkpoint | None:
        """Rank 0's newest that Ray does not have yet. Ray copies it while nothing else is being saved."""
        if not self._run.is_main or self._validations_only:
            return None
        step, folder = self._run._engine.checkpointer.newest() or (None, None)
        if step is None or step == self._reported:
            return None
        self._reported = step
        return ray.train.Checkpoint.from_directory(str(folder))


@dataclass(frozen=True)
class Folder:
    """The folder of a run on a cluster."""

    make: Callable[[], Path]  # called on rank 0
    remedy: str = ""  # where not all workers see it
    mark: str | None = None  # a file that the driver, which holds the folder, has made in it
    in_bucket: bool = False  # rank 0 has a copy of it, which other nodes need not see


_REMEDY = "Name one on storage that all nodes share with TorchConfig(folder=...) or RunConfig(storage_path=...)"


class Session:
    """One worker's part in a run, from joining to leaving. As a context manager it ends the training function."""

    def __init__(self, config: TorchConfig, settings: RunSettings, present: worker.Rank) -> None:
        self.config, self.settings, self.present = config, settings, present
        self.requests = present.requests
        self.folder: Folder | None = None  # set by `lockstep train`
        self.make_reporter: Callable[[Run], Reporter | None] = lambda run: Reporter(run, config.report_every_s)
        self.outcome: dict[str, Any] = {}
        self._training = self._ended = False
        self._run: Run | None = None
        self._reporter: Reporter | None = None

    def run(self) -> Run:
        if self._run is None:
            folder = self.folder or Folder(self._make_folder, _REMEDY)
            if not folder.in_bucket:
                require_shared(self.present, folder)
            run = self.present.open(folder.make, redirect=self.folder is not None, held=folder.mark is not None,
                                    restarted=True)  # fmt: skip
            self._reporter = self.make_reporter(run)
            if self._reporter is not None:
                run._engine.aggregator.listener = self._reporter.on_row
            self._run = run
        return self._run

    def begin(self) -> None:
        """The training function starts, in its own thread."""
        self._training = True
        self.present.heartbeat.follow_this_thread()
        self.present.runtime.prepare()  # again, since torch's current GPU is the thread's
        # A user's function need not use anything of the run: until it does, nothing shows whether it makes progress.
        self.present.group.activity.enter("main", limit=math.inf)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """The training function has ended. Returns whether its error is handled: leaving on request is no failure."""
        if self._ended:
            return False
        self._ended = True
        try:
            if self._run is None:
                return False
            if error is None:
                stopped = self._run.stopped
                status = "stopped early" if stopped else "completed"
                self._conclude(self._run, self.outcome or {"status": status, "reason": stopped})
            elif isinstance(error, Preempted):
                self._conclude(self._run, {"status": "preempted", "reason": error.reason})
                return True
            elif self.folder is not None and self.folder.in_bucket and self._run.is_main:
                run_folder.record(self._run.folder, "failed", f"{type(error).__name__}: {error}")
            return False
        finally:
            with contextlib.suppress(BaseException):  # the error is raised anyway
                self.present.close(error)
            if error is None or isinstance(error, Preempted):
                self._training = False
                self.present.group.activity.enter("the end of the other workers", waits=True)

    def _conclude(self, run: Run, outcome: dict[str, Any]) -> None:
        if self._reporter is not None:
            self._reporter.ending = True
        if outcome["status"] != "preempted":
            run._engine.finish(str(outcome["status"]))
        conclude(run, outcome)
        if self._reporter is not None:
            self._reporter.finish(outcome["status"])

    def leave(self) -> None:
        """Destroys the group if all is done; a training function that is still running loses it by itself."""
        if not self._training:
            self.present.leave()
        self.present.stop()

    def _make_folder(self) -> Path:
        folder = Path(self.config.folder) if self.config.folder is not None else _default_folder()
        try:
            (folder / "logs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"TorchConfig: folder={str(folder)!r} cannot be made: {error.strerror}") from None
        return folder


_session: Session | None = None  # of this process


@contextlib.contextmanager
def training() -> Iterator[None]:
    """Ray enters this around the training function."""
    if _session is None:
        yield
        return
    _session.begin()
    with _session:
        yield


def current() -> Session:
    if _session is None:
        raise LaunchError(
            "lockstep.ray.run() works inside the training function of a TorchTrainer that has "
            "torch_config=lockstep.ray.TorchConfig(...), on its workers (num_workers of at least 1)"
        )
    return _session


def run() -> Run:
    """Returns the Run of this worker: group joined, roll called, device and folder known. All workers call it."""
    return current().run()


def fit(config: RunConfig) -> dict[str, Any]:
    """Trains a config's task in the run of this worker, as `lockstep train` does; returns the final metrics."""
    session = current()
    session.outcome = worker.carry_out(session.run(), config)
    return dict(session.outcome["metrics"])


def _default_folder() -> Path:
    storage = ray.train.get_context().get_storage()
    if storage.storage_filesystem.type_name != "local":
        raise ConfigError(
            f"the run's folder cannot be on Ray's storage path {storage.storage_fs_path!r} "
            f"({storage.storage_filesystem.type_name}): name one on a file system that all nodes see with "
            "TorchConfig(folder=...); checkpoints are also copied to Ray's storage"
        )
    return Path(getattr(storage, "trial_fs_path", storage.experiment_fs_path)) / "lockstep"


def require_shared(present: worker.Rank, folder: Folder) -> None:
    """Raises ConfigError unless every worker sees the run's folder: they read checkpoints from it.

    They look for the mark that the driver made in it; without a driver, rank 0 makes the folder and the mark.
    """
    group, place = present.group, present.topology.place
    if folder.mark is None and present.topology.host_count == 1:
        return

    def marked() -> str:
        if folder.mark is not None:
            return str(folder.make() / folder.mark)
        mark = folder.make() / f".seen-{os.getpid()}-{time.time_ns()}"
        mark.touch()
        return str(mark)

    mark = Path(group.agree(marked, "a file in the run's folder"))
    deadline = time.monotonic() + _SEEN_SECONDS
    while not (seen := mark.exists()) and time.monotonic() < deadline:
        time.sleep(0.2)
    found = group.gather(None if seen else f"rank {place.rank} on {place.host}", "who sees the run's folder")
    if place.rank == 0 and folder.mark is None:
        mark.unlink(missing_ok=True)
    if blind := [each for each in found if each is not None]:
        raise ConfigError(
            f"{', '.join(blind)}: the run's folder {mark.parent} is not seen there within {_SEEN_SECONDS:g} s, and "
            f"nodes with disks of their own cannot share a run. {folder.remedy}"
        )


# What the backend calls on every worker, in its main thread


@dataclass(frozen=True)
class Joined:
    """What a worker returns to the controller once it has joined."""

    reports: list[Report]  # of all ranks from rank 0, else its own
    seconds: float
    devices: int = 1


def set_master_address(address: str, port: int) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)


def join(topology: Topology, info: WorkerInfo, backend: str, config: TorchConfig, xla_port: int) -> Joined:
    """Joins the group as the rank that the topology says, and holds the roll call. XLA meets at `xla_port`."""
    global _session
    place = topology.place
    settings = _run_settings(config, backend, info, topology.world_size)
    index = device_index(info, place.local_rank) if settings.runtime == "cuda" else None

    def adapt(device: Runtime) -> None:
        if backend in XLA_BACKENDS and not settings.strategy.has_mesh and topology.world_size > 1:
            meeting.enter_context(xla.store_of_torch(topology.address, xla_port, place.rank == 0))
            xla.join(place.rank, topology.world_size, xla_port, config.join_timeout_s)
        elif backend == "gloo":
            device.backend = "gloo"  # also between GPUs

    def load_source() -> Any:
        return _import_task(config, settings, place.rank, place.host)

    present = worker.Rank(settings, topology)
    with contextlib.ExitStack() as meeting:  # until the roll call has found everybody
        try:
            present.join(load_source, index, adapt)
        except BaseException:
            present.stop()
            raise
    mine = next(each for each in present.reports if each.rank == place.rank)
    _logger.info(
        "Worker %d: %s device initialized: %s for worker rank %d (physical device %s)",
        place.rank, present.runtime.name.upper(), mine.device, place.rank, mine.physical_device,
    )  # fmt: skip
    _session = Session(config, settings, present)
    return Joined(present.reports, present.roll_call_seconds, present.runtime.addressable_device_count())


def set_rank_variables() -> None:
    """Sets the variables that Ray's own backend sets."""
    present = current().present
    more = {"NODE_RANK": str(present.topology.place.host_index), "ACCELERATE_TORCH_DEVICE": str(present.runtime.device)}
    os.environ.update({**present.topology.to_env(), **more})


def leave() -> None:
    global _session
    if _session is not None:
        _session.leave()
        _session = None


def _run_settings(config: TorchConfig, backend: str, info: WorkerInfo, world_size: int) -> RunSettings:
    settings: RunSettings = config.checked_settings()
    limits = {"rendezvous": config.join_timeout_s, "collective": float(config.timeout_s)}
    sections = {
        "timeouts": settings.timeouts.model_copy(update=limits),
        "launch": settings.launch.model_copy(update={"share_devices": config.share_devices}),
    }
    settings = settings.model_copy(update={"runtime": "cuda" if info.gpus else "cpu", **sections})
    if backend not in XLA_BACKENDS:
        return settings
    memory = (config.xla_memory_fraction, config.xla_memory_preallocate)
    return xla.run_settings(settings, config.xla_spmd_config, memory, info, world_size)


def _import_task(config: TorchConfig, settings: RunSettings, rank: int, host: str) -> Any:
    task = config.task or (settings.task.type if isinstance(settings, RunConfig) else None)
    if task is None:
        return None
    try:
        return import_object(task, "task")
    except (ConfigError, ImportError, SyntaxError) as error:
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        raise ConfigError(
            f"rank {rank} on {host}: the task's code cannot be imported on this worker: {kind}{error}. What a task "
            "imports must be installed on every node, or travel there: runtime_env={'working_dir': ...}, "
            "{'py_modules': [...]} or {'pip': [...]}"
        ) from None
