"""The processes of one attempt, held by torch.distributed.elastic's process contexts."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import (
    DefaultLogsSpecs,
    MultiprocessContext,
    PContext,
    SubprocessContext,
)

from lockstep.launcher.child import Outcome, run_command
from lockstep.launcher.plan import LaunchPlan

# How long the other ranks get to end by themselves once one has failed.
END_SECONDS = 5.0
# How long a process may take to leave once every rank has done its work.
_LEAVE_SECONDS = 30.0


@dataclass(frozen=True)
class Ended:
    """All ranks returned, or some ended with these exit codes before they did."""

    returned: dict[int, Outcome] = field(default_factory=dict)
    exit_codes: dict[int, int] = field(default_factory=dict)


class Ranks:
    """All processes of an attempt: polled, asked to stop, ended."""

    def __init__(self, context: PContext, poll: Callable[[], Ended | None]) -> None:
        self._context, self.poll = context, poll

    def ask_to_stop(self) -> None:
        for rank in self._context.pids():
            self._signal(rank, signal.SIGTERM)

    def ask_to_save(self) -> None:
        """Ask rank 0: the others learn of it from there, and one request leads to one save."""
        self._signal(0, signal.SIGUSR1)

    def dump_stacks(self) -> None:
        for rank in self._context.pids():
            self._signal(rank, signal.SIGUSR2)
            self._signal(rank, signal.SIGCONT)  # a process that was stopped writes nothing down

    def suspended(self, rank: int) -> bool:
        """Whether a rank was stopped by a signal, where the system says so."""
        try:
            status = Path(f"/proc/{self._context.pids()[rank]}/stat").read_text()
        except (OSError, KeyError):
            return False
        return status.rpartition(")")[2].split()[0] in "Tt"

    def _signal(self, rank: int, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._context.pids()[rank], number)

    def close(self, number: signal.Signals = signal.SIGTERM) -> None:
        self._context.close(number, timeout=int(END_SECONDS))


class _Functions(MultiprocessContext):
    """Elastic's function processes, polled by rules of our own.

    Elastic's own poll reports one failure, waits for ever for a rank that left with exit code 0 before it returned,
    and gives the survivors half a minute.
    """

    _leaving_since: float | None = None

    def ended(self) -> Ended | None:
        assert self._pc is not None
        for rank, queue in self._ret_vals.items():
            if not queue.empty():
                self._return_values[rank] = queue.get()
        codes = {rank: each.exitcode for rank, each in enumerate(self._pc.processes) if each.exitcode is not None}
        failed = {rank: code for rank, code in codes.items() if code != 0 or rank not in self._return_values}
        if failed:
            return Ended(exit_codes=self._all_failures(failed))
        if len(self._return_values) < self.nprocs:
            return None
        if self._leaving_since is None:
            self._worker_finished_event.set()
            self._leaving_since = time.monotonic()
        if len(codes) < self.nprocs and time.monotonic() - self._leaving_since < _LEAVE_SECONDS:
            return None
        return Ended(returned=dict(self._return_values))

    def _all_failures(self, first: dict[int, int]) -> dict[int, int]:
        """End the other ranks; those that fell in the same moment by themselves belong to the snapshot."""
        assert self._pc is not None
        time.sleep(0.1)
        fallen = {rank: each.exitcode for rank, each in enumerate(self._pc.processes) if each.exitcode}
        self.close(signal.SIGTERM, timeout=int(END_SECONDS))
        return {**first, **fallen}


class _Commands(SubprocessContext):
    """Elastic's command processes: new interpreters."""

    def ended(self) -> Ended | None:
        codes = {rank: each.proc.poll() for rank, each in self.subprocess_handlers.items()}
        gone = {rank: code for rank, code in codes.items() if code is not None}
        failed = {rank: code for rank, code in gone.items() if code != 0}
        if failed:
            self.close(signal.SIGTERM, timeout=int(END_SECONDS))
            return Ended(exit_codes=failed)
        return Ended(returned=dict.fromkeys(gone, Outcome())) if len(gone) == self.nprocs else None


def start_functions(
    plan: LaunchPlan, entry: Callable[..., Any] | None, argument: Any, error_files: list[Path], folder: Path
) -> Ranks:
    """A process per rank from the fork server: running the plan's command, or `entry` with an argument."""
    args = {
        rank: (process.argv if entry is None else argument, str(error_files[rank]))
        for rank, process in enumerate(plan.processes)
    }
    context = _Functions(
        name="lockstep",
        entrypoint=entry or run_command,
        args=args,
        envs={rank: dict(process.env) for rank, process in enumerate(plan.processes)},
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "elastic")),
    )
    _start(context)
    return Ranks(context, context.ended)


def start_commands(plan: LaunchPlan, folder: Path) -> Ranks:
    """A new interpreter per rank."""
    context = _Commands(
        name="lockstep",
        entrypoint=plan.processes[0].argv[0],
        args={rank: process.argv[1:] for rank, process in enumerate(plan.processes)},
        envs={rank: dict(process.env) for rank, process in enumerate(plan.processes)},
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "elastic")),
    )
    _start(context)
    return Ranks(context, context.ended)


def _start(context: PContext) -> None:
    """Start from another thread: in the main thread, elastic would replace the launcher's signal handlers."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # we say it in our own words
    with ThreadPoolExecutor(1, thread_name_prefix="lockstep-start") as elsewhere:
        try:
            elsewhere.submit(context.start).result()
        except BaseException:
            context.close(signal.SIGKILL)
            raise
