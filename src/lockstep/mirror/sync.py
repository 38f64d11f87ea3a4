"""Brings a run's folder to a place elsewhere, and what is needed of it back. Only what has changed travels.

Checkpoints go newest first. What is deleted or missing here is never deleted there: retention looks at what is there,
by the same rule, after each checkpoint that arrived. A checkpoint that is being sent is pinned by hard links, so that
retention here does not delete it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from lockstep.checkpoint import manifest
from lockstep.checkpoint.manifest import STEP_PREFIX, Damaged, Unreadable
from lockstep.checkpoint.retention import to_delete
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.config.schema import Keep
from lockstep.errors import LockstepError
from lockstep.record.run_folder import START_FILES, Anchor

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
_PINNED = ".sending"
# What a resume needs beside a checkpoint: sent before it, and all other files after it.
_BEFORE_CHECKPOINTS = (*START_FILES, "metrics.jsonl")
_FAILURES_IN_A_ROW = 3  # of files, after which the service is taken to be what fails


class NotSent(Exception):
    """A file or checkpoint was not sent; the cause says why."""


def step_of(path: str) -> int:
    return int(path.rpartition(STEP_PREFIX)[2])


class FolderSync:
    """Syncs a folder here with the one of a Remote. One push at a time, from any thread."""

    def __init__(
        self,
        remote: Remote,
        folder: Path,
        files: Callable[[], Iterable[Path]],
        keep: Keep | None = None,
        warn: Callable[[str], object] = logger.warning,
    ) -> None:
        """`files` returns those to push beside checkpoints; `keep` is given if checkpoints are pushed as well."""
        self.remote, self.folder = remote, folder
        self._files, self._keep, self._warn = files, keep, warn
        self._warned: set[str] = set()
        self.storage = CheckpointStorage(folder / CHECKPOINTS)
        self._sent: dict[str, tuple[int, int]] = {}  # file -> its size and time when it was sent
        self._sent_at: dict[str, float] = {}
        self.there: dict[int, str] = {}  # steps whose checkpoints were sent, or found there -> digest
        self._branch: str | None = None
        self._anchor: Anchor | None = None
        self._lock = threading.Lock()

    def pull_checkpoint(self, step: int | None = None, best: bool = False, mode: str = "min") -> int | None:
        """Fetches the checkpoint to restore, the newest whole one unless said; returns its step, or None.

        It gets its name here once all of it has arrived and matches its digests. One that does not is passed over.
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
        """Returns what is wrong with it, if anything; then it is not kept."""
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
                self.there[step_of(path)] = str(manifest.read(final)["digest"])
            return problem
        finally:
            shutil.rmtree(arriving, ignore_errors=True)

    def pull_files(self, paths: Iterable[str]) -> None:
        for path in paths:
            for name, size in self.remote.files(path):
                place = self.folder / name
                place.parent.mkdir(parents=True, exist_ok=True)
                self.remote.fetch(name, size, place)

    def push(self, at_most_every: float = 0.0) -> None:
        """Sends what is new. A file that was sent less than `at_most_every` seconds ago is left for the next time.

        Raises FolderLost if the folder is not the one of the first push any more, and NotSent if something failed: all
        else was sent. A file that cannot be sent as it is (its name, its mode) causes a warning.
        """
        with self._lock:
            if self._anchor is None:
                self._anchor = Anchor(self.folder)
            self._anchor.check()
            to_send = self._missing()
            files = list(self._files())
            first = [each for each in files if each.relative_to(self.folder).as_posix() in _BEFORE_CHECKPOINTS]
            every = 0.0 if to_send else at_most_every
            failed = self._push_files(first, every)
            while to_send:
                self._push_checkpoint(*to_send[0])
                to_send = self._missing()
            failed += self._push_files([each for each in files if each not in first], every)
            if failed:
                raise failed[0]

    def close(self) -> None:
        with self._lock:
            if self._anchor is not None:
                self._anchor.close()
                self._anchor = None

    # Checkpoints

    def _missing(self) -> list[tuple[int, str]]:
        """Returns the checkpoints to send with their digests, newest first."""
        if self._keep is None:
            return []
        saved = self.storage.saved()
        old = to_delete(saved, self._keep.last, self._keep.best, self._keep.mode)
        steps = [each.step for each in reversed(saved) if each.step not in old]
        found = [(step, self._digest(self.storage.path(step))) for step in steps]
        return [(step, digest) for step, digest in found if digest is not None and self.there.get(step) != digest]

    def _push_checkpoint(self, step: int, digest: str) -> None:
        assert self._keep is not None and self._anchor is not None
        with self._pinned(step) as folder:
            if self._digest(folder) != digest:
                return  # deleted, or saved anew, before it was pinned
            size, began = sum(each["bytes"] for each in manifest.read(folder)["files"].values()), time.monotonic()
            # After the list of checkpoints: the branch is noted before anything of it is saved.
            branch = self.storage.branch()
            self._anchor.check()
            if branch is not None and branch.id != self._branch and not self.storage.path(step).exists():
                return  # the run resumed from an earlier step: it may be of the branch that was left
            try:
                if branch is not None and branch.id != self._branch:
                    self.remote.set_aside_after(*branch)
                    self._branch = branch.id
                self.remote.publish(folder, f"{CHECKPOINTS}/{folder.name}")
            except LockstepError:
                raise
            except Exception as error:
                if folder.parent != self.storage.folder or folder.exists():
                    raise NotSent(folder.name) from error
                return  # it could not be pinned, and retention has deleted it
        self.there[step] = digest
        self._anchor.check()
        if not self.storage.path(step).exists():
            seconds = time.monotonic() - began
            self._warn_once(
                "slow",
                f"is slower than this run saves: step {step} took {seconds:.1f} s ({size / 1e6:.1f} MB, "
                f"{size / 1e6 / max(seconds, 1e-3):.2f} MB/s) and was deleted here meanwhile. The newest goes first, "
                "and some never get there: save less often (checkpoint.every)",
            )
        try:
            self.remote.retain(self._keep)
        except LockstepError:
            raise
        except Exception as error:
            raise NotSent("deleting old checkpoints") from error

    @contextlib.contextmanager
    def _pinned(self, step: int) -> Iterator[Path]:
        """Yields a copy by hard links, which retention does not delete; the original, on a disk without links."""
        original = self.storage.path(step)
        pinned = self.folder / _PINNED / original.name
        try:
            shutil.rmtree(pinned.parent, ignore_errors=True)
            try:
                pinned.mkdir(parents=True)
                for file in original.iterdir():
                    os.link(file, pinned / file.name)
            except OSError:
                yield original
            else:
                yield pinned
        finally:
            shutil.rmtree(pinned.parent, ignore_errors=True)

    # Files

    def _push_files(self, files: Iterable[Path], at_most_every: float) -> list[NotSent]:
        """Returns those that failed. Stops if the service fails."""
        failed: list[NotSent] = []
        in_a_row = 0
        for file in files:
            path = file.relative_to(self.folder).as_posix()
            if time.monotonic() - self._sent_at.get(path, float("-inf")) < at_most_every:
                continue
            try:
                self._push_file(file, path)
                in_a_row = 0
            except LockstepError:
                raise
            except Exception as error:
                failed.append(NotSent(_shown(path)))
                failed[-1].__cause__ = error
                in_a_row += 1
                if in_a_row == _FAILURES_IN_A_ROW:
                    break
        return failed

    def _push_file(self, file: Path, path: str) -> None:
        try:
            with file.open("rb") as stream:
                status = os.fstat(stream.fileno())
        except FileNotFoundError:
            return
        except OSError as error:
            self._warn_once(path, f"{_shown(path)} cannot be sent: it cannot be read: {error.strerror}")
            return
        known = (status.st_size, status.st_mtime_ns)
        if self._sent.get(path) != known:
            try:
                self.remote.send(file, path)
            except UnicodeError:
                self._warn_once(path, f"{_shown(path)} cannot be sent: its name is not UTF-8")
                return
            self._sent[path], self._sent_at[path] = known, time.monotonic()

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            self._warn(text)

    @staticmethod
    def _digest(folder: Path) -> str | None:
        """Returns what distinguishes two checkpoints of a step; None without a whole manifest."""
        try:
            return str(manifest.read(folder)["digest"])
        except (Damaged, Unreadable):
            return None


def _shown(path: str) -> str:
    return path.encode("utf-8", "backslashreplace").decode()


class Remote(Protocol):
    """Where a run's folder is kept as well. Paths are relative to it, with slashes. All failures raise."""

    def to_try(self, step: int | None = None, best: bool = False, mode: str = "min") -> list[str]:
        """Returns the paths of checkpoints that look whole, in the order to try: of a step, the best, else the newest.
        Raises CheckpointError if the step has none, or if there are some and none looks whole."""

    def files(self, path: str) -> list[tuple[str, int]]:
        """Returns a file, or all files below a folder, with their sizes."""

    def fetch(self, path: str, size: int, place: Path) -> None:
        """Writes a file of so many bytes to a place on this host's disk."""

    def send(self, file: Path, path: str) -> None:
        """Replaces a file there."""

    def publish(self, folder: Path, path: str) -> None:
        """Sends a checkpoint, so that it counts only once all of it is there."""

    def retain(self, keep: Keep) -> None:
        """Deletes the checkpoints there that need not be kept, by what is there: never the newest whole one."""

    def set_aside_after(self, step: int | None, branch: str) -> None:
        """Renames checkpoints newer than a step (all, without one), so that nothing counts or deletes them.

        Those published since the run resumed from that step, which have this `branch`, stay.
        """
