"""One writer per folder: who holds a run's folder, and what others are told.

Two files, because a launcher and its ranks end one by one. The launcher holds `.lock` for the whole run; where nobody
of ours has started the ranks, rank 0 does. Under a launcher that holds it, rank 0 holds `.lock-rank` beside it: ranks
whose launcher was killed still save and leave, and until then nobody else may begin. Locks are the system's, which lets
go of them when a process ends, however it does; where the file system has none, there is a lease.
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
from lockstep.errors import ConfigError, FolderLost
from lockstep.record.lease import Holder, Lease, Taken
from lockstep.record.run_folder import Anchor, check_links

_RUN, _RANK = ".lock", ".lock-rank"
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_LOOK_SECONDS = 0.2
_LONGEST = 4096


class Held:
    """A run's folder that this process holds."""

    def __init__(self, anchor: Anchor, lock: _SystemLock | Lease) -> None:
        self._anchor, self._lock = anchor, lock

    def check(self) -> None:
        """Raise FolderLost where the folder is not where it was, or not this run's any more."""
        self._anchor.check()
        if isinstance(self._lock, Lease) and self._lock.is_lost:
            raise FolderLost(
                f"{self._anchor.folder}: somebody else has taken this run's folder over: this process was stopped, or "
                "its file system did not answer, for so long that it was taken for gone. Nothing more is written"
            )


@contextlib.contextmanager
def locked(folder: Path, what: str = "its launcher", patience: float = 0.0) -> Iterator[Held]:
    """Hold a run's folder for the whole run, so that no other run writes into it; `what` this process is to the run.

    Raises ConfigError, naming the holder, where the folder is still held after so many seconds.
    """
    check_links(folder)
    with _held(folder, _RUN, what, patience) as held:
        with _held(folder, _RANK, what, patience):
            pass  # only to see whether ranks of a launcher that was killed are still there
        yield held


@contextlib.contextmanager
def locked_by_rank(folder: Path, patience: float = 0.0) -> Iterator[Held]:
    """The same for rank 0 of a launcher that holds the folder."""
    with _held(folder, _RANK, "rank 0", patience) as held:
        yield held


def held_by(folder: Path) -> Holder | None:
    """Who is at work in a run's folder, as far as can be told without taking it or waiting: for whoever only looks.

    A lease of another machine counts as held as long as it is there; whoever takes it finds out.
    """
    for name in (_RUN, _RANK):
        holder = _named(folder / name)
        if holder is not None and _is_at_work(folder / name, holder):
            return holder
        holder = _named(folder / f"{name}-lease")
        if holder is not None and not (holder.is_here and holder.is_gone):
            return holder
    return None


def _named(path: Path) -> Holder | None:
    """Whom a lock or a lease names: a lock that was let go of is empty."""
    try:
        with run_files.open_file(path) as stream:
            return Holder.decode(stream.read(_LONGEST))
    except OSError:
        return None


def _is_at_work(path: Path, holder: Holder) -> bool:
    """Whether a lock is held that names somebody. One that is here is known by its process; of another, the lock tells,
    which is shared for a moment: nobody who writes is kept from it for longer."""
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
        time.sleep(_LOOK_SECONDS)


def _refusal(folder: Path, name: str, holder: Holder | None) -> str:
    who = holder or "an unknown process"
    if name == _RANK and (holder is None or holder.what == "rank 0"):
        return (
            f"{folder}: another run is at work in this folder: {who}. Its launcher is gone; it saves and leaves by "
            "itself within a minute: wait for it, and try again"
        )
    return f"{folder}: another run is at work in this folder: {who}; wait for it or end it first"


class _SystemLock:
    """A lock of the system on a file, which is never removed: who waits for it must wait for the same file."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def take(cls, path: Path, holder: Holder) -> _SystemLock | Lease:
        """The lock, or a lease where there are no locks; raises Taken where somebody else has it."""
        descriptor = run_files.open_descriptor(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            found = os.pread(descriptor, _LONGEST, 0)
            os.close(descriptor)
            raise Taken(Holder.decode(found)) from None
        except OSError as error:
            os.close(descriptor)
            if error.errno not in _NO_LOCKS:
                raise
            return Lease.take(path.with_name(f"{path.name}-lease"), holder)
        with contextlib.suppress(OSError):  # a full disk: held all the same
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, holder.encode(), 0)
        return cls(descriptor)

    def release(self) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
        with contextlib.suppress(OSError):  # also where a process that was forked a moment ago has not let go yet
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self.forget()

    def forget(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


_held_here: list[_SystemLock | Lease] = []  # by this process


def _forget_all() -> None:
    """A process that is forked (a data worker) has our descriptors too, and would keep the folder held after us."""
    for lock in _held_here:
        lock.forget()
    _held_here.clear()


os.register_at_fork(after_in_child=_forget_all)
