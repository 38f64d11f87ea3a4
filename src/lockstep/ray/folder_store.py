"""The run's folder on the driver's disk, for workers whose nodes have disks of their own: what the mailbox keeps there.

Runs beside the driver, for ranks of its own job. Paths are relative to the run's folder and never lead out of it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.checkpoint.writer import delete_old
from lockstep.config.schema import Keep
from lockstep.record.run_folder import Anchor


class FolderStore:
    def __init__(self, folder: str) -> None:
        self._folder = Path(folder).resolve()
        self._anchor = Anchor(self._folder)
        self._checkpoints = CheckpointStorage(self._folder / "checkpoints", self._anchor.check)

    def checkpoint(self, step: int | None = None, best: bool = False, mode: str = "min") -> str | None:
        """The path of the checkpoint of a step, of the best whole one, or of the newest whole one."""
        if step is not None:
            self._checkpoints.require(step)
        else:
            step = self._checkpoints.best_good(mode) if best else self._checkpoints.newest_good()
            if step is None and not best and (there := self._checkpoints.steps()):
                raise self._checkpoints.none_usable({each: str(self._checkpoints.problem(each)) for each in there})
        return None if step is None else str(self._checkpoints.path(step).relative_to(self._folder))

    def set_aside_after(self, step: int | None) -> None:
        """Set aside checkpoints that are newer than what the run goes on from, as is done where it is saved."""
        self._checkpoints.set_aside_after(step)

    def files(self, path: str) -> list[tuple[str, int]]:
        """A file, or all files below a folder, with their sizes; none where there is nothing."""
        place = self._inside(path)
        found = [place] if place.is_file() else [each for each in place.rglob("*") if each.is_file()]
        return [(str(each.relative_to(self._folder)), each.stat().st_size) for each in sorted(found)]

    def read(self, path: str, offset: int, size: int) -> bytes:
        with self._inside(path).open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def write(self, path: str, offset: int, data: bytes) -> None:
        place = self._inside(path)
        self._anchor.check()  # a folder that was moved is not made anew
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.open("r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(data)

    def rename(self, path: str, final: str) -> None:
        """Give a folder that is complete its final name."""
        place = self._inside(final)
        shutil.rmtree(place, ignore_errors=True)
        self._inside(path).rename(place)

    def retain(self, keep: Keep) -> None:
        """Delete checkpoints that need not be kept, as is done where they are saved."""
        delete_old(self._checkpoints, max(self._checkpoints.steps(), default=0), keep)

    def _inside(self, path: str) -> Path:
        place = (self._folder / path).resolve()
        if place == self._folder or not place.is_relative_to(self._folder):
            raise ValueError(f"{path!r} is not below the run's folder")
        return place
