"""What this machine remembers of a pod: how to reach it, and the job that was started there last."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from lockstep.config.schema import RunConfig, Section
from lockstep.errors import ConfigError
from lockstep.pod.folder import checked_name


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
        return RunConfig.model_validate(self.config)


def _folder(variable: str, usual: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / usual) / "lockstep" / "pods"


def archive_of(name: str) -> Path:
    """Where what is to be pushed is packed."""
    return _folder("XDG_CACHE_HOME", ".cache") / checked_name(name) / "push.tar"


def startup_of(name: str) -> Path:
    """Where the start-up script of a pod's hosts is written."""
    return archive_of(name).with_name("startup.sh")


def _file(name: str) -> Path:
    return _folder("XDG_STATE_HOME", ".local/state") / f"{checked_name(name)}.json"


def write(record: Record) -> None:
    file = _file(record.name)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(record.model_dump_json(indent=1), encoding="utf-8")
    partial.chmod(0o600)
    partial.replace(file)


def read(name: str) -> Record:
    file = _file(name)
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
    return read(name) if _file(name).exists() else None


def forget(name: str) -> None:
    _file(name).unlink(missing_ok=True)
    archive_of(name).unlink(missing_ok=True)


def plain(config: RunConfig) -> dict[str, Any]:
    return json.loads(json.dumps(config.plain()))  # type: ignore[no-any-return]
