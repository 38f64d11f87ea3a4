"""A pod's folder on one of its hosts: code, runs, and the files of its jobs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError, LaunchError

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
        """Returns the job that was started last: they are named by their time."""
        with contextlib.suppress(OSError):
            names = sorted(each.name for each in (self.path / "jobs").iterdir())
            return self.job(names[-1]) if names else None
        return None

    def make(self) -> None:
        for each in (self.path.parent, self.path, self.code, self.path / "runs", self.path / "jobs"):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)


class Job:
    """The files of one job on one host."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.order, self.console = path / "order.json", path / "console.log"
        self._agent, self._ended, self._lock = path / "agent.json", path / "ended.json", path / "agent.lock"

    def hold(self) -> None:
        """Locks the job for as long as the agent lives, which other containers see too."""
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise LaunchError(f"{self.path}: another agent is at work for this job") from None

    @property
    def is_alive(self) -> bool:
        try:
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def has_begun(self) -> None:
        _write(self._agent, {"pid": os.getpid()})

    def has_ended(self, exit_code: int, status: str) -> None:
        with contextlib.suppress(OSError):  # a full disk: the console has said so
            _write(self._ended, {"exit_code": exit_code, "status": status})

    def agent(self) -> dict[str, Any] | None:
        """Returns what the agent wrote down, or None where it has not begun."""
        return _read(self._agent)

    def ended(self) -> dict[str, Any] | None:
        return _read(self._ended)

    def pid(self) -> int | None:
        """Returns the agent's process id while it is alive."""
        pid = (self.agent() or {}).get("pid")
        return pid if self.is_alive and isinstance(pid, int) and pid > 0 else None


def _write(file: Path, content: dict[str, Any]) -> None:
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(json.dumps(content), encoding="utf-8")
    partial.replace(file)


def _read(file: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
