"""`lockstep checkpoint`: lists and verifies the checkpoints of a run. Needs no torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.cli.common import JSON, RUN_DIR, Group, examples, say
from lockstep.config.plain import columns, finite
from lockstep.errors import CheckpointError, ConfigError
from lockstep.mirror.url import Url
from lockstep.shown import in_a_line, size, visible

if TYPE_CHECKING:
    from lockstep.checkpoint.storage import CheckpointStorage


@click.group(cls=Group)
def checkpoint() -> None:
    """Look at the checkpoints of a run."""


@checkpoint.command("list", epilog=examples("lockstep checkpoint list runs/digits-20260101-120000"))
@RUN_DIR
@JSON
def list_(run_dir: Path | Url, as_json: bool) -> None:
    """All checkpoints of the run in RUN_DIR, oldest first. By their manifests: verify reads them to their end."""
    storage = _storage(run_dir)
    listed = [found for step in storage.steps() if (found := _listed(storage, step)) is not None]
    if as_json:
        click.echo(json.dumps(finite({"checkpoints": listed, "set_aside": storage.all_set_aside()}), indent=1))
        return
    for line in columns([("step", "epoch", "saved", "ranks", "format", "size", "value", ""), *map(_row, listed)]):
        click.echo(visible(line))
    for name in storage.all_set_aside():
        click.echo(visible(f"set aside: {in_a_line(name)}"))


@checkpoint.command(epilog=examples("lockstep checkpoint verify runs/digits-20260101-120000"))
@RUN_DIR
@click.option("--step", type=click.IntRange(min=0), default=None, help="That of this step alone.")
@JSON
def verify(run_dir: Path | Url, step: int | None, as_json: bool) -> None:
    """Read all checkpoints of the run in RUN_DIR to their end, and compare every digest; exit code 5 where one is not
    what was written. The run may be at work."""
    from lockstep.checkpoint.storage import Removed

    storage = _storage(run_dir)
    if step is not None:
        storage.require(step)
    found = []
    for each in storage.steps() if step is None else [step]:
        name = storage.path(each).name
        try:
            problem = storage.problem(each)
        except Removed as removed:
            if step is not None:
                raise
            say(str(removed))
            continue
        found.append({"step": each, "whole": problem is None, "problem": problem})
        if not as_json:
            click.echo(visible(f"{name} is whole" if problem is None else f"{name} is damaged: {problem}"))
    if as_json:
        click.echo(json.dumps(finite({"checkpoints": found}), indent=1))
    if not all(each["whole"] for each in found):
        sys.exit(CheckpointError.exit_code)


def _storage(run_dir: Path | Url) -> CheckpointStorage:
    from lockstep.checkpoint.storage import CheckpointStorage

    if isinstance(run_dir, Url):
        raise ConfigError(
            f"RUN_DIR {run_dir}: checkpoints are looked at on a disk: copy the run's folder here first, with the tools "
            "of that storage"
        )
    storage = CheckpointStorage(run_dir / "checkpoints")
    if not run_dir.is_dir():
        raise ConfigError(f"RUN_DIR {run_dir}: there is no such folder")
    if not storage.steps():
        aside = storage.all_set_aside()
        hint = f"; set aside: {', '.join(aside)}" if aside else ""
        raise ConfigError(f"RUN_DIR {run_dir}: there is no checkpoint in {storage.folder}{hint}")
    return storage


def _listed(storage: CheckpointStorage, step: int) -> dict[str, Any] | None:
    """Returns what the manifest says, or what is wrong with it; None where the checkpoint was removed meanwhile."""
    from lockstep.checkpoint import manifest
    from lockstep.checkpoint.storage import Removed

    def read(folder: Path) -> dict[str, Any]:
        found = manifest.read(folder)
        manifest.check_sizes(folder, found)
        return found

    try:
        found = storage.look(step, read)
    except Removed:
        return None
    except (manifest.Damaged, manifest.Unreadable) as error:
        return {"step": step, "problem": str(error)}
    return {
        "problem": None,
        "step": found["step"],
        **{name: found.get(name) for name in ("epoch", "created", "world_size")},
        "format": found["format"],
        "bytes": sum(each["bytes"] for each in found["files"].values()),
        "value": found.get("value"),
    }


def _row(listed: dict[str, Any]) -> tuple[str, ...]:
    if listed["problem"] is not None:
        return (str(listed["step"]), "", "", "", "", "", "", listed["problem"])
    value = listed["value"]
    cells = [str("" if listed[name] is None else listed[name]) for name in ("step", "epoch", "created", "world_size")]
    number = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return (*cells, str(listed["format"]), size(listed["bytes"]), number, "")
