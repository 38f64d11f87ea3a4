"""Starts work on a trained model (evaluate, predict) by the launcher of its run, with another order in its config.

The work has a temporary folder for its logs and its result; the folder of the run is only read.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import CheckpointError, ConfigError
from lockstep.launchers.base import DETACHED, Ended, Out, Say, launcher_of, trains_here
from lockstep.mirror.url import Url

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.distributed.failure import Failure
    from lockstep.launchers.resume import Wanted

_RESULT_FILE = "after.json"
_NO_LOGS = (ConfigError.__name__, CheckpointError.__name__)  # their message says all there is


@dataclass(frozen=True)
class Done:
    """How the work ended."""

    exit_code: int
    found: dict[str, Any] | None = None  # the result, on rank 0
    failure: Failure | None = None
    processes: int = 1
    folder: Path | None = None  # the work's own folder, where it failed
    message: str | None = None  # where the work is queued or on other hosts


def run_folder_of(given: Path | Url, needs_task: bool = True) -> Path:
    """Returns the folder of a run; refuses one without a task where that is needed."""
    if isinstance(given, Url):
        raise ConfigError(
            f"RUN {given}: trained models are read from a disk: copy the run's folder here first, with the tools of "
            "that storage"
        )
    if not given.is_dir():
        raise ConfigError(f"RUN {given}: there is no such folder")
    if needs_task and not (given / "config.yaml").exists():
        script = (given / "script.json").exists() or (given / "checkpoints").is_dir()
        why = (
            "this run belongs to a script with a custom loop: load its weights there with run.load_weights(folder, "
            "step), and call run.evaluate"
            if script
            else "it holds no config.yaml, so it is not the folder of a run"
        )
        raise ConfigError(f"RUN {given}: {why}")
    return given.resolve()


def chosen_step(folder: Path, wanted: Wanted, mode: str) -> int:
    """Returns the step of the wanted checkpoint by the manifests; whoever reads it compares the digests."""
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
    """Returns the config of a run with the overrides and with the order for its model."""
    from lockstep.config.load import load
    from lockstep.config.schema import After, Log

    config = load(folder / "config.yaml", overrides)
    step = chosen_step(folder, wanted, config.checkpoint.keep.mode)
    after = After(run=str(folder), step=step, **order)
    # Nothing is logged among the rows, or on the remote pages, of the run.
    update: dict[str, Any] = {
        "log": Log(),
        "profile": None,
        "name": f"{config.name or 'run'}-{after.do}",
    }
    if processes is not None:
        update["processes"] = processes
    return config.model_copy(update=update).with_after(after)


def carry_out(config: RunConfig, out: Path, say: Say) -> Done:
    """Starts the work with the config's launcher. Waits for it unless it is queued or on other hosts, with `out`."""
    launcher = launcher_of(config, os.environ)
    if config.launch.type in DETACHED and not trains_here(config, os.environ):
        with launcher.train(config, Out(out), say) as ended:
            return Done(ended.exit_code, message=f"{ended.message}{_result_place(config)}")
    storage = config.launch.ray.storage if config.launch.type == "ray" else None  # which all nodes see
    shared = storage if storage and Path(storage).is_dir() else None
    folder, keep = Path(tempfile.mkdtemp(prefix="lockstep-after-", dir=shared)), True
    try:
        with launcher.train(config, Out(folder, final=True), say) as ended:
            done = _done(ended, folder)
        keep = done.folder is not None
        return done
    except ConfigError:
        keep = False
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _result_place(config: RunConfig) -> str:
    after = config.after
    assert after is not None
    return f"\nwhat it finds:  {Path(after.run) / 'evaluations.jsonl' if after.do == 'evaluate' else after.out}"


def _done(ended: Ended, place: Path) -> Done:
    """Keeps the folder in `place` where the work failed: its logs say why."""
    if ended.result is None:  # this process is a rank; rank 0 has the result
        folder = Path((ended.outcome or {})["folder"])
        ours = folder.is_relative_to(place)  # other ranks of this host see the folder of rank 0 as well
        return Done(ended.exit_code, _result(folder) if ended.exit_code == 0 and ours else None)
    assert ended.folder is not None and ended.config is not None
    failure = ended.result.failure
    found = _result(ended.folder) if ended.exit_code == 0 else None
    keep = failure is not None and failure.kind not in _NO_LOGS
    return Done(ended.exit_code, found, failure, int(ended.config.processes), ended.folder if keep else None)


def _result(folder: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((folder / _RESULT_FILE).read_text(encoding="utf-8"))
        return dict(found)
    return None
