"""What happens on a worker: joining before the training function runs, the Run inside of it, leaving after it.

Ray calls join, set_rank_variables and leave in the worker's main thread, and the training function in another.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import ray.train
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from lockstep import worker
from lockstep.config.load import check_batch_size
from lockstep.config.schema import RunConfig, RunSettings
from lockstep.distributed.rollcall.report import Report
from lockstep.distributed.topology import Topology, ranks_text
from lockstep.errors import ConfigError, LaunchError
from lockstep.ray import xla
from lockstep.ray.placement import Spot, device_index
from lockstep.ray.report import Reporter
from lockstep.ray.torch_config import XLA_BACKENDS, TorchConfig, checked_settings
from lockstep.runtime.base import Runtime
from lockstep.train import trainer
from lockstep.train.requests import Preempted, Requests
from lockstep.train.run import Run
from lockstep.train.task import import_object

logger = logging.getLogger(__name__)

# How long a folder that rank 0 made may take to be seen on other nodes.
_SEEN_SECONDS = 10.0


@dataclass(frozen=True)
class Joined:
    """What a worker tells the controller once it has joined."""

    reports: list[Report]  # of everybody from rank 0, else its own
    seconds: float
    devices: int = 1


class Hears(Protocol):
    """Passes on to Ray what a run measures: every row on every rank, and the end."""

    ending: bool  # nothing but the end is still to be passed on

    def heard(self, row: Mapping[str, Any]) -> None: ...

    def last(self, more: Mapping[str, Any]) -> None: ...


class Session:
    """One worker's part in a run, from joining to leaving."""

    def __init__(self, config: TorchConfig, settings: RunSettings, present: worker.Present) -> None:
        self.config, self.settings, self.present = config, settings, present
        self.requests = Requests()  # to save and leave, to stop, to save: set by whoever hears of it on this worker
        self.outlet: worker.Outlet | None = None  # where rank 0's words go, where a driver of ours shows them
        self.make_reporter: Callable[[Run], Hears] = lambda run: Reporter(run, config.report_every_s)
        self.ended: Callable[[BaseException | None], None] = lambda error: None  # told last, how it ended here
        self.shares_folder = True  # all workers see one folder; else somebody takes care of it
        self.met = contextlib.ExitStack()
        self.outcome: dict[str, Any] = {}
        self.training = False
        self._opened = contextlib.ExitStack()
        self._run: Run | None = None
        self._reporter: Hears | None = None

    def run(self) -> Run:
        if self._run is None:
            make_folder = _folder_maker(self.config.folder)
            redirect = self.outlet is not None
            entered = worker.opened(
                self.present, self.settings, make_folder, self.requests, redirect, outlet=self.outlet
            )
            run = self._opened.enter_context(entered)
            if self.shares_folder:
                _check_shared(run)
            self._reporter = self.make_reporter(run)
            run.journal.listener = self._reporter.heard
            self._run = run
        return self._run

    def begin(self) -> None:
        """The training function starts, in a thread of its own."""
        self.training = True
        self.present.heartbeat.follow_this_thread()
        if self.present.runtime.name == "cuda":
            self.present.runtime.prepare()  # torch's current device is the thread's
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
                self._run.finish()
                self._conclude(self._run, self.outcome or _outcome(self._run))
            elif isinstance(error, Preempted):
                self._conclude(self._run, {"status": "preempted", "reason": error.reason})
                return True
            return False
        finally:
            with contextlib.suppress(BaseException):  # it goes on its way by itself
                self._opened.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
            if error is None or isinstance(error, Preempted):
                self.training = False
                self.present.group.activity.enter("the end of the other workers", waits=True)

    def _conclude(self, run: Run, outcome: dict[str, Any]) -> None:
        worker.conclude(run, outcome)
        assert self._reporter is not None
        self._reporter.last({"status": outcome["status"]})

    def leave(self) -> None:
        """Take the group apart where all is done; a training function that is still at work loses it by itself."""
        if not self.training:
            self.present.leave()
            if dist.is_initialized():  # of a world of one
                dist.destroy_process_group()
        self.met.close()


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


def run() -> Run:
    """The Run of this worker: group joined, roll called, device and folder known. All workers call it."""
    return current().run()


def fit(config: RunConfig) -> dict[str, Any]:
    """Train a config's task in the run of this worker, as `lockstep train` does; the metrics it ended with."""
    session = current()
    check_batch_size(config.train.batch_size, session.present.topology.world_size, config.train.accumulate)
    session.outcome = trainer.fit(session.run(), config)
    return dict(session.outcome["metrics"])


# What the controller has workers do


def set_meeting_place(address: str, port: int) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)


def join(topology: Topology, spot: Spot, backend: str, config: TorchConfig) -> Joined:
    """Join the group as the rank that the topology says, and hold the roll call."""
    global _session
    place = topology.place
    settings = _settings(config, backend, spot, topology.world_size)
    stack = contextlib.ExitStack()
    load_source = _source_loader(config, settings, place.rank, place.host)
    index = device_index(spot, place.local_rank) if settings.runtime == "cuda" else None

    def adapt(device: Runtime) -> None:
        if backend in XLA_BACKENDS and settings.strategy.type != "spmd" and topology.world_size > 1:
            xla.join(place.rank, topology.world_size, config.join_timeout_s)
        elif backend == "gloo":
            device.backend = "gloo"  # also between GPUs

    present = stack.enter_context(worker.met(settings, topology, load_source, index, adapt))
    if topology.world_size == 1:
        dist.init_process_group(present.runtime.backend, store=HashStore(), rank=0, world_size=1)
    mine = next(each for each in present.reports if each.rank == place.rank)
    _log().info(
        "Worker %d: %s device initialized: %s for worker rank %d (physical device %s)",
        place.rank, present.runtime.name.upper(), mine.device, place.rank, mine.physical_device,
    )  # fmt: skip
    _session = Session(config, settings, present)
    _session.met = stack
    return Joined(present.reports, present.seconds, present.runtime.addressable_device_count())


def join_limit(config: TorchConfig) -> float:
    """The longest that joining takes by its own limits: ways to join XLA, the store, the roll call, its proof."""
    return (4 + len(xla.WAYS_TO_JOIN)) * config.join_timeout_s


def set_rank_variables() -> None:
    topology = current().present.topology
    variables = topology.to_env()
    device = str(current().present.runtime.device)
    # As Ray's own backend has it.
    more = {"NODE_RANK": str(topology.place.host_index), "ACCELERATE_TORCH_DEVICE": device}
    os.environ.update({**variables, **more})


def leave() -> None:
    global _session
    if _session is not None:
        _session.leave()
        _session = None


# Inside


def _settings(config: TorchConfig, backend: str, spot: Spot, world_size: int) -> RunSettings:
    settings = checked_settings(config.settings)
    limits = {"join_timeout": config.join_timeout_s, "timeout": float(config.timeout_s)}
    launch = settings.launch.model_copy(update={**limits, "share_devices": config.share_devices})
    settings = settings.model_copy(update={"runtime": "cuda" if spot.gpus else "cpu", "launch": launch})
    if backend not in XLA_BACKENDS:
        return settings
    memory = (config.xla_memory_fraction, config.xla_memory_preallocate)
    return xla.run_settings(settings, config.xla_spmd_config, memory, spot, world_size)


def _source_loader(config: TorchConfig, settings: RunSettings, rank: int, host: str) -> Callable[[], Any]:
    task = config.task or (settings.task.type if isinstance(settings, RunConfig) else None)

    def load() -> Any:
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

    return load


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
    if run.topology.host_count == 1:
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


def _log() -> logging.Logger:
    """Ray brings what its own logger writes to the driver; ours has no handler until the run's folder is known."""
    return logging.getLogger("ray.train.lockstep")
