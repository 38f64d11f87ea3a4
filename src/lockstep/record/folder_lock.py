"""Locks a run's folder, so that only one run writes to it.

There are two files, because a launcher and its ranks end one by one. The launcher holds `.lock` for the whole run;
under a foreign launcher, rank 0 does. Under a launcher that holds it, rank 0 holds `.lock-rank`: ranks whose launcher
was killed still save and leave, and until then no other run may begin. The system releases its locks when a process
ends, however it ends; a file system without locks gets a lease (folder_lease.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from lockstep import run_files
from lockstep.distributed.topology import Topology
from lockstep.errors import ConfigError, FolderLost
from lockstep.record.folder_lease import LONGEST, LOOK_SECONDS, Holder, Lease, Taken
from lockstep.record.run_folder import Anchor, check_links

_RUN, _RANK = ".lock", ".lock-rank"
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)

# How long rank 0 waits for ranks of an attempt before to let go: where it may have been restarted, and otherwise.
_RESTART_PATIENCE, _PATIENCE = 30.0, 3.0


class Held:
    """A run's folder that this process holds."""

    def __init__(self, anchor: Anchor, lock: _SystemLock | Lease) -> None:
        self._anchor, self._lock = anchor, lock

    def check(self) -> None:
        """Raises FolderLost if the folder was moved, deleted or taken over."""
        self._anchor.check()
        if isinstance(self._lock, Lease) and self._lock.is_lost:
            raise FolderLost(
                f"{self._anchor.folder}: another process has taken this run's folder over: this one was stopped, or "
                "its file system did not answer, for so long that it was taken for gone. Nothing more is written"
            )


@contextlib.contextmanager
def locked(folder: Path, what: str = "its launcher", patience: float = 0.0) -> Iterator[Held]:
    """Holds a run's folder for the whole run; `what` names this process to others ("rank 0").

    Raises ConfigError, naming the holder, if the folder is still held after `patience` seconds.
    """
    check_links(folder)
    with _held(folder, _RUN, what, patience) as held:
        with _held(folder, _RANK, what, patience):
            pass  # fails while ranks of a launcher that was killed are still there
        yield held


def locked_by_rank(folder: Path, patience: float = 0.0) -> contextlib.AbstractContextManager[Held]:
    """Holds the folder as rank 0 of a launcher that holds it, too."""
    return _held(folder, _RANK, "rank 0", patience)


def locked_for(
    folder: Path, topology: Topology, held: bool, restarted: bool
) -> contextlib.AbstractContextManager[Held]:
    """Holds the folder as rank 0 of a topology; `held`: its launcher holds it, too."""
    patience = _PATIENCE if topology.world_size > 1 else 0.0  # other launchers restart ranks without saying so
    if restarted or topology.watched or topology.attempt:
        patience = _RESTART_PATIENCE
    if held:
        return locked_by_rank(folder, patience)
    return locked(folder, "rank 0" if topology.world_size > 1 else "its only process", patience)


def held_by(folder: Path) -> Holder | None:
    """Returns the process that holds a run's folder, as far as can be known without taking it or waiting.

    A lease of another machine counts as held as long as it exists.
    """
    for name in (_RUN, _RANK):
        holder = _named(folder / name)
        if holder is not None and _is_at_work(folder / name, holder):
            return holder
        holder = _named(folder / f"{name}-lease")
        if holder is not None and not (holder.is_here and holder.is_gone):
            return holder
    return None


def is_at_work(folder: Path) -> bool | None:
    """Whether a process holds a run's folder; None where that cannot be known, because it is on another host."""
    if held_by(folder) is not None:
        return True
    named = [_named(folder / name) for name in (_RUN, _RANK)]
    if not (folder / _RUN).exists() or any(each is not None and not each.is_here for each in named):
        return None
    return False


def _named(path: Path) -> Holder | None:
    """Returns the holder that a lock or a lease names: a released lock is empty."""
    try:
        with run_files.open_file(path) as stream:
            return Holder.decode(stream.read(LONGEST))
    except OSError:
        return None


def _is_at_work(path: Path, holder: Holder) -> bool:
    """Whether the named holder still holds the lock: known by its process on this machine, else by the lock, which is
    shared for a moment."""
    if holder.is_here and holder.started:
        return not holder.is_gone
    try:
        descriptor = run_files.open_descriptor(path, os.O_RDONLY)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there are no locks here
        return False
    finally:
        os.close(descriptor)
    return False


@contextlib.contextmanager
def _held(folder: Path, name: str, what: str, patience: float) -> Iterator[Held]:
    lock = _take(folder, name, Holder(what), patience)
    _held_here.append(lock)
    anchor = Anchor(folder)
    try:
        yield Held(anchor, lock)
    finally:
        anchor.close()
        if lock in _held_here:
            _held_here.remove(lock)
            lock.release()


def _take(folder: Path, name: str, holder: Holder, patience: float) -> _SystemLock | Lease:
    deadline = time.monotonic() + patience
    while True:
        try:
            return _SystemLock.take(folder / name, holder)
        except Taken as taken:
            if time.monotonic() >= deadline:
                raise ConfigError(_refusal(folder, name, taken.holder)) from None
        except FileNotFoundError:
            raise ConfigError(f"{folder} is not the folder of a run: there is no such folder") from None
        except OSError as error:
            raise ConfigError(
                f"{folder / name}: the run's folder cannot be held for this run: {error.strerror}. Make the folder "
                "writable for this user"
            ) from None
        time.sleep(LOOK_SECONDS)


def _refusal(folder: Path, name: str, holder: Holder | None) -> str:
    who = holder or "an unknown process"
    if name == _RANK and (holder is None or holder.what == "rank 0"):
        return (
            f"{folder}: another run is at work in this folder: {who}. Its launcher is gone; it saves and leaves by "
            "itself within a minute: wait for it, and try again"
        )
    return f"{folder}: another run is at work in this folder: {who}; wait for it or end it first"


class _SystemLock:
    """A lock of the system on a file. The file is never removed: all must wait for the same one."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def take(cls, path: Path, holder: Holder) -> _SystemLock | Lease:
        """Returns the lock, or a lease where there are no locks; raises Taken if it is held."""
        descriptor = run_files.open_descriptor(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            found = os.pread(descriptor, LONGEST, 0)
            os.close(descriptor)
            raise Taken(Holder.decode(found)) from None
        except OSError as error:
            os.close(descriptor)
            if error.errno not in _NO_LOCKS:
                raise
            return Lease.take(path.with_name(f"{path.name}-lease"), holder)
        with contextlib.suppress(OSError):  # a full disk; the lock is held all the same
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, holder.encode(), 0)
        return cls(descriptor)

    def release(self) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
        with contextlib.suppress(OSError):  # a process that was just forked may not have let go yet
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self.forget()

    def forget(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


_held_here: list[_SystemLock | Lease] = []  # by this process


def _forget_all() -> None:
    """Lets go in a forked process (a data worker), which would hold the folder longer than this one."""
    for lock in _held_here:
        lock.forget()
    _held_here.clear()


os.register_at_fork(after_in_child=_forget_all)
