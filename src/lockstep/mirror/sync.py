"""Brings a run's folder to a place elsewhere, and what is needed of it back. Only what has changed travels.

Checkpoints there follow those here: what is new is published, what retention deleted is removed, and before the first
new one, what is newer than the run went on from is set aside.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from lockstep.checkpoint import manifest
from lockstep.checkpoint.manifest import STEP_PREFIX, Damaged, Unreadable
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.mirror.remote import Remote

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"


def step_of(path: str) -> int:
    """Of the path of a checkpoint."""
    return int(path.rpartition(STEP_PREFIX)[2])


class FolderSync:
    """Between a folder here and the one that a Remote stands for. One push at a time, from whichever thread."""

    def __init__(
        self, remote: Remote, folder: Path, files: Callable[[], Iterable[Path]], checkpoints: bool = True
    ) -> None:
        """`files` are those to push beside checkpoints now; `checkpoints`: whether they are ours to push."""
        self.remote, self.folder = remote, folder
        self._files, self._checkpoints = files, checkpoints
        self.storage = CheckpointStorage(folder / CHECKPOINTS)
        self._sent: dict[str, tuple[int, int]] = {}  # file -> its size and time when it was sent
        self._sent_at: dict[str, float] = {}
        self.there: dict[int, str] = {}  # steps whose checkpoints are there, and were here too -> digest
        self.published: list[int] = []  # since the beginning
        self._lock = threading.Lock()

    def pull_checkpoint(self, step: int | None = None, best: bool = False, mode: str = "min") -> int | None:
        """The checkpoint to restore, the newest whole one unless said; its step, or None where there is none.

        It has its own name here once all of it has arrived and matches its digests. One that does not is passed over.
        """
        damaged = {}
        for path in self.remote.to_try(step, best, mode):
            problem = self._pull_folder(path)
            if problem is None:
                return step_of(path)
            damaged[step_of(path)] = problem
            logger.warning("checkpoint %s, as it came from elsewhere, is damaged and is passed over: %s", path, problem)
        if damaged:
            raise self.storage.none_usable(damaged)
        return None

    def _pull_folder(self, path: str) -> str | None:
        """What is wrong with it, if anything; then it is not kept."""
        final = self.folder / path
        arriving = final.with_name(f".partial-{final.name}-sync")
        shutil.rmtree(arriving, ignore_errors=True)
        arriving.mkdir(parents=True)
        try:
            for name, size in self.remote.files(path):
                self.remote.fetch(name, size, arriving / Path(name).name)
            problem = manifest.problem(arriving)
            if problem is None:
                shutil.rmtree(final, ignore_errors=True)
                arriving.rename(final)
            return problem
        finally:
            shutil.rmtree(arriving, ignore_errors=True)

    def pull_files(self, paths: Iterable[str]) -> None:
        for path in paths:
            for name, size in self.remote.files(path):
                place = self.folder / name
                place.parent.mkdir(parents=True, exist_ok=True)
                self.remote.fetch(name, size, place)

    def both_have(self, steps: Iterable[int]) -> None:
        """What is there already of the checkpoints that are here."""
        self.there = {step: digest for step in steps if (digest := self._digest(step)) is not None}

    def push(self, at_most_every: float = 0.0) -> None:
        """Bring there what is new. A file that was sent so many seconds ago or less is left for the next time.

        Files go before the checkpoints that were there when they did: whoever goes on from one has its rows.
        """
        with self._lock:
            here = self._whole() if self._checkpoints else {}
            new = any(self.there.get(step) != digest for step, digest in here.items())
            for file in self._files():
                path = file.relative_to(self.folder).as_posix()
                if new or time.monotonic() - self._sent_at.get(path, float("-inf")) >= at_most_every:
                    self._push_file(file, path)
            if self._checkpoints:
                self._push_checkpoints(here)

    def _whole(self) -> dict[int, str]:
        return {step: digest for step in self.storage.steps() if (digest := self._digest(step)) is not None}

    def _push_checkpoints(self, here: dict[int, str]) -> None:
        gone = set(self.there) - set(self.storage.steps())
        aside = {step for step in gone if self.storage.set_aside(step)}
        new = sorted(step for step, digest in here.items() if self.there.get(step) != digest)
        if new and not self.published:
            # As it was done here before the first save.
            self.remote.set_aside_after(max(set(self.there) - aside, default=None))
        for step in new:
            with self._unless_deleted(step):
                self.remote.publish(self.storage.path(step), self._path(step))
                self.there[step] = here[step]
                self.published.append(step)
        for step in gone:
            if step not in aside:
                self.remote.remove(self._path(step))
            del self.there[step]

    @contextlib.contextmanager
    def _unless_deleted(self, step: int) -> Iterator[None]:
        """Retention may delete a checkpoint that is on its way: then it need not arrive."""
        try:
            yield
        except (OSError, Damaged, Unreadable):
            if self.storage.path(step).exists():
                raise
            self.remote.remove(self._path(step))

    def _push_file(self, file: Path, path: str) -> None:
        try:
            status = file.stat()
        except FileNotFoundError:
            return
        known = (status.st_size, status.st_mtime_ns)
        if self._sent.get(path) != known:
            self.remote.send(file, path)
            self._sent[path], self._sent_at[path] = known, time.monotonic()

    def _path(self, step: int) -> str:
        return f"{CHECKPOINTS}/{self.storage.path(step).name}"

    def _digest(self, step: int) -> str | None:
        """What tells one checkpoint of a step from another; none for what is no whole manifest."""
        try:
            return str(manifest.read(self.storage.path(step))["digest"])
        except (Damaged, Unreadable):
            return None
