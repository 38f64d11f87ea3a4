"""Errors of torch and the system that are a rank's own trouble, in words that say what it is and what to do.

They come as RuntimeErrors, as a lost connection does, and may come while a rank waits for others.
"""

from __future__ import annotations

import errno
import os
from typing import Literal, NamedTuple

from lockstep.shown import size

_SHARED_MEMORY = "/dev/shm"
# In lower case, as all that is compared with them.
_DEAD_WORKER = ("dataloader worker (pid",)
_NO_SHARED_MEMORY = ("shared memory", "unable to write to file </torch_", "unable to mmap", "bus error")
_NO_MEMORY = (
    "out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory",
    "failed to allocate memory", "bad_alloc", "cublas_status_alloc_failed", "resource_exhausted",
)  # fmt: skip
# Of these, what is said of a device's memory, and not of the host's.
_OF_A_DEVICE = ("cuda", "cublas", "hip out of memory", "mps backend", "resource_exhausted")
# Less room than this in shared memory, and it is what a write without a file's name found no room in.
_LITTLE_BYTES = 1_000_000


Memory = Literal["", "device", "host"]


class Trouble(NamedTuple):
    message: str
    is_told: bool  # whether the message says all, so that a traceback has nothing to add
    memory: Memory = ""  # whose memory ran out, where that is the trouble


def of(error: BaseException) -> Trouble | None:
    """What a rank is in, if its error is of these kinds; none where it is anything else."""
    text = str(error).strip()
    lower = text.lower()
    if _is_disk_full(error):
        return _no_space(error, text)
    if not isinstance(error, (RuntimeError, MemoryError, OSError)):
        return None
    dead = any(sign in lower for sign in _DEAD_WORKER)
    if any(sign in lower for sign in _NO_SHARED_MEMORY) and (dead or "dataloader" in lower or "</torch_" in lower):
        return _no_shared_memory(_line(text))
    if dead:
        return Trouble(
            f"a data worker died: {_line(text)}. Where it was killed (SIGKILL), memory may have run out: lower "
            "data.workers or data.prefetch. With data.workers: 0 the rank fetches by itself, and shows what is wrong",
            is_told=True,
        )
    if isinstance(error, MemoryError) or any(sign in lower for sign in _NO_MEMORY):
        return Trouble(
            f"out of memory: {_line(text) or type(error).__name__}. To need less, lower train.batch_size, or raise "
            "train.accumulate (the same batch in more parts), or use fewer processes or data.workers on this host",
            is_told=False,
            memory="device" if any(sign in lower for sign in _OF_A_DEVICE) else "host",
        )
    return None


def _is_disk_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _no_space(error: BaseException, text: str) -> Trouble:
    file = getattr(error, "filename", None)
    if file is None and (shared := _room(_SHARED_MEMORY)) is not None and shared[1] < _LITTLE_BYTES:
        return _no_shared_memory(text)
    folder = None if file is None else os.path.dirname(os.fsdecode(file)) or "."  # noqa: PTH120  as it was given
    room = _room(folder) if folder is not None else None
    free = f"; {folder} has {size(room[1])} free" if room is not None else ""
    return Trouble(
        f"could not be written: {text}{free}. Checkpoints that are there are untouched: make room and resume the run",
        is_told=file is not None,
    )


def what_is_full(temporary: str) -> str:
    """Says where processes found no room when they were started: shared memory, or the folder of temporary files."""
    shared, disk = _room(_SHARED_MEMORY), _room(temporary)
    if shared is not None and shared[1] < _LITTLE_BYTES and not (disk is not None and disk[1] < shared[1]):
        return (
            f"{_SHARED_MEMORY} has {size(shared[0])}, {size(shared[1])} of it free. Delete what others left there, or "
            "give it more room (docker run --shm-size, mount -o remount,size=)"
        )
    free = f"{size(disk[1])} free" if disk is not None else "no room"
    return f"{temporary} has {free}: make room there, or name another folder with TMPDIR"


def _no_shared_memory(text: str) -> Trouble:
    room = _room(_SHARED_MEMORY)
    found = f"; {_SHARED_MEMORY} has {room[0] / 1e6:.1f} MB, {room[1] / 1e6:.1f} MB of it free" if room else ""
    return Trouble(
        f"shared memory is full: {text}{found}. Data workers hand over batches in it: lower data.workers "
        "or data.prefetch, or give it more room (docker run --shm-size, mount -o remount,size=)",
        is_told=True,
    )


def _room(folder: str) -> tuple[int, int] | None:
    """Returns the bytes of a folder's file system and those that are free; None where there is no such folder."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _line(text: str) -> str:
    """Of an error that came from a worker with its traceback, the last line; of any other, the first."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    return (lines[-1] if lines[0].startswith("Caught ") else lines[0]).rstrip(".")
