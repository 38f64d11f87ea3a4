"""A folder of checkpoints, each of them whole or absent.

A checkpoint is a folder `step-NNNNNNNN` with safetensors files, `state.json` and, written last, `manifest.json` with
the size and digests of every other file. It is filled under a temporary name and appears under its own by one rename.
What is not to be resumed from is set aside under another name, and never counted or deleted. Only rank 0 changes the
folder.
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
    """The step that a run resumed from, None where it began anew; the id tells it from another such start."""

    step: int | None
    id: str


class Removed(CheckpointError):
    """A checkpoint was removed while it was read."""


class CheckpointStorage:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, guard: Callable[[], None] = lambda: None) -> None:
        """`guard` raises where the folder does not belong to the run any more: called before anything is changed."""
        self.folder, self._guard = folder, guard
        self._was_here = False
        self._damaged: set[int] = set()  # found to be so by whoever read all of them

    # What there is

    def path(self, step: int) -> Path:
        return self.folder / step_name(step)

    def steps(self) -> list[int]:
        """Returns the steps with a checkpoint under its final name, oldest first."""
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
        """Returns what retention needs to know; a checkpoint that is damaged or cannot be read is not whole."""
        found = []
        for step in self.steps():
            try:
                found.append(self._looked_at(step))
            except (Damaged, Unreadable):
                found.append(Saved(step, whole=False))
        return found

    def require(self, step: int) -> None:
        """Refuses a step that has no checkpoint, naming those that there are."""
        if step in self.steps():
            return
        there = ", ".join(map(str, self.steps())) or "none"
        aside = [name for name in self.all_set_aside() if self.path(step).name in name]
        hint = f"; {aside[-1]} was set aside: name it {self.path(step).name} to use it" if aside else ""
        raise CheckpointError(f"{self.folder}: there is no checkpoint of step {step} (steps with one: {there}){hint}")

    def all_set_aside(self) -> list[str]:
        return sorted(path.name for kind in (_DAMAGED, _ASIDE) for path in self.folder.glob(f"{kind}{STEP_PREFIX}*"))

    def to_try(self, step: int | None = None, best: bool = False, mode: str = "min") -> list[int]:
        """Returns the steps to restore from, in order: the requested one, the best, else the newest."""
        if step is not None:
            self.require(step)
            return [step]
        if best:
            return [each.step for each in self._best(mode)]
        return self.steps()[::-1]

    def newest_good(self) -> int | None:
        """Returns the newest step whose checkpoint is whole, by reading all of it; warns of each that is not."""
        return self._first_good(self.to_try())

    def best_good(self, mode: str) -> int | None:
        """Returns the step with the best value of those that are whole, by reading all of it."""
        return self._first_good(self.to_try(best=True, mode=mode))

    def problem(self, step: int) -> str | None:
        """Reads all of a checkpoint and returns what is wrong with it, or None; raises Removed."""
        try:
            self.look(step, manifest.check)
            return None
        except Damaged as error:
            return str(error)
        except Unreadable as error:
            raise self.unreadable(step, str(error)) from None

    def look(self, step: int, read: Callable[[Path], T]) -> T:
        """Returns what `read` finds in a checkpoint of a run that may be at work.

        Reads again where the run has replaced the checkpoint meanwhile, and raises Removed where it has removed it.
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
        """Warns that a checkpoint is damaged, and remembers it until it is set aside."""
        self._damaged.add(step)
        logger.warning("checkpoint %s is damaged and is passed over: %s", self.path(step).name, problem)

    def unreadable(self, step: int, problem: str) -> CheckpointError:
        """The error for a checkpoint that cannot be read: to pass it over would be to lose it."""
        path = self.path(step)
        return CheckpointError(
            f"{path}: {problem}. It may be whole, so it is neither passed over nor set aside: make it readable for "
            "this user again (owner, permissions, mount, disk), and resume. If it is lost for good, move "
            f"{path.name} out of {self.folder}: the one before it is used then"
        )

    def none_usable(self, damaged: Mapping[int, str]) -> CheckpointError:
        """The error where no checkpoint is whole: to begin anew would be to lose them."""
        each = "; ".join(f"{self.path(step).name}: {problem}" for step, problem in damaged.items())
        count = len(damaged)
        none = f"of {count} checkpoints none can be used" if count > 1 else "the only checkpoint cannot be used"
        return CheckpointError(
            f"{self.folder}: {none}, and nothing was begun anew ({each}). Put "
            f"back a good one. To start over on purpose, move or delete {self.folder}, and resume"
        )

    # What changes it

    def create(self, step: int, size: int, fill: Callable[[Path], None]) -> Path:
        """Lets `fill` write a checkpoint of about so many bytes into a folder, and gives that its name.

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
        """Removes a checkpoint so that it is never seen half removed."""
        self._guard()
        self._unlink_best(step)
        doomed = self.folder / f"{_TEMPORARY}deleted-{step:08d}-{os.getpid()}"
        _rename(self.path(step), doomed, "deleted")
        _remove(doomed)

    def link_best(self, step: int | None) -> None:
        """Has `best` lead to the checkpoint of a step, or removes it; on a disk without links there is none."""
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
        """Removes the link before its checkpoint gets another name."""
        if _leads_to(self.folder / BEST) == self.path(step).name:
            with contextlib.suppress(OSError):
                (self.folder / BEST).unlink()

    def set_aside_after(self, step: int | None) -> list[Path]:
        """Sets aside all checkpoints newer than the one that the run resumes from; all where it begins anew.

        They are damaged, or of a branch that was left: those steps are about to be reached again, and would count as
        newer than what is saved from here on.
        """
        why = (
            f"newer than {self.path(step).name}, which the run resumes from"
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
        """Returns what the checkpoints of this folder were resumed from last."""
        try:
            saved = json.loads(run_files.read_bytes(self.folder / _BRANCH_FILE, _LONGEST_BRANCH, depth=2))
            return Branch(saved["from"], saved["id"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{self.folder / _BRANCH_FILE} cannot be read: {error}. Delete it") from None

    def _note_branch(self, step: int | None) -> None:
        """Records the branch before anything of it is written, for those who keep a copy of the folder."""
        file = self.folder / _BRANCH_FILE
        try:
            self._make_folder()
            run_files.write(file, json.dumps({"from": step, "id": secrets.token_hex(8)}), depth=2)
        except OSError as error:
            self._guard()
            raise CheckpointError(_cannot_write(file, _LONGEST_BRANCH, error)) from error

    def sweep(self) -> None:
        """Removes what an interrupted write or delete left behind; only while nobody else writes here."""
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
        """Returns for every rank whether its host has this very folder. All ranks call it.

        Rank 0 creates a file there for the moment, under a name that nobody has looked for before.
        """
        name = group.agree(self._leave_token, "whether all ranks see the checkpoints")
        mine = group.rank == 0 or (name is not None and (self.folder / name).exists())
        sees = group.gather(mine, "which ranks see the checkpoints")
        if group.rank == 0 and name is not None:
            (self.folder / name).unlink(missing_ok=True)
        return sees

    def _leave_token(self) -> str | None:
        """Returns its name; None where nothing can be written."""
        token = self.folder / f"{_TEMPORARY}seen-{secrets.token_hex(8)}"
        self._guard()
        try:
            self._make_folder()
            os.close(run_files.open_descriptor(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, depth=2))
        except OSError:
            return None
        return token.name

    # Inside

    def _make_folder(self) -> None:
        """Makes the folder inside of the run's, which is never made here: it would be one without a config."""
        if self._was_here and not self.folder.exists():
            logger.warning("%s is gone, with what was saved in it: made anew", self.folder)
        self.folder.mkdir(exist_ok=True)
        self._was_here = True

    def _publish(self, temporary: Path, final: Path) -> None:
        """Gives a checkpoint its final name; the same step reached again replaces what was there."""
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

    def _is_damaged(self, step: int) -> bool:
        try:
            self._looked_at(step)
        except Damaged:
            return True
        except Unreadable:
            pass
        return False

    def _looked_at(self, step: int) -> Saved:
        meta = manifest.read(self.path(step))
        manifest.check_sizes(self.path(step), meta)
        return Saved(step, meta["value"])  # a float or None: manifest.parse makes sure

    def _best(self, mode: str) -> list[Saved]:
        """Returns those that look whole, best first. One that cannot be read may be the best: it is an error."""
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
