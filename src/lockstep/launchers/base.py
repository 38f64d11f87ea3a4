"""The Launcher protocol: every way to start the ranks of a run, and how one of them is chosen.

A launcher is a module with four functions. To add one, write the module and name it in `_MODULES`.
"""

from __future__ import annotations

import errno
import importlib
import os
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from lockstep.errors import ConfigError
from lockstep.mirror.url import Url

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.distributed.failure import Result
    from lockstep.launchers.resume import Resumed
    from lockstep.mirror.mirror import Mirror

Say = Callable[[str], None]

_MODULES = {
    "local": "lockstep.launchers.local.launcher",
    "ssh": "lockstep.launchers.ssh.launcher",
    "slurm": "lockstep.launchers.slurm",
    "ray": "lockstep.launchers.cluster",
    "rank": "lockstep.launchers.rank",
}
# These return before the run ends, or leave its folder on another machine.
DETACHED = ("ssh", "slurm")


@dataclass(frozen=True)
class Ended:
    """How a launch ended: with a `result` for ranks that this process waited for, with a `message` for others."""

    exit_code: int = 0
    config: RunConfig | None = None  # resolved
    folder: Path | None = None
    result: Result | None = None
    mirror: Mirror | None = None
    url: Url | None = None  # of the run's folder, where `folder` has only an outline of it
    outcome: dict[str, Any] | None = None  # what rank 0 wrote down, where this process is a rank
    message: str = ""
    job: str | None = None  # the number of a queued job


class Launcher(Protocol):
    """One way to start ranks. `train` and `resume` hold the run's folder until their context is left."""

    def plan(self, config: RunConfig, out: Out, folder: str | None = None) -> tuple[RunConfig, str]:
        """Returns the config as it would be run, checked, and what would be started; `folder`: of a run to resume."""
        ...

    def train(self, config: RunConfig, out: Out, say: Say) -> AbstractContextManager[Ended]:
        """Starts a new run."""
        ...

    def resume(self, config: RunConfig, run: Resumed, say: Say) -> AbstractContextManager[Ended]:
        """Resumes a run from the newest checkpoint in its folder."""
        ...

    def describe(self, config: RunConfig) -> str:
        """Returns where the ranks run, as part of a sentence."""
        ...


def launcher_of(config: RunConfig, env: Mapping[str, str], pod: str | None = None) -> Launcher:
    """Returns the launcher of a config; `pod` asks for the hosts of a pod, whatever launch.type says."""
    name = "rank" if trains_here(config, env) else "ssh" if pod else config.launch.type
    return cast(Launcher, importlib.import_module(_MODULES[name]))


def trains_here(config: RunConfig, env: Mapping[str, str]) -> bool:
    """Returns whether this process is a rank already: by another launcher, or as the only task of a SLURM job."""
    from lockstep.distributed.topology import launched

    return launched(env) or (config.launch.type == "slurm" and "SLURM_JOB_ID" in env)


@dataclass(frozen=True)
class Out:
    """Where the folders of new runs are made, and the option or argument that named it."""

    place: Path | Url
    setting: str = "--out"
    final: bool = False  # launch.ray.storage does not replace it
    pod: str | None = None  # the pod that is to have the run; by default, the config's name

    def new(self, config: RunConfig) -> Path:
        """Creates a run's folder with its config. For a URL, it is the folder on this host that stands for it."""
        from lockstep.record import run_folder

        if isinstance(self.place, Url):
            from lockstep.mirror import staging

            folder = staging.new(self.place, str(config.name), self.setting)
        else:
            folder = run_folder.create(self.place, str(config.name), self.setting)
        run_folder.has_begun(folder)
        run_folder.write_config(folder, config)
        return folder

    def check(self) -> None:
        """Refuses a bucket or a folder that runs cannot be made in, without making it."""
        if isinstance(self.place, Url):
            from lockstep.mirror.bucket import Bucket

            Bucket(self.place).probe(self.setting)
            return
        there = next(each for each in (self.place.absolute(), *self.place.absolute().parents) if each.exists())
        if there.is_dir() and not os.access(there, os.W_OK | os.X_OK):
            raise ConfigError(
                f"{self.setting} {self.place}: the run's folder cannot be made there: {os.strerror(errno.EACCES)}. "
                f"Name a writable folder with {self.setting}"
            )

    def on_disk(self) -> Path:
        if isinstance(self.place, Url):
            raise ConfigError(
                f"{self.setting} {self.place}: launch: slurm needs a folder that this machine and the nodes share"
            )
        return self.place


def run_name(text: str) -> str:
    """Returns a valid name for a run, made from the name of a file, a folder or a class."""
    return re.sub(r"[^\w.-]+", "-", text).strip(".-") or "run"
