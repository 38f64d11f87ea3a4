"""A pod's folder on one of its hosts: code, runs, and the files of its jobs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from lockstep.errors import ConfigError, LaunchError

# Of ended.json: padded to its size when the agent starts, and overwritten in place. JSON may escape a character to six.
_ENDED_BYTES, _LONGEST_SAID = 64 * 1024, 8 * 1024
# How long a command that starts a job keeps others out: it may copy for ten minutes, and be killed meanwhile.
_CLAIM_SECONDS = 900.0
_HOLD_SECONDS = 0.5  # whoever looks whether an agent is alive has its lock for a moment
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)


def checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r}: the name of a pod is made of letters, digits, '-', '_' and '.', and begins with "
                          "a letter or a digit")  # fmt: skip
    return name


class PodFolder:
    """`<directory>/<pod>`, readable by its owner alone."""

    def __init__(self, directory: str, pod: str) -> None:
        self.path = Path.home() / Path(directory).expanduser() / checked_name(pod)
        self.code, self.archive = self.path / "code", self.path / "push.tar"

    def job(self, job: str) -> Job:
        return Job(self.path / "jobs" / checked_name(job))

    def newest_job(self) -> Job | None:
        """Returns the job that is at work, or was started last: jobs are named by the clock of who started them."""
        with contextlib.suppress(OSError):
            jobs = [Job(each) for each in (self.path / "jobs").iterdir()]
            return max(jobs, key=lambda job: (job.is_alive, job.name), default=None)
        return None

    def claim(self, job: str) -> str | None:
        """Reserves this host's part of the pod while a job is started; returns the job that has reserved it already."""
        with self._claimed() as file:
            try:
                held = json.loads(file.read() or "{}")
                other, age = held.get("job", job), time.time() - held.get("time", 0.0)
            except (ValueError, AttributeError, TypeError):
                other, age = job, 0.0
            if other != job and 0 <= age < _CLAIM_SECONDS:  # else its clock was wrong
                return str(other)
            _overwrite(file, {"job": job, "time": time.time()})
            return None

    def release(self, job: str) -> None:
        """Removes the claim of a job that is at work, or was not started."""
        with contextlib.suppress(FileNotFoundError), self._claimed() as file:
            if job in file.read():
                _overwrite(file, {})

    @contextlib.contextmanager
    def _claimed(self) -> Iterator[IO[str]]:
        descriptor = os.open(self.path / "claim.json", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "r+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file

    def make(self) -> None:
        for each in (self.path.parent, self.path, self.code, self.path / "runs", self.path / "jobs"):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)


class Job:
    """The files of one job on one host."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.order, self.console = path / "order.json", path / "console.log"
        self.stop = path / "stop"  # a request, also to an agent that is not there yet
        self._agent, self._ended, self._lock = path / "agent.json", path / "ended.json", path / "agent.lock"

    def hold(self) -> None:
        """Locks the job for as long as the agent lives, which other containers see too.

        Also reserves room for the agent's last message, which it can write even if the disk is full by then.
        """
        self._write_ended(b"")
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + _HOLD_SECONDS
        while not _locked(descriptor, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise LaunchError(f"{self.path}: another agent is at work for this job")
            time.sleep(0.01)

    @property
    def is_alive(self) -> bool:
        with contextlib.suppress(OSError), self._lock.open("rb") as file:
            return not _locked(file.fileno(), fcntl.LOCK_SH)
        return False

    def has_begun(self) -> None:
        partial = self._agent.with_name(f".{self._agent.name}.partial")
        partial.write_text(json.dumps({"pid": os.getpid()}), encoding="utf-8")
        partial.replace(self._agent)

    def has_ended(self, exit_code: int, status: str, said: str = "") -> None:
        """Writes the agent's last message; `said` is the end of the console, which may have had no room on the disk."""
        content = {"exit_code": exit_code, "status": status, "said": said[:_LONGEST_SAID]}
        self._write_ended(json.dumps(content).encode())

    def _write_ended(self, content: bytes) -> None:
        with os.fdopen(os.open(self._ended, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600), "wb") as file:
            os.pwrite(file.fileno(), content.ljust(_ENDED_BYTES), 0)

    def unsaid(self) -> str:
        """Returns the lines of the agent's last message that its console has no room for."""
        said = str((self.ended() or {}).get("said", ""))
        with self.console.open("rb") as console:
            console.seek(max(0, console.seek(0, os.SEEK_END) - 2 * _ENDED_BYTES))
            printed = set(console.read().decode(errors="replace").splitlines())
        return "".join(f"{line}\n" for line in said.splitlines() if line not in printed)

    def agent(self) -> dict[str, Any] | None:
        """Returns what the agent wrote down, or None where it has not begun."""
        return _read(self._agent)

    def ended(self) -> dict[str, Any] | None:
        return _read(self._ended)

    def pid(self) -> int | None:
        """Returns the agent's process id while it is alive."""
        pid = (self.agent() or {}).get("pid")
        return pid if self.is_alive and isinstance(pid, int) and pid > 0 else None


def _locked(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _overwrite(file: IO[str], content: dict[str, Any]) -> None:
    file.seek(0)
    file.truncate()
    json.dump(content, file)
    file.flush()


def _read(file: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
