"""Folders that only this user can enter, with paths short enough for Unix sockets."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lockstep.errors import LaunchError

SOCKET = "store"
# What the address of a Unix socket can hold on every system; one byte ends it.
_LONGEST_PATH = 103


@contextlib.contextmanager
def fresh_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="lockstep-", dir=_places()[0]))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def folder_of_run(name: str) -> Path:
    """Returns the folder where the ranks of this user meet under a name."""
    digest = hashlib.sha256(f"{name} {_network()}".encode()).hexdigest()[:24]
    return user_folder() / digest


def user_folder() -> Path:
    """Returns this user's private folder, and creates it if needed."""
    reasons = []
    for place in _places():
        folder = place / f"lockstep-{os.geteuid()}"
        try:
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror}")
            continue
        if (wrong := _not_private(folder)) is None:
            return folder
        reasons.append(f"{folder}: {wrong}")
    raise LaunchError(
        f"no folder for the ranks of this host to meet in: {'; '.join(reasons)}. Remove what is there, or set "
        "XDG_RUNTIME_DIR to a folder that is yours alone (mode 0700)"
    )


class Claim:
    """Locks the folder of a run for the process that serves its store."""

    def __init__(self, folder: Path) -> None:
        """Raises BlockingIOError if another process holds it."""
        self.folder, self._owner = folder, os.getpid()
        folder.mkdir(mode=0o700, exist_ok=True)
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise BlockingIOError(f"{folder} is in use") from None
        for left in folder.iterdir():  # by one that was killed
            if left.name != "lock":
                left.unlink(missing_ok=True)

    def release(self) -> None:
        if os.getpid() != self._owner:  # a fork of the one that serves there
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def _places() -> list[Path]:
    """Returns candidates for private folders, the best first."""
    named = os.environ.get("XDG_RUNTIME_DIR")
    own = [Path(named)] if named and len(named) < _LONGEST_PATH - 50 and _not_private(Path(named)) is None else []
    anybody = Path("/tmp") if os.access("/tmp", os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    # Where somebody else has taken the name in a folder that is everybody's. A home may be missing, or another user's.
    home = os.path.expanduser("~/.cache")  # noqa: PTH111  pathlib raises for these
    return [*own, anybody, *([Path(home)] if os.path.isdir(home) and len(home) < _LONGEST_PATH - 50 else [])]  # noqa: PTH112


def _not_private(folder: Path) -> str | None:
    try:
        status = folder.lstat()  # a link is never followed: somebody else may have put it there
    except OSError as error:
        return error.strerror or str(error)
    if not stat.S_ISDIR(status.st_mode):
        return "is not a folder"
    if status.st_uid != os.geteuid():
        return f"belongs to another user (uid {status.st_uid})"
    if status.st_mode & 0o077:
        return f"others may use it (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def _network() -> int:
    """Ports belong to a network namespace, which containers may not share."""
    try:
        return Path("/proc/self/ns/net").stat().st_ino
    except OSError:
        return 0


def store_prefix(attempt: int, meeting: int = 0) -> str:
    """Returns a prefix for keys; a script may launch more than once."""
    return f"lockstep/attempt-{attempt}/meeting-{meeting}"
