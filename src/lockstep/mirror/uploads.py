"""Brings a run's folder to a bucket. Only what has changed travels.

Checkpoints go newest first. What is deleted or missing here is never deleted there: retention looks at what is there,
by the same rule, after each checkpoint that arrived. A checkpoint that is being sent is pinned by hard links, so that
retention here does not delete it.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from lockstep.checkpoint import manifest
from lockstep.checkpoint.manifest import Damaged, Unreadable
from lockstep.checkpoint.retention import to_delete
from lockstep.checkpoint.storage import Branch, CheckpointStorage
from lockstep.config.schema import Keep
from lockstep.errors import LockstepError
from lockstep.mirror.bucket import CHECKPOINTS, Bucket
from lockstep.record.run_folder import START_FILES, Anchor

_PINNED = ".sending"
# What a resume needs beside a checkpoint: sent before it, and all other files after it.
_BEFORE_CHECKPOINTS = (*START_FILES, "metrics.jsonl")
_FAILURES_IN_A_ROW = 3  # of files, after which the service is taken to be what fails
# A bucket takes whole objects only, so a long file that grows is sent less often: 100 MB every 100 s. And a checkpoint
# does not wait for it.
_LONG, _LONGEST_WAIT = 4_000_000, 600.0


class NotSent(Exception):
    """A file or checkpoint was not sent; the cause says why."""


class Uploads:
    """What of a folder here has been sent to the one in a bucket. One push at a time, from any thread."""

    def __init__(self, bucket: Bucket, folder: Path, keep: Keep, warn: Callable[[str], object]) -> None:
        self._bucket, self._folder, self._keep, self._warn = bucket, folder, keep, warn
        self._warned: set[str] = set()
        self.storage = CheckpointStorage(folder / CHECKPOINTS)
        self._sent: dict[str, tuple[int, int]] = {}  # file -> its size and time when it was sent
        self._sent_at: dict[str, float] = {}
        self.there = bucket.digests()  # steps whose checkpoints were sent, or found there -> digest
        self._branch: str | None = None
        self._anchor: Anchor | None = None
        self._lock = threading.Lock()

    def push(self, at_most_every: float = 0.0) -> None:
        """Sends what is new. A file that was sent less than `at_most_every` seconds ago is left for the next time, and
        a long one for longer, unless that is 0.

        Raises FolderLost if the folder is not the one of the first push any more, and NotSent if something failed: all
        else was sent. A file that cannot be sent as it is (its name, its mode) causes a warning.
        """
        with self._lock:
            if self._anchor is None:
                self._anchor = Anchor(self._folder)
            self._anchor.check()
            to_send = self._missing()
            files = self._files()
            first = [each for each in files if each.relative_to(self._folder).as_posix() in _BEFORE_CHECKPOINTS]
            failed = self._push_files(first, at_most_every, at_once=bool(to_send))
            while to_send:
                self._push_checkpoint(*to_send[0])
                to_send = self._missing()
            failed += self._push_files([each for each in files if each not in first], at_most_every)
            if failed:
                raise failed[0]

    def close(self) -> None:
        with self._lock:
            if self._anchor is not None:
                self._anchor.close()
                self._anchor = None

    # Checkpoints

    def follow_branch(self) -> None:
        """Sets aside in the bucket what is newer than the checkpoint that this folder is resumed from."""
        with self._lock:
            self._follow(self.storage.branch())

    def _follow(self, branch: Branch | None) -> None:
        if branch is not None and branch.id != self._branch:
            self._bucket.set_aside_after(*branch)
            self._branch = branch.id

    def _missing(self) -> list[tuple[int, str]]:
        """Returns the checkpoints to send with their digests, newest first."""
        saved = self.storage.saved()
        old = to_delete(saved, self._keep.last, self._keep.best, self._keep.mode)
        steps = [each.step for each in reversed(saved) if each.step not in old]
        found = [(step, self._digest(self.storage.path(step))) for step in steps]
        return [(step, digest) for step, digest in found if digest is not None and self.there.get(step) != digest]

    def _push_checkpoint(self, step: int, digest: str) -> None:
        assert self._anchor is not None
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
                self._follow(branch)
                self._bucket.publish(folder, f"{CHECKPOINTS}/{folder.name}")
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
            self._bucket.retain(self._keep)
        except LockstepError:
            raise
        except Exception as error:
            raise NotSent("deleting old checkpoints") from error

    @contextlib.contextmanager
    def _pinned(self, step: int) -> Iterator[Path]:
        """Yields a copy by hard links, which retention does not delete; the original, on a disk without links."""
        original = self.storage.path(step)
        pinned = self._folder / _PINNED / original.name
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

    def _files(self) -> list[Path]:
        """Returns the files in the folder that are complete, without checkpoints."""
        found = []
        for path in sorted(self._folder.rglob("*")):
            parts = path.relative_to(self._folder).parts
            hidden = any(part.startswith(".") for part in parts) or path.suffix == ".partial"
            if not hidden and parts[0] != CHECKPOINTS and path.is_file() and not path.is_symlink():
                found.append(path)
        return found

    def _push_files(self, files: Iterable[Path], at_most_every: float, at_once: bool = False) -> list[NotSent]:
        """Returns those that failed. Stops if the service fails. Files that are not long may be due at once."""
        failed: list[NotSent] = []
        in_a_row = 0
        for file in files:
            path = file.relative_to(self._folder).as_posix()
            try:
                self._push_file(file, path, at_most_every, at_once)
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

    def _push_file(self, file: Path, path: str, at_most_every: float, at_once: bool) -> None:
        try:
            with file.open("rb") as stream:
                status = os.fstat(stream.fileno())
        except FileNotFoundError:
            return
        except OSError as error:
            self._warn_once(path, f"{_shown(path)} cannot be sent: it cannot be read: {error.strerror}")
            return
        known, wait = (status.st_size, status.st_mtime_ns), 0.0 if at_once else at_most_every
        if at_most_every and status.st_size > _LONG:
            wait = max(wait, min(status.st_size / 1e6, _LONGEST_WAIT))
        if self._sent.get(path) != known and time.monotonic() - self._sent_at.get(path, -math.inf) >= wait:
            try:
                self._bucket.send(file, path)
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
