"""The processes of one attempt as new interpreters (`lockstep run --fresh`), by torch.distributed.elastic."""

from __future__ import annotations

import logging
import os
import signal
from contextlib import suppress
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SubprocessContext

from lockstep.launcher.entry import Outcome
from lockstep.launcher.fork_server import ForkServer
from lockstep.launcher.plan import LaunchPlan
from lockstep.launcher.ranks import END_SECONDS, Ended, Ranks


class _Commands(SubprocessContext):
    """Elastic's command processes: each has a session of its own."""

    def close(self, death_sig: signal.Signals | None = None, timeout: int = int(END_SECONDS)) -> None:
        super().close(death_sig, timeout)
        for pid in self.pids().values():  # what they left behind
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    def ended(self) -> Ended | None:
        codes = {rank: each.proc.poll() for rank, each in self.subprocess_handlers.items()}
        gone = {rank: code for rank, code in codes.items() if code is not None}
        failed = {rank: code for rank, code in gone.items() if code != 0}
        if failed:
            self.close(signal.SIGTERM)
            return Ended(exit_codes=failed)
        return Ended(returned=dict.fromkeys(gone, Outcome())) if len(gone) == self.nprocs else None


def start_commands(plan: LaunchPlan, folder: Path) -> Ranks:
    """A new interpreter per rank."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # we say it in our own words
    context = _Commands(
        name="lockstep",
        entrypoint=plan.processes[0].argv[0],
        args={rank: process.argv[1:] for rank, process in enumerate(plan.processes)},
        envs={rank: dict(process.env) for rank, process in enumerate(plan.processes)},
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "elastic")),
    )
    try:
        # From another thread: in the main thread, elastic would replace the launcher's signal handlers.
        ForkServer().start(context.start)
    except BaseException:
        context.close(signal.SIGKILL)
        raise
    return Ranks(context, context.ended)
