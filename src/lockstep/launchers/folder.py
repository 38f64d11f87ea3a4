"""The folder that a new run gets, and its name."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import ConfigError
from lockstep.mirror.url import Url, place

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig


def named(text: str) -> str:
    """A run's name from a file's, a folder's or a class's, in the characters that names may have."""
    return re.sub(r"[^\w.-]+", "-", text).strip(".-") or "run"


def new(out: Path | Url, setting: str, config: RunConfig) -> Path:
    """A new folder with its config in it; `setting` is what named `out`. For a URL, the folder that stands for it."""
    from lockstep.record import run_folder

    if isinstance(out, Url):
        from lockstep.mirror import staging

        folder = staging.new(out, str(config.name), setting)
    else:
        folder = run_folder.create(out, str(config.name), setting)
    run_folder.has_begun(folder)
    run_folder.write_config(folder, config)
    return folder


def require_place(out: Path | Url, setting: str) -> None:
    """Refuse a folder that runs cannot be made in, before anything is started and without making it."""
    if isinstance(out, Url):
        return
    there = next(each for each in (out.absolute(), *out.absolute().parents) if each.exists())
    if there.is_dir() and not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{setting} {out}: the run's folder cannot be made there: {os.strerror(errno.EACCES)}. "
            f"Name a writable folder with {setting}"
        )


def on_ray(config: RunConfig, out: Path | Url, make_parent: bool) -> Callable[[RunConfig], Path]:
    """The same for a run on a cluster, whose nodes may share another folder than `out`."""
    from lockstep.record import run_folder

    storage = config.launch.ray.storage
    where, setting = (place(storage, "launch.ray.storage"), "launch.ray.storage") if storage else (out, "--out")
    if isinstance(where, Url):
        require_bucket(where, setting)
    elif make_parent:
        run_folder.require_folder(where, setting)
    return lambda resolved: new(where, setting, resolved)


def require_bucket(out: Path | Url, setting: str) -> None:
    """Refuse a bucket that cannot be used, before anything is started."""
    if isinstance(out, Url):
        from lockstep.mirror.bucket import Bucket

        Bucket(out).probe(setting)
