"""Finds the cause among many failures, describes it, and decides whether a retry makes sense."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple

from lockstep.errors import (
    CONSEQUENCES,
    LOST_PEER,
    CallbackFailed,
    FolderLost,
    LockstepError,
    NonFiniteGradients,
    NonFiniteLoss,
    NonFiniteWeights,
)
from lockstep.shown import cut, size, visible

_SHARED_MEMORY = "/dev/shm"
# Signs in lower-case messages.
_DEAD_WORKER = ("dataloader worker (pid",)
_NO_SHARED_MEMORY = ("shared memory", "unable to write to file </torch_", "unable to mmap", "bus error")
_NO_MEMORY = (
    "out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory",
    "failed to allocate memory", "bad_alloc", "cublas_status_alloc_failed", "resource_exhausted",
)  # fmt: skip
# Signs of device memory, not host memory.
_OF_A_DEVICE = ("cuda", "cublas", "hip out of memory", "mps backend", "resource_exhausted")
_OTHER_SIZE = (
    ". Where gloo says above that it received data of another size, ranks were in different layers of the model, or "
    "called in another order: use the same ones on every rank (those that one does not need with a factor of 0)"
)
# Below this, shared memory counts as full.
_LITTLE_BYTES = 1_000_000
# Of a message or a traceback, how many characters are reported at each end: the store refuses values of many megabytes.
_ENDS = 10_000


Memory = Literal["", "device", "host"]


class InWorker(Exception):
    """The traceback of a data worker as text: the cause of an error that came from it."""


class LocalError(NamedTuple):
    message: str
    is_complete: bool  # whether the message needs no traceback
    memory: Memory = ""  # which memory ran out, if any


def local_error(error: BaseException) -> LocalError | None:
    """Explains errors that are this rank's own (memory, disk, data workers), which look like a lost connection."""
    text = str(error).strip()
    lower = text.lower()
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _no_space(error, text)
    if not isinstance(error, (RuntimeError, MemoryError, OSError)):
        return None
    dead = any(sign in lower for sign in _DEAD_WORKER)
    if any(sign in lower for sign in _NO_SHARED_MEMORY) and (dead or "dataloader" in lower or "</torch_" in lower):
        return _no_shared_memory(_line(text))
    if dead:
        return LocalError(
            f"a data worker died: {_line(text)}. Where it was killed (SIGKILL), memory may have run out: lower "
            "data.workers or data.prefetch. With data.workers: 0 the rank fetches by itself, and shows what is wrong",
            is_complete=True,
        )
    if isinstance(error, MemoryError) or any(sign in lower for sign in _NO_MEMORY):
        return LocalError(
            f"out of memory: {_line(text) or type(error).__name__}. To need less, lower train.batch_size, or raise "
            "train.accumulate (the same batch in more parts), or use fewer processes or data.workers on this host",
            is_complete=False,
            memory="device" if any(sign in lower for sign in _OF_A_DEVICE) else "host",
        )
    return None


def _no_space(error: BaseException, text: str) -> LocalError:
    file = getattr(error, "filename", None)
    if file is None and (shared := _room(_SHARED_MEMORY)) is not None and shared[1] < _LITTLE_BYTES:
        return _no_shared_memory(text)
    folder = None if file is None else os.path.dirname(os.fsdecode(file)) or "."  # noqa: PTH120  as it was given
    room = _room(folder) if folder is not None else None
    free = f"; {folder} has {size(room[1])} free" if room is not None else ""
    return LocalError(
        f"could not be written: {text}{free}. Checkpoints that are there are untouched: make room and resume the run",
        is_complete=file is not None,
    )


def _no_shared_memory(text: str) -> LocalError:
    room = _room(_SHARED_MEMORY)
    found = f"; {_SHARED_MEMORY} has {room[0] / 1e6:.1f} MB, {room[1] / 1e6:.1f} MB of it free" if room else ""
    return LocalError(
        f"shared memory is full: {text}{found}. Data workers hand over batches in it: lower data.workers "
        "or data.prefetch, or give it more room (docker run --shm-size, mount -o remount,size=)",
        is_complete=True,
    )


def _room(folder: str) -> tuple[int, int] | None:
    """Returns the total and free bytes of a folder's file system, or None."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _line(text: str) -> str:
    """Returns the first line of a message, or the last if it is a worker's traceback."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    return (lines[-1] if lines[0].startswith("Caught ") else lines[0]).rstrip(".")


@dataclass(frozen=True)
class Report:
    rank: int
    host: str
    kind: str
    message: str
    exit_code: int
    time: float
    traceback: str = ""
    consequence: bool = False
    concerns_all_ranks: bool = False
    memory: Memory = ""


@dataclass(frozen=True)
class Failure:
    """The cause of a failed attempt, and the failures that followed from it."""

    rank: int
    host: str
    cause: str
    exit_code: int
    kind: str = ""
    traceback: str = ""
    followers: Mapping[int, str] = field(default_factory=dict)
    concerns_all_ranks: bool = False
    memory: Memory = ""

    def render(self, world_size: int) -> str:
        """Returns a headline, the user's traceback, and the other ranks in a line each."""
        who = "" if self.concerns_all_ranks else f"rank {self.rank} of {world_size} on {self.host} failed: "
        lines = [who + self.cause]
        if self.traceback:
            lines += ["", *("  " + line for line in self.traceback.rstrip().splitlines()), ""]
        if self.followers:
            same: dict[str, list[int]] = {}
            for rank, text in self.followers.items():
                same.setdefault(text, []).append(rank)
            lines += [
                f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}"
                for text, ranks in same.items()
            ]
        return visible("\n".join(lines))


@dataclass(frozen=True)
class Result:
    exit_code: int
    returned: dict[int, Any] = field(default_factory=dict)
    failure: Failure | None = None
    nothing_to_save: bool = False  # asked to stop before the first step


def report(error: BaseException, rank: int, host: str) -> Report:
    ours = isinstance(error, LockstepError)
    text = str(error) or type(error).__name__
    # An OSError is about a connection of the user's code (a dataset that downloads).
    local = None if ours else local_error(error)
    lost = local is None and isinstance(error, RuntimeError) and any(sign in text.lower() for sign in LOST_PEER)
    of_user = error.__cause__ or error if isinstance(error, CallbackFailed) else error
    quiet = (ours and of_user is error) or lost or (local is not None and local.is_complete)
    return Report(
        rank=rank, host=host, kind=type(error).__name__, time=time.time(), memory=local.memory if local else "",
        message=cut(local.message if local else _message(error, text, ours, lost), _ENDS, _ENDS),
        traceback="" if quiet else cut("".join(user_traceback(of_user)), _ENDS, _ENDS),
        exit_code=error.exit_code if isinstance(error, LockstepError) else 5,
        consequence=type(error).__name__ in CONSEQUENCES or lost,
        concerns_all_ranks=isinstance(error, LockstepError) and error.concerns_all_ranks,
    )  # fmt: skip


def _message(error: BaseException, text: str, ours: bool, lost: bool) -> str:
    if ours:
        return text
    if lost:
        return f"lost the connection to another rank ({type(error).__name__})"
    notes = [note for note in getattr(error, "__notes__", []) if "\n" not in note]
    return f"{type(error).__name__}: {text}" + (f" ({'; '.join(notes)})" if notes else "")


def user_traceback(error: BaseException) -> list[str]:
    """Returns the traceback from the first frame in user code on; that of the data worker for an error from there."""
    if isinstance(error.__cause__, InWorker):
        return [str(error.__cause__)]
    here = str(Path(__file__).parents[1])
    internal = (here, "<frozen ")
    entry: TracebackType | None = error.__traceback__
    while entry is not None and entry.tb_frame.f_code.co_filename.startswith(internal):
        entry = entry.tb_next
    return traceback.format_exception(type(error), error, entry or error.__traceback__)


def find_cause(reports: list[Report], exit_codes: Mapping[int, int], host: str) -> Failure:
    """Returns the earliest failure that is not the consequence of another.

    A killed rank cannot write a report, so if all reports are consequences, a rank without one is the cause.
    """
    by_time = sorted(reports, key=lambda each: each.time)
    causes = [each for each in by_time if not each.consequence]
    reported = {each.rank for each in reports}
    silent = [rank for rank in sorted(exit_codes) if rank not in reported]
    if causes:
        return _failure(causes[0], by_time, exit_codes, silent)
    if silent:
        code = exit_codes[silent[0]]
        followers = {each.rank: _first_line(each.message) for each in by_time}
        cause = describe_exit(code) + (_OTHER_SIZE if _signal(code) == "SIGABRT" and followers else "")
        return Failure(silent[0], host, cause, 5, _signal(code), followers=followers)
    if by_time:
        return _failure(by_time[0], by_time, exit_codes, silent)
    return Failure(0, host, "the run ended and no rank said why", 5)


def describe_exit(code: int) -> str:
    if name := _signal(code):
        hint = " (out of memory? see the kernel log)" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}, exit code {code}"
    if code == 0:
        return "the process left without finishing its work (exit code 0): something called os._exit or sys.exit"
    return f"exit code {code}"


def _signal(code: int) -> str:
    """Returns the signal that killed a process, by its exit code."""
    if code >= 0:
        return ""
    return signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"


def ended_by_the_kernel(failure: Failure) -> Failure:
    """Returns the failure of a rank that the kernel's OOM killer ended."""
    if failure.kind != "SIGKILL":
        return failure
    return replace(failure, cause="killed by SIGKILL: the kernel has ended it for lack of memory", memory="host")


def how_to_plan(config: str, devices: int) -> str:
    return (
        f"what fills the memory: lockstep plan {shlex.quote(config)} --on DEVICEx{devices}, and with --search what "
        "would fit (lockstep plan --list has the devices)"
    )


def worth_retrying(failure: Failure) -> bool:
    """A config error, a diverged loss and a lost run folder would fail again; anything else may be chance."""
    final = (NonFiniteLoss, NonFiniteGradients, NonFiniteWeights, FolderLost)
    return failure.exit_code != 2 and failure.kind not in [each.__name__ for each in final]


def _failure(cause: Report, by_time: list[Report], exit_codes: Mapping[int, int], silent: list[int]) -> Failure:
    followers = {
        each.rank: "the same" if each.message == cause.message else _first_line(each.message)
        for each in by_time
        if each.rank != cause.rank
    }
    followers.update({rank: describe_exit(exit_codes[rank]) for rank in silent})
    same_on_all = cause.exit_code == 2 and not silent and all(each.message == cause.message for each in by_time)
    concerns_all_ranks = cause.concerns_all_ranks or same_on_all  # a config error is no failure of a rank
    if concerns_all_ranks:
        followers = {rank: text for rank, text in followers.items() if text != "the same"}
    return Failure(
        cause.rank, cause.host, cause.message, cause.exit_code, cause.kind, cause.traceback, followers,
        concerns_all_ranks, cause.memory,
    )  # fmt: skip


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0]
