"""The files of a folder by their digests: what a host has is told by it, and what it lacks travels.

Every file is read every time, here and on every host: a thousand of them take a few hundredths of a second, and
nothing has to be trusted about times and sizes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lockstep.config.schema import RunConfig
from lockstep.errors import ConfigError

# Code is small; a dataset or a checkpoint in its folder is a mistake that would be pushed to every host.
MOST_BYTES = 512 * 1024 * 1024
_CHUNK = 1024 * 1024

Digests = Mapping[str, str]


def digests(folder: Path, only_travelling: bool = True) -> dict[str, str]:
    """Every file of a folder by its path there, with its digest."""
    found: dict[str, str] = {}
    if not folder.is_dir():
        return found
    if only_travelling:
        from lockstep.config.objects import travelling

        names = travelling(folder)
    else:
        names = _all_files(str(folder))
    left = MOST_BYTES
    for name in names:
        descriptor = os.open(f"{folder}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            left -= os.fstat(descriptor).st_size
            if left < 0:
                raise ConfigError(
                    f"{folder}: the task's folder has more than {MOST_BYTES >> 20} MB, and all of it would be copied "
                    "to every host. Put data elsewhere, or the task into a folder of its own"
                )
            found[name] = _digest(descriptor)
        finally:
            os.close(descriptor)
    return found


def digest(files: Digests) -> str:
    """Of all files together."""
    return hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()


def _digest(descriptor: int) -> str:
    running = hashlib.sha256()
    while data := os.read(descriptor, _CHUNK):
        running.update(data)
    return running.hexdigest()


def _all_files(folder: str, below: str = "") -> Iterator[str]:
    """What is compiled on the host belongs to nobody's code."""
    with os.scandir(folder) as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    for entry in ordered:
        if entry.is_dir():
            if not entry.is_symlink() and entry.name != "__pycache__":
                yield from _all_files(entry.path, f"{below}{entry.name}/")
        elif entry.is_file():
            yield below + entry.name


@dataclass(frozen=True)
class Code:
    """The files that travel, and how the task is called on the hosts."""

    folder: Path | None
    task: str

    @classmethod
    def of(cls, config: RunConfig) -> Code:
        module, _, name = config.task.type.rpartition(":")
        if not module.endswith(".py"):
            return cls(None, config.task.type)  # a module that is installed on the hosts too
        return cls(Path(module).parent, f"{Path(module).name}:{name}")

    def digests(self) -> dict[str, str]:
        return digests(self.folder) if self.folder is not None else {}

    def task_there(self, path: str) -> str:
        return self.task if self.folder is None else str(PurePosixPath(path) / "code" / self.task)
