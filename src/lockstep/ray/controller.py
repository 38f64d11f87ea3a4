"""`launch: ray`: the driver of a run on a cluster. It finds room, shows rank 0's output, and says how the run ended.

Ray Train places the workers and ends all of them when one fails. Restarts are made here, and not by its FailureConfig:
Ray would retry an invalid config and a loss that is not finite as well, and only with the same number of workers.
"""

from __future__ import annotations

import contextlib
import itertools
import shlex
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.train import FailureConfig, UserCallback
from ray.train import RunConfig as TrainRunConfig
from ray.train.torch import TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lockstep import runtime
from lockstep.config.load import check_profile_ranks, check_strategy
from lockstep.config.schema import RunConfig
from lockstep.distributed.failure import Failure, Result, worth_retrying
from lockstep.distributed.signals import Signals
from lockstep.errors import INTERRUPTED_EXIT_CODE, ClusterLost, ConfigError
from lockstep.mirror.url import Url
from lockstep.ray import placement
from lockstep.ray.backend import TorchConfig
from lockstep.ray.cluster import Cluster, connected, described_env, runtime_env
from lockstep.ray.failures import find_failure
from lockstep.ray.installed import address_of
from lockstep.ray.worker import ANSWER_SECONDS, Mailbox, Order, main
from lockstep.record import timeline
from lockstep.shown import shown

# How often the driver looks for signals and output.
_LOOK_SECONDS = 0.5
Ended = tuple[RunConfig, "Folder", Result]
MakeFolder = Callable[[RunConfig], "Folder"]

_BACKENDS = {"cuda": "nccl", "xla": "xla", "cpu": "gloo"}


def launch(config: RunConfig, make_folder: MakeFolder) -> Ended:
    """Trains a config on a cluster. Returns it as it was resolved, the run's folder, and how the run ended.

    The folder is made once the cluster is known to have room.
    """
    signals = Signals(save_on_request=False)
    config, env, task = resolved(config)
    connecting = connected(config.launch.ray, int(config.processes), placement.per_worker(config), env)
    # Ray replaces the handlers when it connects.
    with signals.listening(), connecting as cluster, signals.listening():
        return train_on(cluster, config, task, make_folder, signals)


def resolved(config: RunConfig) -> tuple[RunConfig, dict[str, Any], str]:
    """Returns the config as known before connecting, Ray's runtime_env for it, and the task's name there."""
    env, task = dict(config.launch.ray.runtime_env), config.task.type
    if ray.is_initialized():  # what travels was settled then
        env = {}
    elif address_of(config.launch.ray) is not None:
        env, task = runtime_env(config)
    else:  # the workers will be on this machine, where the task is
        family, workers = runtime.resolve(config)
        config = config.model_copy(update={"runtime": family, "processes": workers})
    if config.processes == "auto":
        raise ConfigError("processes: auto cannot be found out for a Ray cluster: set how many workers to start")
    check_strategy(config.strategy, config.runtime, config.processes)
    check_profile_ranks(config.profile, config.processes)
    return config, env, task


def train_on(
    cluster: Cluster,
    config: RunConfig,
    task: str,
    make_folder: MakeFolder,
    signals: Signals,
    callbacks: Sequence[UserCallback] = (),
) -> Ended:
    """Trains on a cluster that this process is connected to. `callbacks` are those of a sweep."""
    workers = placement.find(config.launch.ray, int(config.processes), placement.per_worker(config))
    folder = make_folder(config)
    result = _Driver(config, folder, cluster, task, signals, callbacks).run(workers)
    return config, folder, result


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


class BackgroundFit:
    """Runs `fit()` of a Trainer or Tuner in a daemon thread: the main thread handles signals and output."""

    def __init__(self, trainer: Any) -> None:
        self.result: Any = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(trainer,), name="lockstep-ray-train", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Returns whether it is done."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self, trainer: Any) -> None:
        try:
            self.result = trainer.fit()
        except Exception as error:
            self.error = error


@dataclass(frozen=True)
class Folder:
    """The folder of a run, which the caller holds; or the driver's own, if rank 0 keeps the run's in a bucket."""

    path: Path
    url: Url | None = None


class _Driver:
    """One run, from its first attempt to its last."""

    def __init__(
        self,
        config: RunConfig,
        folder: Folder,
        cluster: Cluster,
        task: str,
        signals: Signals,
        callbacks: Sequence[UserCallback],
    ) -> None:
        self._config, self._folder, self._url = config, folder.path.resolve(), folder.url
        self._cluster, self._task = cluster, task
        self._resources, self._signals, self._callbacks = placement.per_worker(config), signals, callbacks
        self._deadline = float("inf")
        self._asked = 0  # signals that were passed on
        self._began = False  # a rank of the current attempt has
        # On the driver's node, so that it ends with it.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._mailbox = ray.remote(Mailbox).options(num_cpus=0, scheduling_strategy=here).remote()

    def run(self, workers: int) -> Result:
        limit = self._config.launch.max_restarts
        with _marked(self._folder) as mark, timeline.opened(self._folder, say, timeline.DRIVER_TIMELINE_FILE) as noted:
            noted.note("start", world_size=workers)
            for attempt in itertools.count(1):
                result = self._attempt(workers, mark, noted)
                failure = result.failure
                if failure is None or self._asked or attempt > limit or not worth_retrying(failure):
                    break
                noted.failed("restart", failure, workers, attempt=attempt)
                say(failure.render(workers))
                say(f"restarting from the newest checkpoint (restart {attempt} of {limit})")
                workers = placement.find(self._config.launch.ray, int(self._config.processes), self._resources)
            noted.ended(result, workers)
        return result

    def _attempt(self, workers: int, mark: str, noted: timeline.Timeline) -> Result:
        fit = BackgroundFit(self._trainer(workers, mark))
        self._began = False
        while not fit.wait(_LOOK_SECONDS):
            self._show_output()
            ended = self._obey_signals(noted)
            if ended is not None:
                return ended
        self._show_output()
        facts = self._ask("take_facts")
        if fit.error is None:
            return Result(max((each.get("exit_code", 0) for each in facts.values()), default=0))
        if self._asked and not self._began:
            return Result(INTERRUPTED_EXIT_CODE, nothing_to_save=True)
        failure = find_failure(fit.error, facts)
        return Result(failure.exit_code, failure=failure)

    def _trainer(self, workers: int, mark: str) -> TorchTrainer:
        config, limits = self._config, self._config.launch
        order = Order(
            folder=str(self._folder),
            mark=mark,
            url=str(self._url) if self._url is not None else None,
            mailbox=self._mailbox,
            threads=limits.threads or max(1, int(self._resources.get("CPU", 1))),
            here=str(Path.cwd()) if self._cluster.ours else None,
            of_sweep=bool(self._callbacks),
        )
        task = config.task.model_copy(update={"type": self._task})
        return TorchTrainer(
            main,
            train_loop_config={"order": order},
            torch_config=TorchConfig(
                settings=config.model_copy(update={"processes": workers, "task": task}),
                folder=str(self._folder),
                timeout_s=config.timeouts.collective,
                join_timeout_s=config.timeouts.rendezvous,
                share_devices=limits.share_devices,
                backend=_BACKENDS.get(config.runtime, "auto"),
            ),
            scaling_config=placement.scaling(limits.ray, workers, self._resources),
            run_config=TrainRunConfig(
                storage_path=str(self._folder),
                name="checkpoints",
                failure_config=FailureConfig(max_failures=0, controller_failure_limit=0),
                callbacks=list(self._callbacks),
            ),
        )

    def _show_output(self) -> None:
        lines, began = self._ask("take_lines")
        self._began = self._began or began
        for line in lines:
            print(line, flush=True)

    def _obey_signals(self, noted: timeline.Timeline) -> Result | None:
        """Passes the user's signals on to the ranks; returns a Result if the run ends by that."""
        signals, grace = self._signals, self._config.timeouts.stop
        if signals.count > self._asked:
            self._asked, self._deadline = signals.count, time.monotonic() + grace
            if self._asked > 1:
                return Result(INTERRUPTED_EXIT_CODE)
            if not self._began:
                return Result(INTERRUPTED_EXIT_CODE, nothing_to_save=True)
            noted.note("preempt", note=signals.name)
            say(f"{signals.name}: finishing the step, saving and leaving; {signals.how_to_end} to end at once")
            self._ask("ask_to_leave", signals.name)
        if time.monotonic() > self._deadline:
            cause = f"was asked to stop and did not within {grace:g} s (timeouts.stop), so it was ended"
            return Result(5, failure=Failure(0, socket.gethostname(), cause, 5))
        return None

    def _ask(self, what: str, *arguments: Any) -> Any:
        """Calls a method of the mailbox."""
        try:
            return ray.get(getattr(self._mailbox, what).remote(*arguments), timeout=ANSWER_SECONDS)
        except (RayError, ConnectionError) as error:
            raise ClusterLost(
                f"the Ray cluster at {self._cluster.address} does not answer any more: {type(error).__name__}. "
                "Resume the run from its newest checkpoint: "
                f"lockstep resume {shlex.quote(str(self._url or self._folder))}"
            ) from None


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
