"""A folder of checkpoints, each of them whole or absent.

A checkpoint is a folder `step-NNNNNNNN` with safetensors files, `state.json` and, written last, `manifest.json` with
the size and digests of every other file. It is filled under a temporary name and appears under its own by one rename.
What is not to be gone on with is set aside under another name, and never counted, resumed from or deleted.

Whatever changes the folder is for rank 0 alone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from lockstep import run_files
from lockstep.checkpoint import manifest
from lockstep.checkpoint.manifest import STEP_PREFIX, Damaged, Unreadable, step_name
from lockstep.checkpoint.retention import Saved, best_first
from lockstep.errors import CheckpointError
from lockstep.shown import size as size_text

if TYPE_CHECKING:
    from lockstep.distributed.group import Group

logger = logging.getLogger(__name__)

_TEMPORARY = ".partial-"
_REPLACED = f"{_TEMPORARY}replaced-"
_BRANCH_FILE, _LONGEST_BRANCH = ".branch.json", 4096
BEST = "best"  # a link to the best of them
_DAMAGED, _ASIDE = "damaged-", "aside-"  # before the name of a checkpoint that is not whole; that is, but abandoned


T = TypeVar("T")


class Branch(NamedTuple):
    """What a run went on from: a step, or nothing where it began anew; and what tells it from another such start."""

    step: int | None
    id: str


class Removed(CheckpointError):
    """Retention, or somebody, removed a checkpoint while it was read."""


class CheckpointStorage:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, guard: Callable[[], None] = lambda: None) -> None:
        """`guard` raises where the run's folder is not the run's any more: asked before anything is changed."""
        self.folder, self._guard = folder, guard
        self._was_here = False
        self._damaged: set[int] = set()  # found to be so by whoever read all of them

    # What there is

    def path(self, step: int) -> Path:
        return self.folder / step_name(step)

    def steps(self) -> list[int]:
        """Steps with a checkpoint under its final name, oldest first."""
        try:
            # Not by a pattern: a folder that may not be read would look like an empty one.
            found = [manifest.step_of(entry.name) for entry in self.folder.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise CheckpointError(
                f"{self.folder}: cannot be read: {error.strerror}. There may be checkpoints in it: make it readable "
                "for this user again (owner, permissions, mount), and resume"
            ) from None
        return sorted(step for step in found if step is not None)

    def saved(self) -> list[Saved]:
        """What retention needs to know of each checkpoint, by its manifest and the sizes of its files.

        One that cannot be read is not for retention to judge, any more than one that is damaged.
        """
        return [self._saved(step) for step in self.steps()]

    def require(self, step: int) -> None:
        """Refuse a step that has no checkpoint, naming those that there are."""
        if step in self.steps():
            return
        there = ", ".join(map(str, self.steps())) or "none"
        aside = self.set_aside(step)
        hint = f"; {aside[-1].name} was set aside: name it {self.path(step).name} to use it" if aside else ""
        raise CheckpointError(f"{self.folder}: there is no checkpoint of step {step} (steps with one: {there}){hint}")

    def set_aside(self, step: int) -> list[Path]:
        """What was set aside of a step, oldest first."""
        return [
            path for kind in (_DAMAGED, _ASIDE) for path in sorted(self.folder.glob(f"{kind}{self.path(step).name}*"))
        ]

    def all_set_aside(self) -> list[str]:
        """The names of all that was set aside, of whichever step."""
        return sorted(path.name for kind in (_DAMAGED, _ASIDE) for path in self.folder.glob(f"{kind}{STEP_PREFIX}*"))

    def to_try(self, step: int | None = None, best: bool = False, mode: str = "min") -> list[int]:
        """The steps to restore from, those to try first first: the one asked for, the best, else the newest."""
        if step is not None:
            self.require(step)
            return [step]
        if best:
            return [each.step for each in self._best(mode)]
        return self.steps()[::-1]

    def newest_good(self) -> int | None:
        """The newest step whose checkpoint is whole, by reading all of it; each that is not is named in a warning."""
        return self._first_good(self.to_try())

    def best_good(self, mode: str) -> int | None:
        """Of those that are whole, by reading all of it, the one with the best value in its manifest."""
        return self._first_good(self.to_try(best=True, mode=mode))

    def problem(self, step: int) -> str | None:
        """What is wrong with a checkpoint, by reading every file and comparing it with the manifest; raises Removed."""
        try:
            self.look(step, manifest.check)
            return None
        except Damaged as error:
            return str(error)
        except Unreadable as error:
            raise self.unreadable(step, str(error)) from None

    def look(self, step: int, read: Callable[[Path], T]) -> T:
        """Returns what `read` finds in a checkpoint of a run that may be at work.

        Reads again where the run has replaced the checkpoint meanwhile, and raises Removed where it has removed it:
        what is missing then is no damage.
        """
        while True:
            before = _identity(self.path(step))
            try:
                return read(self.path(step))
            except (Damaged, Unreadable):
                after = _identity(self.path(step))
                if after is None:
                    raise Removed(f"{self.path(step)} was removed while it was read") from None
                if after == before:
                    raise

    def pass_over(self, step: int, problem: str) -> None:
        """Say that a checkpoint is damaged, and remember it until it is set aside."""
        self._damaged.add(step)
        logger.warning("checkpoint %s is damaged and is passed over: %s", self.path(step).name, problem)

    def unreadable(self, step: int, problem: str) -> CheckpointError:
        """What to tell of a checkpoint that cannot be read: to pass it over would be to lose it."""
        path = self.path(step)
        return CheckpointError(
            f"{path}: {problem}. It may be whole, so it is neither passed over nor set aside: make it readable for "
            "this user again (owner, permissions, mount, disk), and resume. If it is lost for good, move "
            f"{path.name} out of {self.folder}: the one before it is used then"
        )

    def none_usable(self, damaged: Mapping[int, str]) -> CheckpointError:
        """What to tell where there are checkpoints and none of them is whole: to begin anew would be to lose them."""
        each = "; ".join(f"{self.path(step).name}: {problem}" for step, problem in damaged.items())
        count = len(damaged)
        none = f"of {count} checkpoints none can be used" if count > 1 else "the only checkpoint cannot be used"
        return CheckpointError(
            f"{self.folder}: {none}, and nothing was begun anew ({each}). Put "
            f"back a good one. To start over on purpose, move or delete {self.folder}, and resume"
        )

    # What changes it

    def create(self, step: int, size: int, fill: Callable[[Path], None]) -> Path:
        """Let `fill` write a checkpoint of about so many bytes into a folder, and give that its name.

        On any failure nothing of it stays, and those before it are untouched.
        """
        final = self.path(step)
        temporary = self.folder / f"{_TEMPORARY}{final.name}-{os.getpid()}"
        self._guard()
        try:
            self._make_folder()
            _require_space(self.folder, size)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            fill(temporary)
            sync_folder(temporary)
            self._publish(temporary, final)
        except OSError as error:
            self._guard()  # which knows better where the folder went away just now
            raise CheckpointError(_cannot_write(final, size, error)) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # gone already where all went well
        return final

    def delete(self, step: int) -> None:
        """Remove a checkpoint so that it is never seen half removed."""
        self._guard()
        self._unlink_best(step)
        doomed = self.folder / f"{_TEMPORARY}deleted-{step:08d}-{os.getpid()}"
        _rename(self.path(step), doomed, "deleted")
        _remove(doomed)

    def link_best(self, step: int | None) -> None:
        """Have `best` lead to the checkpoint of a step, or be absent; on a disk that has no links, it is absent."""
        link = self.folder / BEST
        if link.exists() and not link.is_symlink():
            return  # somebody's own
        temporary = self.folder / f"{_TEMPORARY}{BEST}-{os.getpid()}"
        with contextlib.suppress(OSError):
            if step is None:
                link.unlink(missing_ok=True)
            elif _leads_to(link) != self.path(step).name:
                temporary.unlink(missing_ok=True)
                temporary.symlink_to(self.path(step).name)
                temporary.replace(link)

    def _unlink_best(self, step: int) -> None:
        """Before its checkpoint gets another name: a link that leads nowhere is worse than none."""
        if _leads_to(self.folder / BEST) == self.path(step).name:
            with contextlib.suppress(OSError):
                (self.folder / BEST).unlink()

    def set_aside_after(self, step: int | None) -> list[Path]:
        """Set aside all checkpoints newer than the one that the run goes on from; all of them where it begins anew.

        They are damaged, or of a branch that was left by restoring an older one: steps that are about to be reached
        again, and whatever counts them would count them for newer than what is saved from here on.
        """
        why = (
            f"newer than {self.path(step).name}, which the run goes on from"
            if step is not None
            else "of before this run"
        )
        self._guard()
        self._note_branch(step)
        moved = []
        for newer in [each for each in self.steps() if step is None or each > step]:
            moved.append(self._rename_aside(newer))
            logger.warning(
                "%s is %s: set aside as %s, where nothing reads, counts or deletes it",
                self.path(newer).name, why, moved[-1].name,
            )  # fmt: skip
        return moved

    def branch(self) -> Branch | None:
        """Returns what the checkpoints of this folder went on from last."""
        try:
            told = json.loads(run_files.read_bytes(self.folder / _BRANCH_FILE, _LONGEST_BRANCH, depth=2))
            return Branch(told["from"], told["id"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{self.folder / _BRANCH_FILE} cannot be read: {error}. Delete it") from None

    def _note_branch(self, step: int | None) -> None:
        """For those who keep a copy of the folder: written before anything of the branch is."""
        file = self.folder / _BRANCH_FILE
        try:
            self._make_folder()
            run_files.write(file, json.dumps({"from": step, "id": secrets.token_hex(8)}), depth=2)
        except OSError as error:
            self._guard()
            raise CheckpointError(_cannot_write(file, _LONGEST_BRANCH, error)) from error

    def sweep(self) -> None:
        """Remove what an interrupted write or delete left behind; only while nobody else writes here."""
        for leftover in self.folder.glob(f"{_TEMPORARY}*"):
            final = self.folder / leftover.name.removeprefix(_REPLACED).rpartition("-")[0]
            if leftover.name.startswith(_REPLACED) and not final.exists():
                logger.info("%s is back: the save that was to replace it was interrupted", final.name)
                leftover.rename(final)
                continue
            logger.info("removing %s, left by a save that was interrupted", leftover.name)
            _remove(leftover)

    # Who else sees it

    def who_sees(self, group: Group) -> list[bool]:
        """For every rank whether its host has this very folder, and not one of its own under the same name.

        All ranks call it. Rank 0 leaves a file there for the moment, under a name that nobody has looked for before.
        """
        name = group.agree(self._leave_token, "whether all ranks see the checkpoints")
        mine = group.rank == 0 or (name is not None and (self.folder / name).exists())
        sees = group.gather(mine, "which ranks see the checkpoints")
        if group.rank == 0 and name is not None:
            (self.folder / name).unlink(missing_ok=True)
        return sees

    def _leave_token(self) -> str | None:
        """Its name; None where nothing can be written, which is for whoever has to write to say."""
        token = self.folder / f"{_TEMPORARY}seen-{secrets.token_hex(8)}"
        self._guard()
        try:
            self._make_folder()
            token.touch()
        except OSError:
            return None
        return token.name

    # Inside

    def _make_folder(self) -> None:
        """Inside of the run's folder, which is never made anew here: it would be one without a config."""
        if self._was_here and not self.folder.exists():
            logger.warning("%s is gone, with what was saved in it: made anew", self.folder)
        self.folder.mkdir(exist_ok=True)
        self._was_here = True

    def _publish(self, temporary: Path, final: Path) -> None:
        """From its temporary name to its own; the same step reached again takes the place of what was there."""
        replaced = None
        if final.exists():
            replaced = self.folder / f"{_REPLACED}{final.name}-{os.getpid()}"
            final.rename(replaced)
        temporary.rename(final)
        sync_folder(self.folder)
        if replaced is not None:
            _remove(replaced)

    def _rename_aside(self, step: int) -> Path:
        kind = _DAMAGED if step in self._damaged or self._is_damaged(step) else _ASIDE
        aside = self.folder / f"{kind}{self.path(step).name}"
        number = 1
        while aside.exists():
            number += 1
            aside = aside.with_name(f"{kind}{self.path(step).name}-{number}")
        self._unlink_best(step)
        _rename(self.path(step), aside, "set aside")
        self._damaged.discard(step)
        return aside

    def _saved(self, step: int) -> Saved:
        try:
            return self._looked_at(step)
        except (Damaged, Unreadable):
            return Saved(step, whole=False)

    def _is_damaged(self, step: int) -> bool:
        try:
            self._looked_at(step)
        except Damaged:
            return True
        except Unreadable:
            return False
        return False

    def _looked_at(self, step: int) -> Saved:
        told = manifest.read(self.path(step))
        manifest.check_sizes(self.path(step), told)
        value = told.get("value")
        return Saved(step, float(value) if isinstance(value, (int, float)) else None)

    def _best(self, mode: str) -> list[Saved]:
        """Those that look whole, best first. Of one that cannot be read nobody knows whether it is the best."""
        found = []
        for step in self.steps():
            try:
                found.append(self._looked_at(step))
            except Damaged:
                continue
            except Unreadable as error:
                raise self.unreadable(step, str(error)) from None
        return best_first(found, mode)

    def _first_good(self, steps: list[int]) -> int | None:
        for step in steps:
            try:
                problem = self.problem(step)
            except Removed:
                continue
            if problem is None:
                return step
            self.pass_over(step, problem)
        return None


def _identity(path: Path) -> tuple[int, int] | None:
    """Tells a folder from another that takes its name later; None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    except OSError:  # it may be there
        return (0, 0)
    return found.st_dev, found.st_ino


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)


def _rename(path: Path, new: Path, what: str) -> None:
    try:
        path.rename(new)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be {what}: {error.strerror}. Make {path.parent} writable for this user, and resume"
        ) from None


def _leads_to(link: Path) -> str | None:
    """What a link says; None where there is none."""
    try:
        return os.readlink(link)  # noqa: PTH115  its text, not a path to go by
    except OSError:
        return None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _require_space(folder: Path, needed: int) -> None:
    if shutil.disk_usage(folder).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _cannot_write(final: Path, needed: int, error: Exception) -> str:
    message = f"{final}: the checkpoint could not be written: {error}."
    if isinstance(error, PermissionError):
        return f"{message} Make the folder writable for this user, or choose another with --out"
    try:
        free = shutil.disk_usage(final.parent).free
    except OSError:
        return message
    return (
        f"{message} It needs {size_text(needed)} and {size_text(free)} are free. Earlier checkpoints are "
        "untouched: make room (checkpoint.keep keeps fewer) and resume the run"
    )
