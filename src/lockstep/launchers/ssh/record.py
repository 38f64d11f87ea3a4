"""What is written down of a job: the order that every host gets, and the record of it on this machine."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from lockstep.config.load import from_plain
from lockstep.config.schema import RunConfig, Section
from lockstep.config.values import variable_name
from lockstep.errors import ConfigError
from lockstep.launchers.ssh.folder import checked_name


class Host(Section):
    name: str
    address: str = Field(description="where the others reach it")
    first: int = Field(ge=0, description="its first rank")
    count: int = Field(gt=0, description="of its ranks")

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.count)


class Order(Section):
    """A job as every host gets it, as JSON. The first host leads, with rank 0 and the run's folder."""

    pod: str
    job: str
    index: int = Field(ge=0, description="which of the hosts this one is")
    hosts: tuple[Host, ...] = Field(strict=False)
    port: int = Field(gt=0, lt=65536, description="of the store, on the first host")
    secret: str = Field(repr=False)
    config: dict[str, Any]
    folder: str = Field(description="the run's, on every host")
    url: str | None = Field(None, description="of the run's folder in object storage, which that folder stands for")
    env: dict[str, str] = Field({}, repr=False)

    @property
    def head(self) -> Host:
        return self.hosts[0]

    @property
    def here(self) -> Host:
        return self.hosts[self.index]

    @property
    def world_size(self) -> int:
        return sum(each.count for each in self.hosts)

    def run_config(self) -> RunConfig:
        return from_plain(self.config, "the order")


def spread(processes: int | str, devices: list[int]) -> list[tuple[int, int]]:
    """Returns the first rank and the number of ranks of every host: spread evenly, or one per device with `auto`."""
    found: list[tuple[int, int]] = []
    for index, there in enumerate(devices):
        few, more = (there, 0) if processes == "auto" else divmod(int(processes), len(devices))
        found.append((sum(found[-1]) if found else 0, few + (index < more)))
    return found


def checked_env(env: dict[str, str]) -> dict[str, str]:
    return {variable_name(name): value for name, value in env.items()}


class Record(Section):
    """What this machine remembers of a pod: how to reach it, and the job that was started there last."""

    name: str
    config: dict[str, Any]
    job: str | None = None
    folder: str | None = Field(None, description="the run's, on the hosts")
    url: str | None = Field(None, description="of that folder in object storage")

    def run_config(self) -> RunConfig:
        return from_plain(self.config, "the record of the pod")


def archive_of(name: str) -> Path:
    return cache_of(name) / "push.tar"


def startup_of(name: str) -> Path:
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
    return _folder("XDG_CACHE_HOME", ".cache") / checked_name(name)


def record_of(name: str) -> Path:
    return _folder("XDG_STATE_HOME", ".local/state") / f"{checked_name(name)}.json"


def _folder(variable: str, usual: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / usual) / "lockstep" / "pods"
