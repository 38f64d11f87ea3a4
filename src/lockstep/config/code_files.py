"""Which files of a task's folder travel to other machines: code, without what does not belong there."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator

# In the language of .gitignore. What is big, what belongs to this machine, and what nobody else should read.
EXCLUDED = (
    "runs/",
    ".git/",
    ".venv*/",
    "venv/",
    "env/",
    "node_modules/",
    "__pycache__/",
    ".mypy_cache/",
    ".pytest_cache/",
    ".ruff_cache/",
    "*.safetensors",
    ".env",
    ".env.*",
    "*.pem",
    "*.key",
    "id_rsa*",
    "id_ed25519*",
)


_FOLDERS_EXCLUDED = re.compile("|".join(fnmatch.translate(each.removesuffix("/")) for each in EXCLUDED))
_FILES_EXCLUDED = re.compile("|".join(fnmatch.translate(each) for each in EXCLUDED if not each.endswith("/")))


def travelling(folder: str | os.PathLike[str], below: str = "") -> Iterator[str]:
    """The files below a folder that travel, by their paths there, in the order of their names.

    A push asks about every file there is, so this makes no Path of any.
    """
    with os.scandir(folder) as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    for entry in ordered:
        if entry.is_dir():
            if not entry.is_symlink() and not _FOLDERS_EXCLUDED.match(entry.name):
                yield from travelling(entry.path, f"{below}{entry.name}/")
        elif entry.is_file() and not _FILES_EXCLUDED.match(entry.name):
            yield below + entry.name
