"""Where compiled code is kept: a folder of the user's that outlives the run, shared by all processes and restarts.

Torch finds what is there by its content, so that a second start compiles nothing. By itself it keeps it in the folder
for temporary files, which is empty after a restart of the machine and new in every container.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from lockstep.errors import ConfigError

logger = logging.getLogger(__name__)

# What torch's compiler and Triton's are told where to keep things by.
_INDUCTOR, _TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


def keep_compiled_code(asked: str | None) -> None:
    """Have torch keep compiled code in a folder; by default in the user's cache, unless the environment names one."""
    if asked is None and _INDUCTOR in os.environ:
        return
    folder = Path(asked).expanduser().absolute() if asked is not None else _default()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        problem = _problem(found) if os.access(folder, os.W_OK) else "it cannot be written to"
    except (OSError, RuntimeError) as error:  # no home
        problem = getattr(error, "strerror", None) or str(error)
    if problem is None:
        os.environ[_INDUCTOR] = str(folder)
        # Torch would give every GPU of a host a folder of its own, and so each of its ranks the same work.
        os.environ.setdefault(_TRITON, str(folder / "triton"))
    elif asked is not None:
        raise ConfigError(f"train.compile.cache: {folder}: {problem}. Name a folder of your own")
    else:
        logger.info("compiled code is not kept in %s: %s; torch keeps it where it does by itself", folder, problem)


def _default() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or ""
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "lockstep" / "compiled"


def _problem(found: os.stat_result) -> str | None:
    """What is in it is run: whoever can write there can run code as this user."""
    if not stat.S_ISDIR(found.st_mode):
        return "it is not a folder"
    if found.st_uid != os.geteuid():
        return f"it belongs to another user (number {found.st_uid}), and what is in it would be run"
    if found.st_mode & 0o022:
        return "others may write to it, and what is in it would be run (chmod go-w)"
    return None
