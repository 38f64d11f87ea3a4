"""Where this machine keeps what belongs to a pod."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.pod.folder import checked_name


def cache_of(name: str) -> Path:
    """A folder for what can be made again."""
    return _folder("XDG_CACHE_HOME", ".cache") / checked_name(name)


def record_of(name: str) -> Path:
    """The file that a pod is remembered by."""
    return _folder("XDG_STATE_HOME", ".local/state") / f"{checked_name(name)}.json"


def _folder(variable: str, usual: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / usual) / "lockstep" / "pods"
