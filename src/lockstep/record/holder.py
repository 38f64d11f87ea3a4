"""Who holds a run's folder: written into its lock, read by whoever finds it held."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_LONGEST = 4096  # of what is read of a file that anybody may have written


@dataclass(frozen=True)
class Holder:
    """A process, so that another one can say whether it is still there."""

    what: str  # it is to the run
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
        """Whom a lock names; nobody where it says nothing that can be understood."""
        try:
            told = json.loads(data[:_LONGEST].decode())
            texts = [told[name] for name in ("what", "host", "since", "machine", "started")]
            if not all(isinstance(each, str) and each.isprintable() for each in texts) or type(told["pid"]) is not int:
                return None
            what, host, since, machine, started = texts
            return cls(what, host, told["pid"], since, machine, started)
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    @property
    def is_here(self) -> bool:
        """Whether it is, or was, a process that this one would see."""
        return self.machine == _machine()

    @property
    def is_gone(self) -> bool:
        """For one that is here: whether it has ended, even where its number belongs to another process by now."""
        return _start_of(self.pid) != self.started


def _machine() -> str:
    """This boot of this host, and this namespace of process numbers: two containers may share a name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116  a link that leads to no file
    except OSError:
        return socket.gethostname()


def _start_of(pid: int) -> str | None:
    """When a process was started, in ticks since the boot; none where there is no such process, or a dead one."""
    try:
        _, _, rest = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
    except OSError:
        return None
    state, *numbers = rest.split()
    return None if state in "ZX" else numbers[18]
