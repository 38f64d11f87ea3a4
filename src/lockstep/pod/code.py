"""The files of a task that travel to hosts, and how the task is called there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lockstep.config.schema import RunConfig
from lockstep.pod.digests import digests


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
