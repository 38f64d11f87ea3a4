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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import CheckpointError, ConfigError
from lockstep.launchers.base import DETACHED, Ended, Out, Say, launcher_of, trains_here
from lockstep.launchers.resume import Wanted, chosen_step
from lockstep.mirror.url import Url

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig

_RESULT_FILE = "after.json"
_NO_LOGS = (ConfigError.__name__, CheckpointError.__name__)  # their message says all there is


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
            "step), and call run.evaluate; or write them to a file with lockstep export RUN --to safetensors"
            if script
            else "it holds no config.yaml, so it is not the folder of a run"
        )
        raise ConfigError(f"RUN {given}: {why}")
    return given.resolve()


def config_of(
    folder: Path, wanted: Wanted, order: Mapping[str, Any], overrides: Iterable[str], processes: int | None
) -> RunConfig:
    """Returns the config of a run with the overrides and with the order for its model."""
    from lockstep.config.launch import Launch
    from lockstep.config.load import load
    from lockstep.config.schema import After, Log
    from lockstep.config.strategy import Strategy

    config = load(folder / "config.yaml", overrides)
    step = chosen_step(folder, wanted, config.checkpoint.keep.mode, verify=False)
    after = After(run=str(folder), step=step, **order)
    # Nothing is logged among the rows, or on the remote pages, of the run.
    update: dict[str, Any] = {"log": Log(), "profile": None, "name": f"{config.name or 'run'}-{after.do}"}
    if after.do == "export":  # one plain model on the host
        update |= {"processes": 1, "runtime": "cpu", "strategy": Strategy(type="single"), "launch": Launch()}
        update["train"] = config.train.model_copy(
            update={"compile": False, "precision": "float32", "activation_checkpointing": None, "exact": None}
        )
    if processes is not None:
        update["processes"] = processes
    return config.model_copy(update=update).with_after(after)


def carry_out(config: RunConfig, out: Path, say: Say) -> tuple[Ended, dict[str, Any] | None]:
    """Starts the work with the config's launcher; returns how it ended, and on rank 0 the result.

    Waits for it unless it is queued or on other hosts, with `out`. The folder of work that failed stays, with its logs.
    """
    launcher = launcher_of(config, os.environ)
    if config.launch.type in DETACHED and not trains_here(config, os.environ):
        after = config.after
        assert after is not None
        place = Path(after.run) / "evaluations.jsonl" if after.do == "evaluate" else after.out
        with launcher.train(config, Out(out), say) as ended:
            return replace(ended, message=f"{ended.message}\nwhat it finds:  {place}"), None
    storage = config.launch.ray.storage if config.launch.type == "ray" else None  # which all nodes see
    shared = storage if storage and Path(storage).is_dir() else None
    folder, keep = Path(tempfile.mkdtemp(prefix="lockstep-after-", dir=shared)), True
    try:
        with launcher.train(config, Out(folder, final=True), say) as ended:
            failure = ended.result.failure if ended.result is not None else None
            keep = failure is not None and failure.kind not in _NO_LOGS
            return ended, _result(ended, folder) if ended.exit_code == 0 else None
    except ConfigError:
        keep = False
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _result(ended: Ended, place: Path) -> dict[str, Any] | None:
    folder = ended.folder
    if folder is None:  # this process is a rank; other ranks of its host see the folder of rank 0 as well
        folder = Path((ended.outcome or {})["folder"])
        if not folder.is_relative_to(place):
            return None
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads((folder / _RESULT_FILE).read_text(encoding="utf-8")))
    return None
