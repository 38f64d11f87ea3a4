"""What this machine remembers of a pod: how to reach it, and the job that was started there last."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from lockstep.config.load import from_plain
from lockstep.config.schema import RunConfig, Section
from lockstep.errors import ConfigError
from lockstep.launchers.ssh.folder import checked_name


class Record(Section):
    """A pod, by its name."""

    name: str
    config: dict[str, Any]
    code: str | None = Field(None, description="the folder whose files are pushed; null: nothing is")
    job: str | None = None
    folder: str | None = Field(None, description="the run's, on the hosts")
    url: str | None = Field(None, description="of that folder in object storage")
    head: str | None = Field(None, description="the host that led the job")

    def run_config(self) -> RunConfig:
        return from_plain(self.config, "the record of the pod")


def archive_of(name: str) -> Path:
    """Where what is to be pushed is packed."""
    return cache_of(name) / "push.tar"


def startup_of(name: str) -> Path:
    """Where the start-up script of a pod's hosts is written."""
    return archive_of(name).with_name("startup.sh")


def write(record: Record) -> None:
    file = record_of(record.name)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(record.model_dump_json(indent=1), encoding="utf-8")
    partial.chmod(0o600)
    partial.replace(file)


def read(name: str) -> Record:
    file = record_of(name)
    try:
        return Record.model_validate_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = sorted(each.stem for each in file.parent.glob("*.json")) if file.parent.is_dir() else []
        raise ConfigError(
            f"there is no pod {name!r} here (known: {', '.join(known) or 'none'}). `lockstep pod create {name} "
            "--config CONFIG` or `lockstep train CONFIG --pod NAME` makes one known"
        ) from None
    except (OSError, ValidationError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None


def find(name: str) -> Record | None:
    return read(name) if record_of(name).exists() else None


def forget(name: str) -> None:
    record_of(name).unlink(missing_ok=True)
    shutil.rmtree(cache_of(name), ignore_errors=True)


def plain(config: RunConfig) -> dict[str, Any]:
    return json.loads(json.dumps(config.plain()))  # type: ignore[no-any-return]


def cache_of(name: str) -> Path:
    """A folder for what can be made again."""
    return _folder("XDG_CACHE_HOME", ".cache") / checked_name(name)


def record_of(name: str) -> Path:
    """The file that a pod is remembered by."""
    return _folder("XDG_STATE_HOME", ".local/state") / f"{checked_name(name)}.json"


def _folder(variable: str, usual: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / usual) / "lockstep" / "pods"
