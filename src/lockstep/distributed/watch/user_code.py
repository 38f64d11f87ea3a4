"""Tells the user's code from ours and from libraries."""

from __future__ import annotations

import sysconfig
from pathlib import Path

_NOT_THE_USERS = tuple(
    str(Path(folder).resolve())
    for folder in (Path(__file__).parents[2], sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
)


def is_users(file: str) -> bool:
    """Whether a source file is neither ours nor a library's."""
    return not file.startswith(("<", *_NOT_THE_USERS)) and "site-packages" not in file
