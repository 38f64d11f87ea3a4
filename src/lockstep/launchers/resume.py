"""Finds a run that is to be resumed, and resumes it from an older checkpoint if one is chosen.

Checkpoints newer than the chosen one are set aside before any rank restores, so that the chosen one is the newest.
Ranks restore the newest as always: under every launcher, after every restart, and on the next resume.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep import run_files
from lockstep.errors import CheckpointError, ConfigError
from lockstep.mirror.url import Url

if TYPE_CHECKING:
    from lockstep.config.changes import Change
    from lockstep.config.schema import RunConfig
    from lockstep.distributed.topology import Topology

_MARK = ".gone_back"


@dataclass(frozen=True)
class Wanted:
    """Which checkpoint to resume from: that of a step, the best, or else the newest."""

    step: int | None = None
    best: bool = False

    def __post_init__(self) -> None:
        if self.step is not None and self.best:
            raise ConfigError(f"--step {self.step} and --best: name one of them")

    @property
    def is_newest(self) -> bool:
        return self.step is None and not self.best


@dataclass(frozen=True)
class Resumed:
    """A run that is to be resumed."""

    start_files: Path  # a folder with the files that say how the run was started
    folder: Callable[[], Path]  # returns its folder on this host; for the launcher or rank 0 alone
    # Called once the folder is locked, with the resolved config, or with None where this process is a rank.
    prepare: Callable[[Path, RunConfig | None], Path] = lambda folder, config: folder


@contextlib.contextmanager
def find(run_dir: Path | Url, wanted: Wanted, topology: Topology | None, dry_run: bool) -> Iterator[Resumed]:
    """Finds the run in a folder or at a URL; `topology` is given where another launcher started this process.

    The folder may be in a bucket, or on the disk of rank 0's host alone: other ranks get only the start files.
    """
    if isinstance(run_dir, Path):
        if topology is not None and topology.host_count > 1:
            from lockstep.record.run_folder import brought_here

            brought_here(run_dir, topology)
        yield Resumed(run_dir, lambda: run_dir)
        return
    from lockstep.mirror import staging

    url = run_dir
    if topology is None and not (dry_run and wanted.is_newest):
        try:
            folder = staging.opened(url, "RUN_DIR", wanted.step, wanted.best)
        except CheckpointError as error:
            if wanted.step is None:
                raise
            raise ConfigError(f"--step {wanted.step}: {error}") from None
        yield Resumed(folder, lambda: folder)
        return
    with tempfile.TemporaryDirectory(prefix="lockstep-") as files:
        for name, data in staging.start_files(url, "RUN_DIR").items():
            (Path(files) / name).write_bytes(data)
        if topology is not None and not (Path(files) / "config.yaml").exists():
            raise ConfigError(
                f"{url}: this run belongs to a script: start the script with the same launcher, and have it call "
                f"lockstep.launch(..., folder={str(url)!r})"
            )
        yield Resumed(Path(files), lambda: staging.opened(url, "RUN_DIR", wanted.step, wanted.best))


def chosen_step(folder: Path, wanted: Wanted, mode: str, verify: bool = True) -> int:
    """Returns the step of the wanted checkpoint, after reading it to its end; `mode` is min or max.

    Without `verify` the manifest is enough: whoever reads the checkpoint compares the digests.
    """
    from lockstep.checkpoint.storage import CheckpointStorage

    storage = CheckpointStorage(folder / "checkpoints")
    try:
        steps = storage.to_try(wanted.step, wanted.best, mode)
    except CheckpointError as error:
        raise ConfigError(f"--step {wanted.step}: {error}" if wanted.step is not None else str(error)) from None
    if verify and wanted.best:
        best = storage.best_good(mode)
        steps = [] if best is None else [best]
    if not steps and not wanted.best:
        raise ConfigError(f"{folder}: there is no checkpoint in it")
    if not steps:
        there = ", ".join(map(str, storage.steps())) or "none"
        raise ConfigError(
            f"--best: no whole checkpoint in {storage.folder} has a value to be the best by (steps with one: {there}). "
            "checkpoint.keep.metric names it, and validation measures it; name a step with --step"
        )
    if verify and wanted.step is not None and (problem := storage.problem(wanted.step)) is not None:
        raise ConfigError(
            f"--step {wanted.step}: {storage.path(wanted.step)} is damaged: {problem}. Name another step, or none"
        )
    return steps[0]


def refuse_less(folder: Path, wanted: Wanted, changes: Iterable[Change], mode: str) -> None:
    """Refuses a new limit of epochs or steps that the checkpoint is beyond: nothing would be trained."""
    from lockstep.checkpoint import manifest
    from lockstep.checkpoint.storage import CheckpointStorage

    limits = {each.path: each.after for each in changes if each.path in ("train.epochs", "train.steps")}
    limits = {path: after for path, after in limits.items() if after is not None}
    storage = CheckpointStorage(folder / "checkpoints")
    if not limits or not storage.steps():
        return
    if wanted.is_newest:
        good = (each for each in sorted(storage.steps(), reverse=True) if storage.problem(each) is None)
        step = next(good, None)
    else:
        step = chosen_step(folder, wanted, mode)
    if step is None:
        return  # the ranks report what is wrong with all of them
    done = {"train.epochs": manifest.read(storage.path(step)).get("epoch") or 0, "train.steps": step}
    for path, after in limits.items():
        if after < done[path]:
            raise ConfigError(
                f"{path}={after}: the run in {folder} has {done[path]} {path.rpartition('.')[2]} done at step "
                f"{step}: name more, or go on from an earlier checkpoint (--step N)"
            )


def newer(folder: Path, step: int) -> list[str]:
    """Returns the names of the checkpoints that would be set aside."""
    from lockstep.checkpoint.storage import CheckpointStorage

    storage = CheckpointStorage(folder / "checkpoints")
    return [storage.path(each).name for each in storage.steps() if each > step]


def go_back(folder: Path, wanted: Wanted, mode: str) -> int:
    """Makes the wanted checkpoint the newest and returns its step. Which ones are set aside is logged."""
    from lockstep.checkpoint.storage import CheckpointStorage

    step = chosen_step(folder, wanted, mode)
    storage = CheckpointStorage(folder / "checkpoints")
    storage.set_aside_after(step)
    run_files.write(storage.folder / _MARK, f"{step}\n", depth=2)
    return step


def has_gone_back(folder: Path) -> bool:
    """Returns whether go_back was called since `forget`: torchrun runs the whole command again when it restarts."""
    return (folder / "checkpoints" / _MARK).exists()


def forget(folder: Path) -> None:
    (folder / "checkpoints" / _MARK).unlink(missing_ok=True)
