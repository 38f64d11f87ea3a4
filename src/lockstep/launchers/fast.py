"""`lockstep train --fast`: a short run that does once what a long one does: a step, validation, a save, a resume."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.load import with_values
from lockstep.errors import ConfigError
from lockstep.launchers.base import Ended, Launcher, Out, Say, trains_here
from lockstep.launchers.ending import conclude
from lockstep.launchers.resume import Resumed
from lockstep.mirror.url import Url
from lockstep.record import run_folder

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig

_WAITING = ("local", "ray")  # launchers that wait for the end of a run


def check(config: RunConfig, out: Out) -> None:
    """Refuses what cannot be resumed in the same command."""
    other = (
        "under torchrun or srun" if trains_here(config, os.environ) and config.launch.type != "slurm"
        else "with --pod" if out.pod is not None
        else f"with launch: {config.launch.type}" if config.launch.type not in _WAITING
        else None
    )  # fmt: skip
    if other is not None:
        raise ConfigError(
            f"--fast: {other}, this command cannot start a run twice and wait for it: try the config on one host, with "
            "--set launch=local"
        )
    if isinstance(out.place, Url):
        raise ConfigError(f"--fast: {out.setting} {out.place}: a bucket is not for throw-away runs: name a folder")


def of_start(config: RunConfig, number: int) -> RunConfig:
    """Returns the config of the first start (0), or of the second, which resumes it."""
    step = {"type": "lockstep.tasks.callbacks.FirstStep", "begins_at": number}
    changes: dict[str, Any] = {
        "callbacks": [*(each.model_dump() for each in config.callbacks), step],
        "name": f"{config.name}-fast",
        "launch.max_restarts": 0,
    }
    if "limit" not in config.validation.model_fields_set:
        changes["validate.limit"] = config.evaluation_batch_size
    return with_values(config, changes)


def run(config: RunConfig, launcher: Launcher, out: Out, say: Say) -> Ended:
    """Starts the run and resumes it. Returns how it ended where it failed, else with a message."""
    began = time.monotonic()
    with launcher.train(of_start(config, 0), out, say) as ended:
        if _conclude(ended):
            return ended
    folder = ended.folder
    assert folder is not None

    def prepare(place: Path, resolved: RunConfig | None) -> Path:
        assert resolved is not None
        run_folder.write_config(place, resolved)
        return place

    say("--fast: trained a step and saved; now resuming it")
    with launcher.resume(of_start(config, 1), Resumed(folder, lambda: folder, prepare), say) as ended:
        if _conclude(ended):
            return ended
    summary = run_folder.read_summary(folder)
    kinds = [kind for kind in ("val", "test") if any(name.startswith(f"{kind}/") for name in summary["metrics"])]
    message = (
        f"--fast: it works, in {time.monotonic() - began:.1f} s on {summary['world_size']} "
        f"process{'es' if summary['world_size'] > 1 else ''}: trained, measured ({', '.join(kinds) or 'no data for it'}"
        f"), saved, resumed at step 1, ended at step {summary['step']}\nits folder, which nothing else needs: {folder}"
    )
    return Ended(message=message)


def _conclude(ended: Ended) -> bool:
    """Returns whether the run failed, which its end says; else writes down that it ended."""
    if ended.exit_code == 0 and ended.folder and ended.result and ended.config:
        conclude(ended.folder, ended.result, ended.config, lambda text: None)
    return ended.exit_code != 0
