"""What keeps a run's folder elsewhere, as far as bringing it there and back is concerned."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from lockstep.config.schema import Keep


class Remote(Protocol):
    """Paths are relative to the run's folder, with slashes. Whatever fails raises."""

    def to_try(self, step: int | None = None, best: bool = False, mode: str = "min") -> list[str]:
        """The paths of checkpoints that look whole, those to restore first first: the one of a step, the best, else
        the newest. CheckpointError where the step has none, or where there are some and none looks whole."""

    def files(self, path: str) -> list[tuple[str, int]]:
        """A file, or all files below a folder, with their sizes; none where there is nothing."""

    def fetch(self, path: str, size: int, place: Path) -> None:
        """Write a file of so many bytes to a place on this host's disk."""

    def send(self, file: Path, path: str) -> None:
        """Put a file there, in place of what was there."""

    def publish(self, folder: Path, path: str) -> None:
        """Put a checkpoint there, so that it counts only once all of it is there."""

    def retain(self, keep: Keep) -> None:
        """Delete the checkpoints there that need not be kept, by what is there: never the newest whole one."""

    def set_aside_after(self, step: int | None, branch: str) -> None:
        """Give checkpoints newer than a step (all, without one) names by which nothing counts or deletes them.

        Not those that were published since the run went on from that step, which `branch` tells.
        """
