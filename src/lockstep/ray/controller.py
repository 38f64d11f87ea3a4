"""`launch: ray`: the driver of a run on a cluster. It finds room, shows rank 0's output, and says how the run ended.

Ray Train places, checks and restarts the workers (FailureConfig), and its storage is the run's folder. The driver adds
what Ray does not do: it stops after failures that would only happen again, uses fewer workers if there is no room for
all, passes requests to save or to stop on to the ranks, and shows their progress.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import ray
from ray.exceptions import RayError
from ray.train import FailureConfig, UserCallback
from ray.train import Result as TrainResult
from ray.train import RunConfig as TrainRunConfig
from ray.train.torch import TorchTrainer
from ray.train.v2.api.exceptions import WorkerGroupError  # since 2.51 also where Ray documents it
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lockstep import run_files, runtime
from lockstep.config.load import check_profile_ranks, check_strategy
from lockstep.config.schema import RunConfig
from lockstep.distributed.failure import Failure, Result, worth_retrying
from lockstep.distributed.signals import Signals
from lockstep.errors import INTERRUPTED_EXIT_CODE, PREEMPTED_EXIT_CODE, ClusterLost
from lockstep.mirror.url import is_url
from lockstep.ray import placement
from lockstep.ray.backend import TorchConfig
from lockstep.ray.cluster import Cluster, connected, described_env, runtime_env
from lockstep.ray.failures import Attempts, no_capacity
from lockstep.ray.installed import address_of
from lockstep.ray.mailbox import ANSWER_SECONDS, Event, Mailbox
from lockstep.ray.worker import Order, main
from lockstep.record import display, folder_lock, timeline
from lockstep.record.logs import screen_handler
from lockstep.shown import shown

# How often the driver looks for signals; events come at once.
_LOOK_SECONDS = 0.5
# How long to wait for the reports of a failure that Ray Train has already concluded from.
_LAST_REPORT_SECONDS = 5.0
_BACKENDS = {"cuda": "nccl", "xla": "xla", "cpu": "gloo"}


@dataclass(frozen=True)
class Ended:
    """How a run on a cluster ended."""

    config: RunConfig  # resolved
    folder: Path
    result: Result
    train_result: TrainResult | None  # Ray's, with the last metrics and the checkpoint, if there is one


def launch(config: RunConfig, make_folder: Callable[[RunConfig], Path], held: bool = False) -> Ended:
    """Trains a config on a cluster. The folder is made once the cluster is known to have room.

    `held` says that the caller holds it already.
    """
    signals = Signals(save_on_request=True)
    config, env, task = resolved(config)
    workers = int(config.processes) if config.processes != "auto" else 0
    connecting = connected(config.launch.ray, workers, placement.per_worker(config), env)
    # Ray replaces the handlers when it connects.
    with signals.listening(), connecting as cluster, signals.listening():
        return train_on(cluster, config, task, make_folder, signals, held=held)


def resolved(config: RunConfig) -> tuple[RunConfig, dict[str, Any], str]:
    """Returns the config as known before connecting, Ray's runtime_env for it, and the task's name there."""
    if ray.is_initialized():  # what travels was settled then
        return _checked(config), {}, config.task.type
    if address_of(config.launch.ray) is not None:
        return _checked(config), *runtime_env(config)
    # The workers will be on this machine, where the task is.
    family, workers = runtime.resolve(config)
    config = _checked(config.model_copy(update={"runtime": family, "processes": workers}))
    return config, dict(config.launch.ray.runtime_env), config.task.type


def train_on(
    cluster: Cluster,
    config: RunConfig,
    task: str,
    make_folder: Callable[[RunConfig], Path],
    signals: Signals,
    callbacks: Sequence[UserCallback] = (),
    held: bool = False,
) -> Ended:
    """Trains on a cluster that this process is connected to."""
    resources = placement.per_worker(config)
    if config.processes == "auto":
        most = max(placement.capacity(ray.nodes(), resources), 1)
        config = _checked(config.model_copy(update={"processes": most}))
    workers = _find_room(config, resources, config.launch.ray.placement_timeout)
    folder = make_folder(config)
    with contextlib.nullcontext() if held else folder_lock.locked(folder):
        controller = _Controller(config, folder, cluster, task, resources, signals, callbacks)
        result = controller.run(workers)
    return Ended(config, folder, result, controller.train_result)


def described(config: RunConfig) -> str:
    """Says what would be asked of Ray."""
    settings = config.launch.ray
    address, resources = address_of(settings), placement.per_worker(config)
    lines = [
        f"ray: {address}" if address else "ray: a new cluster on this machine, on loopback, for this run",
        f"workers: {config.processes}, {settings.placement}, each with {placement.amounts(resources)}",
        f"restarts: {config.launch.max_restarts}",
    ]
    if address:
        lines.append(f"travels: {described_env(runtime_env(config)[0]) or 'nothing, the task is a module'}")
    return "\n".join(lines)


def _checked(config: RunConfig) -> RunConfig:
    if config.processes != "auto":
        check_strategy(config.strategy, config.runtime, config.processes)
        check_profile_ranks(config.profile, config.processes)
    return config


def _find_room(config: RunConfig, resources: dict[str, float], limit: float) -> int:
    settings = config.launch.ray
    return placement.find(settings, placement.sizes(int(config.processes), settings.min_workers), resources, limit)


class BackgroundFit:
    """Runs `fit()` of a Trainer or Tuner in a daemon thread: the main thread handles signals and events."""

    def __init__(self, trainer: Any) -> None:
        self.result: Any = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(trainer,), name="lockstep-ray-train", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def _run(self, trainer: Any) -> None:
        try:
            self.result = trainer.fit()
        except Exception as error:
            self.error = error


class _ReportedFailures(UserCallback):  # type: ignore[misc]
    """Runs in Ray Train's controller, and passes on which workers it saw fail."""

    def __init__(self, mailbox: Any) -> None:
        self._mailbox = mailbox

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        errors = {rank: f"{type(error).__name__}: {error}" for rank, error in worker_exceptions.items()}
        self._mailbox.tell.remote([{"kind": "died", "errors": errors}])


class _Controller:
    """One run, from its first attempt to its last."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        cluster: Cluster,
        task: str,
        resources: dict[str, float],
        signals: Signals,
        callbacks: Sequence[UserCallback],
    ) -> None:
        self._config, self._folder, self._cluster, self._task = config, folder.resolve(), cluster, task
        self._resources, self._signals, self._callbacks = resources, signals, callbacks
        self._attempts, self._screen = Attempts(), _Screen()
        self._deadline = float("inf")
        self._asked = self._saves = 0  # signals that were passed on
        self._given_up: Failure | None = None
        self._workers = 0
        self._timeline: timeline.Timeline
        self._room_checked_after = 0  # attempts
        self.train_result: TrainResult | None = None
        # On the driver's node, so that it ends with it.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._mailbox = ray.remote(Mailbox).options(num_cpus=0, scheduling_strategy=here).remote(str(self._folder))

    def run(self, workers: int) -> Result:
        noting = timeline.opened(self._folder, say, timeline.DRIVER_TIMELINE_FILE)
        with self._screen.open(self._folder), _marked(self._folder) as mark, noting as self._timeline:
            self._timeline.note("start", world_size=workers)
            while True:
                self._workers = workers
                fit = BackgroundFit(self._trainer(workers, mark))
                result = self._supervise(fit)
                self.train_result = fit.result
                if result is not None:
                    self._timeline.ended(result, workers)
                    return result
                # Ray has waited long enough for the room that was there before.
                workers = _find_room(self._config, self._resources, limit=1.0)

    def _trainer(self, workers: int, mark: str) -> TorchTrainer:
        settings, limits = self._config.launch.ray, self._config.launch
        restarts = max(limits.max_restarts - self._attempts.count, 0)
        # Retention removes checkpoints, so what Ray remembers of those of an earlier start may be gone.
        (self._folder / "checkpoints" / "checkpoint_manager_snapshot.json").unlink(missing_ok=True)
        order = Order(
            folder=str(self._folder),
            mark=mark,
            mailbox=self._mailbox,
            threads=limits.threads or max(1, int(self._resources.get("CPU", 1))),
            here=str(Path.cwd()) if self._cluster.ours else None,
            storage=None if is_url(settings.storage or "") else settings.storage,
        )
        task = self._config.task.model_copy(update={"type": self._task})
        return TorchTrainer(
            main,
            train_loop_config={"order": order},
            torch_config=TorchConfig(
                settings=self._config.model_copy(update={"processes": workers, "task": task}),
                folder=str(self._folder),
                timeout_s=self._config.timeouts.collective,
                join_timeout_s=self._config.timeouts.rendezvous,
                share_devices=limits.share_devices,
                backend=_BACKENDS.get(self._config.runtime, "auto"),
            ),
            scaling_config=placement.scaling(
                workers, self._resources, settings.placement, settings.topology, settings.accelerator
            ),
            run_config=TrainRunConfig(
                storage_path=str(self._folder),
                name="checkpoints",
                failure_config=FailureConfig(max_failures=restarts, controller_failure_limit=0),
                callbacks=[_ReportedFailures(self._mailbox), *self._callbacks],
            ),
        )

    def _supervise(self, fit: BackgroundFit) -> Result | None:
        """Follows an attempt and the restarts that Ray makes of it; None if another number of workers may fit."""
        while not fit.done:
            self._show_events(_LOOK_SECONDS)
            ended = self._obey_signals()
            if ended is not None:
                return ended
        deadline = time.monotonic() + _LAST_REPORT_SECONDS
        while True:
            self._show_events(_LOOK_SECONDS)
            if not isinstance(fit.error, WorkerGroupError) or self._given_up or time.monotonic() > deadline:
                return self._concluded(fit.error)

    def _show_events(self, wait: float) -> None:
        try:
            events = ray.get(self._mailbox.take.remote(wait), timeout=ANSWER_SECONDS)
        except (RayError, ConnectionError) as error:
            raise ClusterLost(
                f"the Ray cluster at {self._cluster.address} does not answer any more: {type(error).__name__}. "
                f"Resume the run from its newest checkpoint: lockstep resume {self._folder}"
            ) from None
        for event in events:
            if event["kind"] == "died":
                self._failed(self._attempts.conclude(event["errors"]))
            else:
                self._attempts.note(event)
                self._screen.show(event)

    def _failed(self, failure: Failure) -> None:
        count, limit = self._attempts.count, self._config.launch.max_restarts
        if self._asked or count > limit or not worth_retrying(failure):
            self._given_up = failure
            self._request(closed=True)
            return
        self._timeline.failed("restart", failure, self._workers, attempt=count)
        say(failure.render(self._workers))
        say(f"restarting from the newest checkpoint (restart {count} of {limit})")

    def _obey_signals(self) -> Result | None:
        """Passes the user's signals on to the ranks; returns a Result if the run ends by that."""
        signals = self._signals
        if signals.save:
            signals.save = False
            self._saves += 1
            self._request(saves=self._saves)
        if signals.count > self._asked:
            self._asked, self._deadline = signals.count, time.monotonic() + self._config.timeouts.stop
            if self._asked > 1:
                return Result(INTERRUPTED_EXIT_CODE)
            if not self._attempts.began:
                return Result(PREEMPTED_EXIT_CODE)  # there is nothing to save
            self._timeline.note("preempt", note=signals.name)
            say(f"{signals.name}: finishing the step, saving and leaving; {signals.how_to_end} to end at once")
            self._request(leave=signals.name)
        if time.monotonic() > self._deadline:
            grace = self._config.timeouts.stop
            cause = f"was asked to stop and did not within {grace:g} s (timeouts.stop), so it was ended"
            return Result(5, failure=Failure(0, socket.gethostname(), cause, 5))
        return None

    def _request(self, **changes: Any) -> None:
        ray.get(self._mailbox.request.remote(**changes), timeout=ANSWER_SECONDS)

    def _concluded(self, error: Exception | None) -> Result | None:
        """Returns how the run ended, or None if another attempt is to be made with the workers that fit."""
        if self._given_up is None:
            if error is None:
                return Result(max(self._attempts.exit_codes.values(), default=0))
            if self._asked and not self._attempts.began:
                return Result(PREEMPTED_EXIT_CODE)
            if no_capacity(error) and self._attempts.count > self._room_checked_after:
                self._room_checked_after = self._attempts.count  # once after every failure
                return None
            if isinstance(error, WorkerGroupError):
                errors = {rank: str(each) for rank, each in error.worker_failures.items()}
                self._failed(self._attempts.conclude(errors))
            else:
                self._failed(self._attempts.conclude_before_training(error))
        failure = self._given_up
        return Result(failure.exit_code, failure=failure) if failure is not None else None


class _Screen:
    """Shows rank 0's lines and progress on this process's terminal; what Ray prints goes to logs/ray.log."""

    def __init__(self) -> None:
        self._console = display.terminal()
        self._display = display.create(self._console)

    @contextlib.contextmanager
    def open(self, folder: Path) -> Iterator[None]:
        ours, handler = logging.getLogger("lockstep"), screen_handler(self._console)
        before = (ours.level, ours.propagate)
        ours.setLevel(logging.INFO)
        ours.propagate = False
        ours.addHandler(handler)
        log = os.fdopen(run_files.append(folder / "logs" / "ray.log", depth=2), "a", encoding="utf-8", buffering=1)
        out: Any = _WithoutRay(sys.stdout, log)
        try:
            with contextlib.redirect_stdout(out):
                yield
        finally:
            self._display.close()
            log.close()
            ours.level, ours.propagate = before
            ours.removeHandler(handler)

    def show(self, event: Event) -> None:
        if event["kind"] == "line":
            if self._console is None:
                print(event["text"], flush=True)
            else:
                self._console.print(event["text"], markup=False, soft_wrap=True)
        elif event["kind"] == "begin":
            self._display.close()  # of the attempt before
            self._display = display.create(self._console)
            self._display.begin(event["step"], event["epoch"], event["total_steps"])
        elif event["kind"] == "row":
            self._display.row(event["row"], event["lags"])


class _WithoutRay:
    """Standard output, without what Ray's threads print, which goes to a log."""

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        return (self._log if threading.current_thread().name.startswith("ray_") else self._stream).write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def say(text: str) -> None:
    for line in shown(text).split("\n"):
        print(f"lockstep: {line}" if line else "", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _marked(folder: Path) -> Iterator[str]:
    """Creates a file by which workers know that the folder they see is this one."""
    mark = folder / f".driver-{uuid.uuid4().hex}"
    mark.touch()
    try:
        yield mark.name
    finally:
        mark.unlink(missing_ok=True)
