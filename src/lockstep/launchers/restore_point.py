"""Going back to an older checkpoint: decided once, by whoever starts the ranks.

What is newer than the chosen checkpoint is set aside before any rank restores, so that the chosen one is the newest.
Ranks restore the newest as they always do: under every launcher, after every restart, and on the next resume.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep import run_files
from lockstep.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from lockstep.config.changes import Change

_MARK = ".gone_back"


@dataclass(frozen=True)
class Wanted:
    """Which checkpoint a run is to go on from: that of a step, the best, or else the newest."""

    step: int | None = None
    best: bool = False

    def __post_init__(self) -> None:
        if self.step is not None and self.best:
            raise ConfigError(f"--step {self.step} and --best: name one of them")

    @property
    def is_newest(self) -> bool:
        return self.step is None and not self.best


def found(folder: Path, wanted: Wanted, mode: str) -> int:
    """The step of the checkpoint that is wanted, which was read to its end and is whole. `mode` is what best means."""
    from lockstep.checkpoint.storage import CheckpointStorage

    storage = CheckpointStorage(folder / "checkpoints")
    if wanted.step is None:
        best = storage.best_good(mode)
        if best is None:
            there = ", ".join(map(str, storage.steps())) or "none"
            raise ConfigError(
                f"--best: no whole checkpoint in {storage.folder} has a value to be the best by (steps with one: "
                f"{there}). checkpoint.keep.metric names it, and validation measures it; name a step with --step"
            )
        return best
    try:
        storage.require(wanted.step)
    except CheckpointError as error:
        raise ConfigError(f"--step {wanted.step}: {error}") from None
    problem = storage.problem(wanted.step)
    if problem is not None:
        raise ConfigError(
            f"--step {wanted.step}: {storage.path(wanted.step)} is damaged: {problem}. Name another step, or none"
        )
    return wanted.step


def refuse_less(folder: Path, wanted: Wanted, found_changes: Iterable[Change], mode: str) -> None:
    """Refuse a new limit of epochs or steps that the checkpoint is beyond: nothing would be trained, and the config
    would not say any more what the run has had."""
    from lockstep.checkpoint import manifest
    from lockstep.checkpoint.storage import CheckpointStorage

    limits = {each.path: each.after for each in found_changes if each.path in ("train.epochs", "train.steps")}
    limits = {path: after for path, after in limits.items() if after is not None}
    storage = CheckpointStorage(folder / "checkpoints")
    if not limits or not storage.steps():
        return
    if wanted.is_newest:
        good = (each for each in sorted(storage.steps(), reverse=True) if storage.problem(each) is None)
        step = next(good, None)
    else:
        step = found(folder, wanted, mode)
    if step is None:
        return  # the ranks say what is wrong with all of them
    done = {"train.epochs": manifest.read(storage.path(step)).get("epoch") or 0, "train.steps": step}
    for path, after in limits.items():
        if after < done[path]:
            raise ConfigError(
                f"{path}={after}: the run in {folder} has {done[path]} {path.rpartition('.')[2]} done at step "
                f"{step}: name more, or go on from an earlier checkpoint (--step N)"
            )


def newer(folder: Path, step: int) -> list[str]:
    """The checkpoints that are to be set aside, by name."""
    from lockstep.checkpoint.storage import CheckpointStorage

    storage = CheckpointStorage(folder / "checkpoints")
    return [storage.path(each).name for each in storage.steps() if each > step]


def go_back(folder: Path, wanted: Wanted, mode: str) -> int:
    """Make the wanted checkpoint the newest, and say which that is; what is set aside, and as what, is logged."""
    from lockstep.checkpoint.storage import CheckpointStorage

    step = found(folder, wanted, mode)
    storage = CheckpointStorage(folder / "checkpoints")
    storage.set_aside_after(step)
    run_files.write(storage.folder / _MARK, f"{step}\n", depth=2)
    return step


def has_gone_back(folder: Path) -> bool:
    """Whether it was done since `forget`: a launcher of others runs the whole command again when it restarts ranks."""
    return (folder / "checkpoints" / _MARK).exists()


def forget(folder: Path) -> None:
    """A command begins, not one of its restarts."""
    (folder / "checkpoints" / _MARK).unlink(missing_ok=True)
