"""A lease: a file that names the process which holds a run's folder, for file systems without locks."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep import run_files

logger = logging.getLogger(__name__)

LONGEST = 4096  # of what is read of a file that anybody may have written
LOOK_SECONDS = 0.2
BEAT_SECONDS = 5.0
STALE_SECONDS = 45.0  # nine beats
_LET_GO_SECONDS = 2.0
# After a takeover, before it counts: of two processes that take over at once, one then finds the other.
_SETTLE_SECONDS = 1.0


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
            found = json.loads(data[:LONGEST].decode())
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
        time.sleep(LOOK_SECONDS)
        now = _read(path)
        if now is None:
            return False
        if now != found:
            raise Taken(Holder.decode(now))
    return True


def _read(path: Path) -> bytes | None:
    try:
        with run_files.open_file(path) as stream:  # anew every time: that is when other hosts' writes are seen
            return stream.read(LONGEST)
    except FileNotFoundError:
        return None
