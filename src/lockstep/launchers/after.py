"""Work on a model that was trained: its run's config with another order in it, started as training is.

The work has a folder of its own, for its logs and its result, which goes when all went well: the folder of the run that
trained the model is only read.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import CheckpointError, ConfigError
from lockstep.launchers import batch_tasks, cluster
from lockstep.launchers import folder as folders
from lockstep.launchers.local import local
from lockstep.mirror.url import Url

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.distributed.failure import Failure, Result
    from lockstep.launchers.restore_point import Wanted

Tell = Callable[[str], None]
_RESULT_FILE = "after.json"
# What is told in a sentence: logs have no more to say of it.
_TOLD = (ConfigError.__name__, CheckpointError.__name__)


@dataclass(frozen=True)
class Done:
    """How work ended: what rank 0 found, or the exit code and why."""

    exit_code: int
    found: dict[str, Any] | None = None  # on rank 0, where all went well
    failure: Failure | None = None
    processes: int = 1
    folder: Path | None = None  # what is left of it, where it failed
    queued: str | None = None  # what to tell where it is done later, or elsewhere


def run_folder_of(given: Path | Url) -> Path:
    """The folder of a run that has a task and something saved."""
    if isinstance(given, Url):
        raise ConfigError(
            f"RUN {given}: trained models are read from a disk: copy the run's folder here first, with the tools of "
            "that storage"
        )
    if not given.is_dir():
        raise ConfigError(f"RUN {given}: there is no such folder")
    if not (given / "config.yaml").exists():
        script = (given / "script.json").exists() or (given / "checkpoints").is_dir()
        why = (
            "this run belongs to a script with a loop of its own: load its weights there with run.load_weights(folder, "
            "step), and call run.evaluate"
            if script
            else "it holds no config.yaml, so it is not the folder of a run"
        )
        raise ConfigError(f"RUN {given}: {why}")
    return given.resolve()


def chosen_step(folder: Path, wanted: Wanted, mode: str) -> int:
    """The step of the checkpoint that is meant, by what the manifests say; whoever reads it compares the digests."""
    from lockstep.checkpoint.storage import CheckpointStorage

    storage = CheckpointStorage(folder / "checkpoints")
    try:
        steps = storage.to_try(wanted.step, wanted.best, mode)
    except CheckpointError as error:
        raise ConfigError(f"--step {wanted.step}: {error}" if wanted.step is not None else str(error)) from None
    if not steps:
        there = ", ".join(map(str, storage.steps())) or "none"
        why = "has a value to be the best by" if wanted.best else "is there"
        raise ConfigError(f"RUN {folder}: no checkpoint {why} (steps with one: {there})")
    return steps[0]


def config_of(
    folder: Path, wanted: Wanted, order: Mapping[str, Any], overrides: Iterable[str], processes: int | None
) -> RunConfig:
    """The config of a run, with what the command line changes, and what is to be done with its model."""
    from lockstep.config.load import load
    from lockstep.config.schema import After, Log

    config = load(folder / "config.yaml", overrides)
    step = chosen_step(folder, wanted, config.checkpoint.keep.mode)
    after = After(run=str(folder), step=step, **order)
    # What it logs is its own: nothing of it belongs among the rows, or on the remote pages, of the run.
    update: dict[str, Any] = {
        "log": Log(),
        "profile": None,
        "name": f"{config.name or 'run'}-{after.do}",
    }
    if processes is not None:
        update["processes"] = processes
    return config.model_copy(update=update).with_after(after)


def carry_out(config: RunConfig, out: Path, tell: Tell) -> Done:
    """Start the work where `launch` says, and wait for it, unless it is queued or elsewhere; `out` is for those."""
    if batch_tasks.trains_here(config, os.environ):
        return _as_rank(config)
    if config.launch.type == "ssh":
        from lockstep.launchers.ssh import pod

        code = pod.train(config, str(config.name), out)
        return Done(code, queued="" if code else f"done on the pod; its console has what it found{_noted(config)}")
    if config.launch.type == "slurm":
        from lockstep.launchers.slurm import queue

        queued = queue.train(config, out)
        return Done(0, queued=f"{queued.render()}{_noted(config)}")
    with _place() as place:
        if config.launch.type == "ray":
            ended = cluster.train(config, lambda resolved: folders.new(place.folder, "--out", resolved))
            return place.done(ended.folder, ended.result, int(ended.config.processes))
        return _here(config, place, tell)


def _noted(config: RunConfig) -> str:
    after = config.after
    assert after is not None
    return f"\nwhat it finds:  {Path(after.run) / 'evaluations.jsonl' if after.do == 'evaluate' else after.out}"


def _here(config: RunConfig, place: _Place, tell: Tell) -> Done:
    from lockstep.record import folder_lock

    config = local.resolved(config, tell)
    local.check(config)
    folder = folders.new(place.folder, "--out", config)
    with folder_lock.locked(folder):
        return place.done(folder, local.train(folder, config, lambda text: None), int(config.processes))


def _as_rank(config: RunConfig) -> Done:
    """As the rank that a launcher made this process; rank 0 has the result."""
    told: list[dict[str, Any]] = []
    with _place() as place:
        code = local.train_as_rank(config, lambda: folders.new(place.folder, "--out", config), told.append)
        folder = Path(told[0]["folder"])
        mine = folder.is_relative_to(place.folder)  # that of rank 0, which others on this host see as well
        found = _result(folder) if code == 0 and mine else None
        place.keep = False
    return Done(code, found)


class _Place:
    """A folder for the work, which stays where it failed: its logs say why."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.keep = folder, True

    def done(self, folder: Path, result: Result, processes: int) -> Done:
        found = _result(folder) if result.exit_code == 0 else None
        self.keep = result.failure is not None and result.failure.kind not in _TOLD
        return Done(result.exit_code, found, result.failure, processes, folder if self.keep else None)


@contextlib.contextmanager
def _place() -> Iterator[_Place]:
    place = _Place(Path(tempfile.mkdtemp(prefix="lockstep-after-")))
    try:
        yield place
    except ConfigError:
        place.keep = False
        raise
    finally:
        if not place.keep:
            shutil.rmtree(place.folder, ignore_errors=True)


def _result(folder: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((folder / _RESULT_FILE).read_text(encoding="utf-8"))
        return dict(found)
    return None
