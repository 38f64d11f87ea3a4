"""The processes of one attempt: polled, asked to stop, ended. Imports no torch, which the launcher does not need."""

from __future__ import annotations

import errno
import math
import multiprocessing
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from typing import Any

from lockstep.distributed.failure import Failure, Report, Result
from lockstep.distributed.signals import QUIET_SIGNALS, end_below, state_of
from lockstep.errors import LaunchError
from lockstep.launchers.local.child import LEAVE_SECONDS, Outcome, run_command, run_rank, take_message
from lockstep.launchers.local.fork_server import ForkServer, changes
from lockstep.launchers.plan import LaunchPlan
from lockstep.launchers.supervisor import failed
from lockstep.terminal import say

# How long the other ranks get to fail by themselves once one has, and to end once they are asked to.
_FALL_SECONDS = 0.5
END_SECONDS = 5.0
# The exit code that multiprocessing shows for a process whose fork server is gone.
_OF_NO_SERVER = 255
# A rank ends itself where it takes too long to leave; this is for one that cannot.
_GONE_SECONDS = LEAVE_SECONDS + 10.0
# How long ranks get to save once the fork server is gone.
_SAVE_SECONDS = 60.0
# How long a look reads what a rank sends, and waits for more of a message that has begun.
_READ_SECONDS, _PAUSE_SECONDS, _READ_BYTES = 0.5, 0.01, 1 << 20


@dataclass(frozen=True)
class Ended:
    """All ranks returned, or some ended with these exit codes before they did."""

    returned: dict[int, Outcome] = field(default_factory=dict)
    exit_codes: dict[int, int] = field(default_factory=dict)
    without_server: str | None = None  # the fork server is gone, and with it the exit codes


class _Channel:
    """The launcher's end of the connection to a rank, which may be stopped or killed in the midst of a message."""

    def __init__(self) -> None:
        self.socket, self.of_rank = socket.socketpair()
        self._received = bytearray()

    def messages(self) -> Iterator[tuple[str, Any]]:
        """Yields the messages that have arrived as a whole."""
        until = time.monotonic() + _READ_SECONDS
        with suppress(OSError):  # nothing more yet, or the rank is gone
            while time.monotonic() < until:
                self.socket.settimeout(_PAUSE_SECONDS if self._received else 0.0)
                if not (data := self.socket.recv(_READ_BYTES)):
                    break
                self._received += data
        while (message := take_message(self._received)) is not None:
            yield message


class Ranks:
    """All processes of an attempt, from multiprocessing's fork server: polled, asked to stop, ended.

    Each sends its outcome before it leaves, and waits for the others. Torch's process contexts would skip what Python
    does at the end of a process, report one failure alone, wait for ever for a rank that left with exit code 0 before
    it returned, and import torch into the launcher.
    """

    def __init__(self, entry: Callable[..., Any], arguments: list[Any], envs: list[dict[str, str]]) -> None:
        self._entry, self._arguments, self._envs = entry, arguments, envs
        self._channels: list[_Channel] = []
        self._processes: list[ForkServerProcess] = []
        self._return_values: dict[int, Outcome] = {}
        self._reports: dict[int, Report] = {}
        self._leaving: set[int] = set()
        self._late: list[str] = []
        self._returned_at = math.inf
        self._server = ForkServer()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Ends what is left, and says which ranks were late."""
        self.end()
        self._collect()
        for text in self._late:
            say(text)
        for channel in self._channels:
            channel.socket.close()

    def ask_to_stop(self) -> None:
        for channel in self._channels:  # for a rank that is only now being made and would not hear the signal
            with suppress(OSError):
                channel.socket.send(b"s")
        for rank in self.pids():
            self._signal(rank, signal.SIGTERM)

    def ask_to_save(self) -> None:
        """Asks rank 0: the others learn of it from there, and one request leads to one save."""
        self._signal(0, signal.SIGUSR1)

    def dump_stacks(self) -> None:
        for rank in self.pids():
            self._signal(rank, signal.SIGUSR2)
            self._signal(rank, signal.SIGCONT)  # a stopped process writes nothing

    def suspended(self, rank: int) -> bool:
        """Returns whether a rank was stopped by a signal, where the system shows it."""
        pid = self.pids().get(rank)
        return pid is not None and state_of(pid) in ("T", "t")

    def _signal(self, rank: int, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pids()[rank], number)

    def start(self) -> None:
        self._server.start(self._make_processes)

    def _make_processes(self) -> None:
        context, changed, alone = multiprocessing.get_context("forkserver"), changes(), len(self._envs) == 1
        ignored = [int(each) for each in QUIET_SIGNALS if signal.getsignal(each) is signal.SIG_IGN]
        for rank, (argument, env) in enumerate(zip(self._arguments, self._envs, strict=True)):
            self._channels.append(channel := _Channel())
            given = (rank, alone, self._entry, argument, {**changed, **env}, channel.of_rank, ignored)
            process = context.Process(target=run_rank, args=given, name=f"rank-{rank}")
            process.start()
            channel.of_rank.close()
            self._processes.append(process)

    def pids(self) -> dict[int, int]:
        return {rank: each.pid for rank, each in enumerate(self._processes) if each.pid is not None}

    def done(self) -> Ended | None:
        """Returns what all ranks returned, also while some of them are still leaving."""
        return Ended(returned=dict(self._return_values)) if len(self._return_values) == len(self._envs) else None

    def reports(self) -> list[Report]:
        """Returns the failures that ranks reported."""
        self._collect()
        return list(self._reports.values())

    def host_of(self, rank: int) -> str:
        return socket.gethostname()

    def poll(self, stopping: bool) -> Result | None:
        ended = self.ended()
        if ended is not None and ended.without_server is not None:
            cause = ended.without_server
            return Result(5, failure=Failure(0, self.host_of(0), cause, 5, concerns_all_ranks=True))
        if ended is not None and ended.exit_codes:
            return failed(self.reports(), ended.exit_codes, self.host_of(0), stopping)
        return _result(ended)

    def returned(self) -> Result | None:
        return _result(self.done())

    def ended(self) -> Ended | None:
        """Returns how the ranks ended; None while they are at work."""
        if self._server.is_gone:
            return self._ended_without_server()
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
        """Returns whether these codes only mean that the server, which reports exit codes, is gone by now."""
        if _OF_NO_SERVER not in failed.values():
            return False
        deadline = time.monotonic() + _FALL_SECONDS
        while not self._server.is_gone and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._server.is_gone

    def _collect(self) -> None:
        """Receives what ranks send; once all have returned, they may leave."""
        for rank, channel in enumerate(self._channels):
            for kind, content in channel.messages():
                if kind == "returned":
                    self._return_values[rank] = content
                elif kind == "failed":
                    self._reports[rank] = content
                elif kind == "leaving":
                    self._leaving.add(rank)
                elif kind == "late":
                    self._late.append(content)
        if self.done() is not None and self._returned_at == math.inf:
            self._release()
            self._returned_at = time.monotonic()

    def _release(self) -> None:
        """Lets ranks leave that have done their work, which wait for all others to have done theirs."""
        for channel in self._channels:
            with suppress(OSError):
                channel.socket.shutdown(socket.SHUT_WR)

    def _ended_without_server(self) -> Ended:
        """Asks ranks to save and leave: they continue without the server, but their end would not be seen."""
        pids = self._there()
        for rank in self.pids():
            self._signal(rank, signal.SIGTERM)
        deadline = time.monotonic() + _SAVE_SECONDS
        while self._there() and time.monotonic() < deadline:
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

    def _there(self) -> list[int]:
        return [pid for pid in self.pids().values() if state_of(pid) not in (None, "Z")]

    def _end_ranks_of_no_server(self, pids: list[int]) -> None:
        end_below(pids)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """Ends every process that is left."""
        if self._server.is_gone:  # and multiprocessing takes all of its processes for dead
            self._end_ranks_of_no_server(self._there())
        for rank in self._alive():
            self._signal(rank, signal.SIGKILL)
        deadline = time.monotonic() + END_SECONDS
        for rank in self._alive():  # one in the midst of a system call that does not end is left to the system
            self._processes[rank].join(max(deadline - time.monotonic(), 0.0))
        self._server.end_what_is_left()

    def _all_failures(self, first: dict[int, int]) -> dict[int, int]:
        """Ends the other ranks; those that failed in the same moment belong to the result."""
        began = time.monotonic()
        while time.monotonic() < began + _FALL_SECONDS and self._at_work():
            time.sleep(0.02)
        fallen = {rank: code for rank, code in self._exit_codes().items() if code}
        for rank in self._at_work():
            self._signal(rank, signal.SIGTERM)
        self._release()
        while self._alive() and time.monotonic() < began + _GONE_SECONDS:
            if self._at_work() and time.monotonic() > began + _FALL_SECONDS + END_SECONDS:
                break
            time.sleep(0.02)
        self.end()
        return {**first, **fallen}

    def _exit_codes(self) -> dict[int, int]:
        return {rank: each.exitcode for rank, each in enumerate(self._processes) if each.exitcode is not None}

    def _alive(self) -> list[int]:
        codes = self._exit_codes()
        return [rank for rank in range(len(self._processes)) if rank not in codes]

    def _at_work(self) -> list[int]:
        """Returns the ranks that are not leaving already."""
        self._collect()
        return [rank for rank in self._alive() if rank not in self._leaving]


def _result(ended: Ended | None) -> Result | None:
    if ended is None:
        return None
    returned = {rank: outcome.received(rank, say) for rank, outcome in ended.returned.items()}
    return Result(max(outcome.exit_code for outcome in ended.returned.values()), returned)


def start(plan: LaunchPlan, entry: Callable[..., Any] | None = None, argument: Any = None) -> Ranks:
    """Starts a process per rank from the fork server, for the plan's command or for `entry` with an argument."""
    arguments = [process.argv if entry is None else argument for process in plan.processes]
    ranks = None
    try:
        ranks = Ranks(entry or run_command, arguments, [dict(each.env) for each in plan.processes])
        ranks.start()
    except BaseException as error:
        if ranks is not None:
            ranks.leave()
        if isinstance(error, OSError):
            raise LaunchError(_cannot_start(len(plan.processes), error)) from None
        raise
    return ranks


def _cannot_start(count: int, error: OSError) -> str:
    """Returns the message for an error of the system while processes are started."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = {
        errno.EMFILE: f"the limit of open files is {files}; raise it (ulimit -n)",
        errno.EAGAIN: "the limit of processes is reached; raise it (ulimit -u), or end some",
        errno.ENOMEM: "there is not enough memory; use fewer processes",
    }.get(error.errno or 0, "`lockstep doctor` looks for what is wrong")
    return f"{count} process{'' if count == 1 else 'es'} could not be started: {error.strerror or error}; {remedy}"
