"""The processes of one attempt: polled, asked to stop, ended. Imports no torch, which the launcher has no use for."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SubprocessContext

from lockstep.distributed.signals import QUIET_SIGNALS, end_below, state_of
from lockstep.launchers.local.entry import Outcome, run_command, run_rank
from lockstep.launchers.local.exit import LEAVE_SECONDS, leaving_file
from lockstep.launchers.local.fork_server import ForkServer
from lockstep.launchers.plan import LaunchPlan

# How long the other ranks get to fall by themselves once one has failed, and to end once they are asked to.
_FALL_SECONDS = 0.5
END_SECONDS = 5.0
# What multiprocessing takes for the exit code of a process whose fork server does not tell it any more.
_OF_NO_SERVER = 255
# A rank ends itself where it takes too long to leave; this is for one that cannot.
_GONE_SECONDS = LEAVE_SECONDS + 10.0
# How long ranks get to save that nobody could report the end of.
_SAVE_SECONDS = 60.0


@dataclass(frozen=True)
class Ended:
    """All ranks returned, or some ended with these exit codes before they did."""

    returned: dict[int, Outcome] = field(default_factory=dict)
    exit_codes: dict[int, int] = field(default_factory=dict)
    without_server: str | None = None  # the fork server went away: nobody can tell how its ranks ended


class Processes(Protocol):
    """Those of an attempt, however they were made."""

    def pids(self) -> dict[int, int]: ...

    def close(self, number: signal.Signals) -> None: ...


class Ranks:
    """All processes of an attempt: polled, asked to stop, ended."""

    def __init__(
        self, context: Processes, poll: Callable[[], Ended | None], done: Callable[[], Ended | None] = lambda: None
    ) -> None:
        self._context, self.poll = context, poll
        self.done = done  # what all ranks returned, also while some of them are still leaving

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
        pid = self._context.pids().get(rank)
        return pid is not None and state_of(pid) in ("T", "t")

    def _signal(self, rank: int, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._context.pids()[rank], number)

    def close(self, number: signal.Signals = signal.SIGTERM) -> None:
        self._context.close(number)


class _Functions:
    """A process per rank, from multiprocessing's fork server.

    Each says what it came to before it leaves, and waits for the others to have done so. Torch's own process contexts
    would let a rank go without what Python does at the end of a process, report one failure alone, and wait for ever
    for a rank that left with exit code 0 before it returned; and the launcher would have to import torch for them.
    """

    def __init__(
        self, entry: Callable[..., Any], arguments: list[Any], envs: list[dict[str, str]], error_files: list[Path]
    ) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._entry, self._arguments, self._envs, self._error_files = entry, arguments, envs, error_files
        self._outcomes = [self._context.SimpleQueue() for _ in envs]
        self._all_returned = self._context.Event()
        self._processes: list[ForkServerProcess] = []
        self._return_values: dict[int, Outcome] = {}
        self._returned_at = math.inf
        self._server = ForkServer()

    def start(self) -> None:
        self._server.start(self._make_processes)

    def _make_processes(self) -> None:
        files = [str(each) for each in self._error_files]
        ignored = [int(each) for each in QUIET_SIGNALS if signal.getsignal(each) is signal.SIG_IGN]
        for rank in range(len(self._envs)):
            given = (rank, self._entry, self._arguments, self._envs, files, self._outcomes, self._all_returned, ignored)
            process = self._context.Process(target=run_rank, args=given, name=f"rank-{rank}")
            process.start()
            self._processes.append(process)

    def pids(self) -> dict[int, int]:
        return {rank: each.pid for rank, each in enumerate(self._processes) if each.pid is not None}

    def done(self) -> Ended | None:
        return Ended(returned=dict(self._return_values)) if len(self._return_values) == len(self._envs) else None

    def ended(self) -> Ended | None:
        if self._server.is_gone:
            return self._ended_without_server()
        self._server.go_on()
        codes = self._exit_codes()  # before the values: one that has left by now has returned before
        self._collect()
        failed = {rank: code for rank, code in codes.items() if code != 0 or rank not in self._return_values}
        if failed and self._server_fell(failed):
            return self._ended_without_server()
        if failed:
            return Ended(exit_codes=self._all_failures(failed))
        if len(codes) == len(self._envs):
            return self.done()
        return self.done() if time.monotonic() > self._returned_at + _GONE_SECONDS else None

    def _server_fell(self, failed: dict[int, int]) -> bool:
        """Whether these codes say nothing but that the server, which would have told them, is gone by now."""
        if _OF_NO_SERVER not in failed.values():
            return False
        deadline = time.monotonic() + _FALL_SECONDS
        while not self._server.is_gone and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._server.is_gone

    def _collect(self) -> None:
        """What ranks returned since the last time; once all have, they may leave."""
        for rank, queue in enumerate(self._outcomes):
            if not queue.empty():
                self._return_values[rank] = queue.get()
        if self.done() is not None and self._returned_at == math.inf:
            self._all_returned.set()
            self._returned_at = time.monotonic()

    def _ended_without_server(self) -> Ended:
        """Ranks go on without it, but nothing would be heard of their end: they save and leave while they can."""
        pids = [pid for pid in self.pids().values() if state_of(pid) not in (None, "Z")]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + _SAVE_SECONDS
        while any(state_of(pid) not in (None, "Z") for pid in pids) and time.monotonic() < deadline:
            self._collect()
            time.sleep(0.05)
        self._collect()
        self._end_ranks_of_no_server(pids)
        if (done := self.done()) is not None and not any(each.exit_code for each in done.returned.values()):
            return done  # their work was done
        cause = (
            f"the fork server (pid {self._server.pid}), which the ranks were made by, is gone: it was killed (out of "
            "memory? see the kernel log). The ranks were asked to save and leave"
        )
        return Ended(without_server=cause)

    def _end_ranks_of_no_server(self, pids: list[int]) -> None:
        end_below(pids)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self, number: signal.Signals) -> None:
        """End every process that is still there, by a signal and, where that does not help, by SIGKILL."""
        self._server.go_on()
        if self._server.is_gone:  # and multiprocessing takes all of its processes for dead
            self._end_ranks_of_no_server([pid for pid in self.pids().values() if state_of(pid) not in (None, "Z")])
        for last_resort in (number, signal.SIGKILL):
            for rank in self._alive():
                with suppress(ProcessLookupError):
                    os.kill(self.pids()[rank], last_resort)
            deadline = time.monotonic() + END_SECONDS
            for rank in self._alive():  # one in the midst of a system call that does not end is left to the system
                self._processes[rank].join(max(deadline - time.monotonic(), 0.0))
        self._server.end_what_is_left()

    def _all_failures(self, first: dict[int, int]) -> dict[int, int]:
        """End the other ranks; those that fell in the same moment by themselves belong to the snapshot."""
        began = time.monotonic()
        while time.monotonic() < began + _FALL_SECONDS and self._at_work():
            time.sleep(0.02)
        fallen = {rank: code for rank, code in self._exit_codes().items() if code}
        for rank in self._at_work():
            with suppress(ProcessLookupError):
                os.kill(self.pids()[rank], signal.SIGTERM)
        self._all_returned.set()  # a rank that has done its work waits for all others to have done theirs
        while self._alive() and time.monotonic() < began + _GONE_SECONDS:
            if self._at_work() and time.monotonic() > began + _FALL_SECONDS + END_SECONDS:
                break
            time.sleep(0.02)
        self.close(signal.SIGKILL)
        return {**first, **fallen}

    def _exit_codes(self) -> dict[int, int]:
        return {rank: each.exitcode for rank, each in enumerate(self._processes) if each.exitcode is not None}

    def _alive(self) -> list[int]:
        codes = self._exit_codes()
        return [rank for rank in range(len(self._processes)) if rank not in codes]

    def _at_work(self) -> list[int]:
        """Ranks that are not on their way out by themselves."""
        return [rank for rank in self._alive() if not leaving_file(self._error_files[rank]).exists()]


def start_functions(
    plan: LaunchPlan, entry: Callable[..., Any] | None, argument: Any, error_files: list[Path]
) -> Ranks:
    """A process per rank from the fork server: running the plan's command, or `entry` with an argument."""
    arguments = [process.argv if entry is None else argument for process in plan.processes]
    context = _Functions(entry or run_command, arguments, [dict(each.env) for each in plan.processes], error_files)
    try:
        context.start()
    except BaseException:
        context.close(signal.SIGKILL)
        raise
    return Ranks(context, context.ended, context.done)


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
