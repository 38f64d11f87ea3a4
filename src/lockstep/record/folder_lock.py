"""Locks a run's folder, so that only one run writes to it.

There are two files, because a launcher and its ranks end one by one. The launcher holds `.lock` for the whole run;
under a foreign launcher, rank 0 does. Under a launcher that holds it, rank 0 holds `.lock-rank`: ranks whose launcher
was killed still save and leave, and until then no other run may begin. The system releases its locks when a process
ends, however it ends; a file system without locks gets a lease.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep import run_files
from lockstep.errors import ConfigError, FolderLost
from lockstep.record.run_folder import Anchor, check_links

_LONGEST = 4096  # of what is read of a file that anybody may have written


@dataclass(frozen=True)
class Holder:
    """The process that holds a run's folder, so that another one can tell whether it still exists."""

    what: str  # "rank 0", "its launcher"
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    since: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S %z"))
    machine: str = field(default_factory=lambda: _machine())
    started: str = field(default_factory=lambda: _start_of(os.getpid()) or "")

    def __str__(self) -> str:
        return f"{self.what}, process {self.pid} on {self.host}, since {self.since}"

    def encode(self, **more: Any) -> bytes:
        return json.dumps({**asdict(self), **more}).encode() + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> Holder | None:
        """Returns the holder that a lock names; None where it cannot be understood."""
        try:
            found = json.loads(data[:_LONGEST].decode())
            texts = [found[name] for name in ("what", "host", "since", "machine", "started")]
            if not all(isinstance(each, str) and each.isprintable() for each in texts) or type(found["pid"]) is not int:
                return None
            what, host, since, machine, started = texts
            return cls(what, host, found["pid"], since, machine, started)
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    @property
    def is_here(self) -> bool:
        """Whether it is, or was, a process that this one can see."""
        return self.machine == _machine()

    @property
    def is_gone(self) -> bool:
        """Whether it has ended, even if another process has its number by now. Only for one that is here."""
        return _start_of(self.pid) != self.started


def _machine() -> str:
    """Identifies this boot of this host and the namespace of process numbers: two containers may have one name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116  a link that leads to no file
    except OSError:
        return socket.gethostname()


def _start_of(pid: int) -> str | None:
    """Returns when a process was started, in ticks since the boot; None where it is gone or dead."""
    try:
        _, _, rest = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
    except OSError:
        return None
    state, *numbers = rest.split()
    return None if state in "ZX" else numbers[18]


logger = logging.getLogger(__name__)

BEAT_SECONDS = 5.0
STALE_SECONDS = 45.0  # nine beats
_LOOK_SECONDS = 0.2
_LET_GO_SECONDS = 2.0
# After a takeover, before it counts: of two processes that take over at once, one then finds the other.
_SETTLE_SECONDS = 1.0


class Taken(Exception):
    """Another process holds the folder."""

    def __init__(self, holder: Holder | None) -> None:
        super().__init__(str(holder))
        self.holder = holder


class Lease:
    """A file that its holder rewrites every few seconds, from `take` to `release` or until it is taken over.

    A process that finds one watches it: if it does not change for a while, by the watcher's clock, its holder is gone.
    """

    def __init__(self, path: Path, holder: Holder) -> None:
        self._path, self._holder, self._token = path, holder, uuid.uuid4().hex
        self._beats = 0
        self._descriptor = -1
        self._done = threading.Event()
        self._beating = threading.Thread(target=self._beat_regularly, name="lockstep-lease", daemon=True)
        self.is_lost = False

    @classmethod
    def take(cls, path: Path, holder: Holder) -> Lease:
        """Returns the lease once it is free; raises Taken if it is held, OSError if it cannot be written."""
        lease = cls(path, holder)
        while not lease._create():
            found = _read(path)
            if found is None or not _is_stale(path, found):
                continue  # it is free by now
            lease._take_over(found)
            break
        lease._beating.start()
        return lease

    def release(self) -> None:
        self._done.set()
        self._beating.join(_LET_GO_SECONDS)
        with contextlib.suppress(OSError):  # it will be found to be stale
            if self._is_ours():
                self._path.unlink(missing_ok=True)
        if not self._beating.is_alive():  # a write that the file system does not answer still has the descriptor
            self.forget()

    def forget(self) -> None:
        """Lets go in a process that was forked from the holder."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _create(self) -> bool:
        try:
            self._descriptor = run_files.open_descriptor(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return False
        self._beat()
        return True

    def _take_over(self, found: bytes) -> None:
        mine = self._path.with_name(f"{self._path.name}-{self._token}")
        self._descriptor = run_files.open_descriptor(mine, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            self._beat()
            if _read(self._path) not in (found, None):
                raise Taken(Holder.decode(_read(self._path) or b""))
            mine.replace(self._path)
            time.sleep(_SETTLE_SECONDS)
            if not self._is_ours():
                raise Taken(Holder.decode(_read(self._path) or b""))
        except BaseException:
            mine.unlink(missing_ok=True)
            self.forget()
            raise

    def _beat_regularly(self) -> None:
        while not self._done.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # a file system that does not answer now may do so next time
                if not self._is_ours():
                    self.is_lost = True
                    return
                self._beat()

    def _beat(self) -> None:
        self._beats += 1
        # Always of the same length, so that one write replaces another.
        os.pwrite(self._descriptor, self._holder.encode(token=self._token, beat=f"{self._beats:012d}"), 0)
        os.fsync(self._descriptor)  # other hosts see it only then

    def _is_ours(self) -> bool:
        return self._token.encode() in (_read(self._path) or b"")


def _is_stale(path: Path, found: bytes) -> bool:
    """Whether the holder is gone; False where the lease is gone. Raises Taken while the holder is at work."""
    holder = Holder.decode(found)
    if holder is not None and holder.is_here:
        if holder.is_gone:
            return True
        raise Taken(holder)
    logger.warning("%s: held by %s; waiting up to %g s to see whether it is still at work", path,
                   holder or "an unknown process", STALE_SECONDS)  # fmt: skip
    deadline = time.monotonic() + STALE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        now = _read(path)
        if now is None:
            return False
        if now != found:
            raise Taken(Holder.decode(now))
    return True


def _read(path: Path) -> bytes | None:
    try:
        with run_files.open_file(path) as stream:  # anew every time: that is when other hosts' writes are seen
            return stream.read(_LONGEST)
    except FileNotFoundError:
        return None


_RUN, _RANK = ".lock", ".lock-rank"
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


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
            return Holder.decode(stream.read(_LONGEST))
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
            found = os.pread(descriptor, _LONGEST, 0)
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
