"""`lockstep checkpoint`: what a run has saved, whether it is whole, and its weights in one file. Needs no torch."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.cli import options
from lockstep.cli.help import Group, examples
from lockstep.cli.messages import say
from lockstep.cli.options import JSON, RUN_DIR
from lockstep.config.plain import columns, finite
from lockstep.errors import CheckpointError, ConfigError
from lockstep.mirror.url import Url
from lockstep.shown import in_a_line, size, visible

if TYPE_CHECKING:
    from lockstep.checkpoint.merge import Weight
    from lockstep.checkpoint.storage import CheckpointStorage

STEP = click.option("--step", type=click.IntRange(min=0), default=None, help="That of this step; else the newest.")


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
        _print_json({"checkpoints": listed, "set_aside": storage.all_set_aside()})
        return
    for line in columns([("step", "epoch", "saved", "ranks", "format", "size", "value", ""), *map(_row, listed)]):
        _echo(line)
    for name in storage.all_set_aside():
        _echo(f"set aside: {in_a_line(name)}")


@checkpoint.command(epilog=examples("lockstep checkpoint show runs/digits-20260101-120000 --step 20"))
@RUN_DIR
@STEP
@JSON
def show(run_dir: Path | Url, step: int | None, as_json: bool) -> None:
    """What a checkpoint of the run in RUN_DIR holds: where it is from, its files, its weights."""
    from lockstep.checkpoint import manifest, merge

    storage = _storage(run_dir)
    chosen = _chosen(storage, step)
    folder, told = storage.path(chosen), _manifest(storage, chosen)
    with _naming(folder):
        found, _ = merge.weights(folder, told)
        state, _ = merge.weights(folder, told, "state")
    if as_json:
        _print_json({
            "folder": str(folder), **_facts(told), "versions": told.get("versions") or {},
            "metrics": told.get("metrics") or {},
            "files": [{"name": name, "bytes": told["files"][name]["bytes"]} for name in manifest.files(told)],
            "weights": list(map(_tensor, found)), "other_tensors": list(map(_tensor, state)),
        })  # fmt: skip
        return
    versions = told.get("versions") or {}
    _echo(f"{folder}")
    _echo(f"step {told['step']}, epoch {told.get('epoch')}, saved {told.get('created')} by "
               f"{_ranks(told)}, Lockstep {versions.get('lockstep')} and torch {versions.get('torch')}")  # fmt: skip
    for name, value in (told.get("metrics") or {}).items():
        _echo(in_a_line(f"{name} {value}"))
    _echo("")
    for name in manifest.files(told):
        _echo(f"{size(told['files'][name]['bytes']):>10}  {name}")
    _echo("")
    for entry in (each.entry for each in found):
        _echo(in_a_line(f"{entry.dtype:>5}  {entry.name} {list(entry.shape)}"))
    total = sum(each.entry.nbytes for each in found)
    beside = sum(each.entry.nbytes for each in state)
    _echo(f"\n{len(found)} weights, {size(total)}; beside them {len(state)} tensors, {size(beside)}")


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
            _echo(f"{name} is whole" if problem is None else f"{name} is damaged: {problem}")
    if as_json:
        _print_json({"checkpoints": found})
    if not all(each["whole"] for each in found):
        sys.exit(CheckpointError.exit_code)


@checkpoint.command(epilog=examples("lockstep checkpoint merge runs/digits-20260101-120000 --out model.safetensors"))
@RUN_DIR
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The file to write: model.safetensors.")
@STEP
@options.WEIGHTS
def merge(run_dir: Path | Url, out: Path, step: int | None, weights: str) -> None:
    """All weights of a checkpoint of the run in RUN_DIR in one safetensors file, once they match their digests."""
    from lockstep.checkpoint.merge import averaged, merge

    if out.exists():
        raise ConfigError(f"--out {out}: is there already: name a file that is not, or move it away")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}: make it, or name another one")
    storage = _storage(run_dir)
    chosen = _chosen(storage, step)
    problem = storage.problem(chosen)
    if problem is not None:
        raise CheckpointError(f"{storage.path(chosen)} is damaged: {problem}. Name another step with --step")
    folder, told = storage.path(chosen), _manifest(storage, chosen)
    with _naming(folder):
        if weights == "ema" and not averaged(folder, told):
            raise ConfigError(f"--weights ema: {folder} has no averages: the run was not trained with train.ema")
        count = merge(folder, told, out, average=weights == "ema")
    say(f"{out}: {count} {'averaged ' if weights == 'ema' else ''}weights of step {chosen}, {size(out.stat().st_size)}")


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


def _chosen(storage: CheckpointStorage, step: int | None) -> int:
    if step is not None:
        storage.require(step)
        return step
    return storage.steps()[-1]


def _manifest(storage: CheckpointStorage, step: int) -> dict[str, Any]:
    from lockstep.checkpoint import manifest

    def read(folder: Path) -> dict[str, Any]:
        told = manifest.read(folder)
        manifest.check_sizes(folder, told)
        return told

    with _naming(storage.path(step)):
        return storage.look(step, read)


@contextlib.contextmanager
def _naming(folder: Path) -> Iterator[None]:
    from lockstep.checkpoint import manifest

    try:
        yield
    except (manifest.Damaged, manifest.Unreadable) as error:
        raise CheckpointError(f"{folder}: {error}") from None


def _echo(text: str) -> None:
    click.echo(visible(text))


def _listed(storage: CheckpointStorage, step: int) -> dict[str, Any] | None:
    """A checkpoint by its manifest; where that is damaged, only what is wrong; None where it was removed meanwhile."""
    from lockstep.checkpoint.storage import Removed

    folder = storage.path(step)
    try:
        return {"problem": None, **_facts(_manifest(storage, step))}
    except Removed:
        return None
    except CheckpointError as error:
        return {"step": step, "problem": str(error).removeprefix(f"{folder}: ")}


def _facts(told: dict[str, Any]) -> dict[str, Any]:
    return {
        "step": told["step"],
        "epoch": told.get("epoch"),
        "created": told.get("created"),
        "world_size": told.get("world_size"),
        "format": told["format"],
        "bytes": sum(each["bytes"] for each in told["files"].values()),
        "value": told.get("value"),
    }


def _row(listed: dict[str, Any]) -> tuple[str, ...]:
    if listed["problem"] is not None:
        return (str(listed["step"]), "", "", "", "", "", "", listed["problem"])
    value = listed["value"]
    told = [str("" if listed[name] is None else listed[name]) for name in ("step", "epoch", "created", "world_size")]
    number = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return (*told, str(listed["format"]), size(listed["bytes"]), number, "")


def _tensor(weight: Weight) -> dict[str, Any]:
    entry = weight.entry
    return {"name": entry.name, "dtype": entry.dtype, "shape": list(entry.shape), "bytes": entry.nbytes}


def _print_json(value: Any) -> None:
    click.echo(json.dumps(finite(value), indent=1))


def _ranks(told: dict[str, Any]) -> str:
    count = told.get("world_size")
    return "one rank" if told["format"] == 1 else f"{count} ranks"
