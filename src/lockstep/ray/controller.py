"""`launch: ray`: the driver of a run on a cluster. It finds capacity, shows what the ranks say, tells how it ended."""

from __future__ import annotations

import contextlib
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.train import FailureConfig, UserCallback
from ray.train import Result as TrainResult
from ray.train import RunConfig as TrainRunConfig
from ray.train.torch import TorchTrainer
from ray.train.v2.api.exceptions import WorkerGroupError  # since 2.51 also where Ray documents it
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lockstep import runtime
from lockstep.config.load import check_profile_ranks, check_strategy
from lockstep.config.schema import RunConfig
from lockstep.distributed.failure import Failure, Result, worth_retrying
from lockstep.distributed.signals import Signals
from lockstep.errors import INTERRUPTED_EXIT_CODE, PREEMPTED_EXIT_CODE, ClusterLost
from lockstep.mirror.url import is_url
from lockstep.ray import capacity, code
from lockstep.ray.address import address_of
from lockstep.ray.attempts import Attempts, no_capacity
from lockstep.ray.background_fit import BackgroundFit, ReportedFailures
from lockstep.ray.cluster import Cluster, connected
from lockstep.ray.mailbox import ANSWER_SECONDS, Mailbox
from lockstep.ray.screen import Screen, say
from lockstep.ray.torch_config import TorchConfig
from lockstep.ray.worker import Order, main
from lockstep.record import folder_lock
from lockstep.record import timeline as chronicles
from lockstep.record.timeline import DRIVER_TIMELINE_FILE, Timeline

# How often the driver looks for signals; events come at once.
_LOOK_SECONDS = 0.5
# How long to wait for the reports of a failure that Ray Train has already concluded from.
_LAST_WORD_SECONDS = 5.0


@dataclass(frozen=True)
class Ended:
    """A run on a cluster that is over: what it was in the end, and what Ray Train has of it."""

    config: RunConfig  # resolved
    folder: Path
    result: Result
    train_result: TrainResult | None  # Ray's, with the last metrics and the checkpoint; None where there is none


def launch(config: RunConfig, make_folder: Callable[[RunConfig], Path], held: bool = False) -> Ended:
    """Train a config on a cluster. The folder is made once it is known that the cluster has the capacity.

    `held` says that the caller holds it already.
    """
    signals = Signals(save_on_request=True)
    config, env, task = resolved(config)
    # Ray puts handlers of its own in place of ours when it connects.
    with signals.listening(), connected(config, capacity.per_worker(config), env) as cluster, signals.listening():
        return train_on(cluster, config, task, make_folder, signals, held=held)


def resolved(config: RunConfig) -> tuple[RunConfig, dict[str, Any], str]:
    """The config as far as it can be known before connecting, Ray's runtime_env for it, and the task's name there."""
    if ray.is_initialized():  # and what travels was settled then
        return _checked(config), {}, config.task.type
    if address_of(config.launch.ray) is not None:
        return _checked(config), *code.runtime_env(config)
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
    """Train on a cluster that this process is connected to."""
    resources = capacity.per_worker(config)
    if config.processes == "auto":
        most = max(capacity.capacity(ray.nodes(), resources), 1)
        config = _checked(config.model_copy(update={"processes": most}))
    workers = capacity.find(config, _sizes(config), resources)
    folder = make_folder(config)
    with contextlib.nullcontext() if held else folder_lock.locked(folder):
        controller = _Controller(config, folder, cluster, task, resources, signals, callbacks)
        result = controller.run(workers)
    return Ended(config, folder, result, controller.train_result)


def described(config: RunConfig) -> str:
    """What would be asked of Ray, for people."""
    settings = config.launch.ray
    address = address_of(settings)
    amounts = ", ".join(f"{name} {amount:g}" for name, amount in capacity.per_worker(config).items())
    lines = [
        f"ray: {address}" if address else "ray: a cluster of our own on this machine, on loopback, for this run",
        f"workers: {config.processes}, {settings.placement}, each with {amounts}",
        f"restarts: {config.launch.max_restarts}",
    ]
    if address:
        lines.append(f"travels: {code.described(code.runtime_env(config)[0]) or 'nothing, the task is a module'}")
    return "\n".join(lines)


def _checked(config: RunConfig) -> RunConfig:
    if config.processes != "auto":
        check_strategy(config.strategy, config.runtime, config.processes)
        check_profile_ranks(config.profile, config.processes)
    return config


def _sizes(config: RunConfig) -> list[int]:
    return capacity.sizes(int(config.processes), config.launch.ray.min_workers)


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
        self._callbacks = callbacks
        self._config, self._folder, self._cluster, self._task = config, folder.resolve(), cluster, task
        self._resources, self._signals = resources, signals
        self._attempts, self._screen = Attempts(), Screen()
        self._deadline = float("inf")
        self._asked = 0
        self._given_up: Failure | None = None
        self._workers = 0
        self._timeline: Timeline
        self._capacity_checked_after = 0
        self.train_result: TrainResult | None = None
        # On the driver's own node: it lives and dies with it.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._mailbox = ray.remote(Mailbox).options(num_cpus=0, scheduling_strategy=here).remote(str(self._folder))

    def run(self, workers: int) -> Result:
        noting = chronicles.opened(self._folder, say, DRIVER_TIMELINE_FILE)
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
                # Ray has waited long enough for the capacity that was there before.
                workers = capacity.find(self._config, _sizes(self._config), self._resources, limit=1.0)

    def _trainer(self, workers: int, mark: str) -> TorchTrainer:
        settings, limits = self._config.launch.ray, self._config.launch
        restarts = max(limits.max_restarts - self._attempts.count, 0)
        # Our own retention removes checkpoints, so what Ray remembers of those of an earlier start may be gone.
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
                backend=self._backend(),
            ),
            scaling_config=capacity.scaling(
                workers, self._resources, settings.placement, settings.topology, settings.accelerator
            ),
            run_config=TrainRunConfig(
                storage_path=str(self._folder),
                name="checkpoints",
                failure_config=FailureConfig(max_failures=restarts, controller_failure_limit=0),
                callbacks=[ReportedFailures(self._mailbox), *self._callbacks],
            ),
        )

    def _backend(self) -> str:
        return {"cuda": "nccl", "xla": "xla", "cpu": "gloo"}.get(self._config.runtime, "auto")

    def _supervise(self, fit: BackgroundFit) -> Result | None:
        """Follow an attempt and the restarts that Ray makes of it; None where another size is worth a try."""
        while not fit.done:
            self._hear(_LOOK_SECONDS)
            ended = self._obey()
            if ended is not None:
                return ended
        deadline = time.monotonic() + _LAST_WORD_SECONDS
        while True:
            self._hear(_LOOK_SECONDS)
            if not isinstance(fit.error, WorkerGroupError) or self._given_up or time.monotonic() > deadline:
                return self._concluded(fit)

    def _hear(self, wait: float) -> None:
        """Show what came in, and note it."""
        try:
            events = ray.get(self._mailbox.take.remote(wait), timeout=ANSWER_SECONDS)
        except (RayError, ConnectionError) as error:
            raise ClusterLost(
                f"the Ray cluster at {self._cluster.address} does not answer any more: {type(error).__name__}. The run "
                f"can be gone on with from its newest checkpoint: lockstep resume {self._folder}"
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
            ray.get(self._mailbox.close.remote(), timeout=ANSWER_SECONDS)
            return
        self._timeline.failed("restart", failure, self._workers, attempt=count)
        say(failure.render(self._workers))
        say(f"restarting from the newest checkpoint (restart {count} of {limit})")

    def _obey(self) -> Result | None:
        """Do what the user asked for by signals; the end of the run where that is now."""
        signals = self._signals
        if signals.save:
            signals.save = False
            ray.get(self._mailbox.ask_to_save.remote(), timeout=ANSWER_SECONDS)
        if signals.count > self._asked:
            self._asked, self._deadline = signals.count, time.monotonic() + self._config.timeouts.stop
            if self._asked > 1:
                return Result(INTERRUPTED_EXIT_CODE)
            if not self._attempts.began:
                return Result(PREEMPTED_EXIT_CODE)  # before it had begun: there is nothing to save
            self._timeline.note("preempt", note=signals.name)
            say(f"{signals.name}: finishing the step, saving and leaving; {signals.how_to_end} to end at once")
            ray.get(self._mailbox.ask_to_leave.remote(signals.name), timeout=ANSWER_SECONDS)
        if time.monotonic() > self._deadline:
            grace = self._config.timeouts.stop
            cause = f"was asked to stop and did not within {grace:g} s (timeouts.stop), so it was ended"
            return Result(5, failure=Failure(0, socket.gethostname(), cause, 5))
        return None

    def _concluded(self, fit: BackgroundFit) -> Result | None:
        """The end of the run, or None where it goes on with another attempt of our own, of the size that fits."""
        if self._given_up is None and fit.error is None:
            return Result(max(self._attempts.exit_codes.values(), default=0))
        if self._given_up is None and self._asked and not self._attempts.began:
            return Result(PREEMPTED_EXIT_CODE)
        if self._given_up is None and no_capacity(fit.error) and self._attempts.count > self._capacity_checked_after:
            self._capacity_checked_after = self._attempts.count  # once after every failure
            return None
        if self._given_up is None and isinstance(fit.error, WorkerGroupError):
            errors = {rank: str(each) for rank, each in fit.error.worker_failures.items()}
            self._failed(self._attempts.conclude(errors))
        elif self._given_up is None:
            assert fit.error is not None
            self._failed(self._attempts.conclude_before_training(fit.error))
        failure = self._given_up
        return Result(failure.exit_code, failure=failure) if failure is not None else None


@contextlib.contextmanager
def _marked(folder: Path) -> Any:
    """A file by which workers know that the folder they see is this one."""
    mark = folder / f".driver-{uuid.uuid4().hex}"
    mark.touch()
    try:
        yield mark.name
    finally:
        mark.unlink(missing_ok=True)
