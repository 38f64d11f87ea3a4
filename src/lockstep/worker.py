"""One process from start to end: all wiring is here.

`python -m lockstep.worker FOLDER` trains the config of a run's folder as the rank that the environment says.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lockstep import display, runfolder, runtime
from lockstep.config.load import check_batch_size
from lockstep.config.schema import RunConfig, RunSettings
from lockstep.errors import PREEMPTED_EXIT_CODE
from lockstep.group import Group, join
from lockstep.logs import rank_log
from lockstep.metrics import write_json
from lockstep.runtime.base import Runtime
from lockstep.topology import Topology
from lockstep.train.run import Run
from lockstep.train.stop import Preempted, StopRequest
from lockstep.train.trainer import fit

logger = logging.getLogger(__name__)


def train(config: RunConfig, topology: Topology, make_folder: Callable[[], Path]) -> int:
    """Train as one rank; the exit code of an orderly end."""
    check_batch_size(config.train.batch_size, topology.world_size, config.train.accumulate)
    with joined(config, topology, make_folder, redirect=True) as run:
        try:
            outcome = fit(run, config)
        except Preempted as preempted:
            _conclude(run, {"status": "preempted", "reason": preempted.reason})
            logger.info("saved at step %d and leaving: %s", run.progress.step, preempted.reason)
            return PREEMPTED_EXIT_CODE
        run.finish()
        _conclude(run, outcome)
    return 0


def call(main: Callable[..., Any], settings: RunSettings, topology: Topology, make_folder: Callable[[], Path]) -> Any:
    """Call the user's own loop as one rank; what it returned."""
    with joined(settings, topology, make_folder, redirect=topology.world_size > 1) as run:
        try:
            returned = main(run)
        except Preempted as preempted:
            _conclude(run, {"status": "preempted", "reason": preempted.reason})
            raise
        run.finish()
        _conclude(run, {"status": "completed"})
        return returned


@contextlib.contextmanager
def joined(settings: RunSettings, topology: Topology, make_folder: Callable[[], Path], redirect: bool) -> Iterator[Run]:
    """The run of this rank: device chosen, group joined, folder agreed, log open, signals heard."""
    family, _ = runtime.resolve(settings.runtime, topology.local_world_size)
    device = runtime.create(family, topology.place.local_rank)
    device.prepare()
    stop_request = StopRequest()
    launched_by_us = os.environ.get("TORCHELASTIC_RUN_ID") == "lockstep"
    with stop_request.listening(launched_by_us):
        group = join(topology, device, settings.launch.join_timeout, settings.launch.timeout)
        folder = Path(group.agree(lambda: str(make_folder().resolve()), "the run's folder"))
        console = display.terminal() if topology.place.rank == 0 else None
        screen = display.create(console)
        with rank_log(folder / "logs", topology.place.rank, console, redirect):
            _announce(group, topology, device, folder)
            run = Run(topology, device, group, settings, folder, screen, stop_request)
            try:
                yield run
            except Exception:
                logging.getLogger().error("rank %d failed", run.rank, exc_info=True)  # to the rank's file only
                raise
            finally:
                screen.close()
            group.leave()


def _announce(group: Group, topology: Topology, device: Runtime, folder: Path) -> None:
    """Write down, and say, who takes part."""
    place = topology.place
    mine = {
        "rank": place.rank,
        "local_rank": place.local_rank,
        "host": place.host,
        "pid": os.getpid(),
        "device": str(device.device),
        "physical_device": device.identity(),
    }
    everyone = group.gather(mine, "who takes part")
    if place.rank == 0:
        write_json(folder / runfolder.TOPOLOGY_FILE, {"world_size": topology.world_size, "ranks": everyone})
    logger.info("on %s, %s, pid %d", place.host, device.device, os.getpid())


def _conclude(run: Run, outcome: dict[str, Any]) -> None:
    """summary.json, by rank 0."""
    if not run.is_main:
        return
    seconds = run.elapsed()
    summary = {
        "status": outcome["status"],
        "reason": outcome.get("reason"),
        "epoch": run.progress.epoch,
        "step": run.progress.step,
        "world_size": run.world_size,
        "runtime": run.runtime.name,
        "strategy": run.strategy,
        "metrics": outcome.get("metrics", {}),
        "best": outcome.get("best"),
        "seconds": round(seconds, 3),
        "samples_per_second": round(run.progress.examples / seconds, 1) if seconds > 0 else None,
    }
    write_json(run.folder / runfolder.SUMMARY_FILE, summary)


def main(folder: str) -> int:
    path = Path(folder)
    return train(runfolder.read_config(path), Topology.from_env(os.environ), lambda: path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
