"""Which files of a task's folder travel to other machines: code, without what does not belong there."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from pathlib import Path

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


def travelling(folder: Path) -> Iterator[Path]:
    """The files below a folder that travel, in the order of their names."""
    for entry in sorted(folder.iterdir()):
        is_folder = entry.is_dir()  # asked once: a push looks at every file there is
        excluded = any(
            fnmatch.fnmatch(entry.name, pattern.removesuffix("/"))
            for pattern in EXCLUDED
            if is_folder or not pattern.endswith("/")
        )
        if excluded:
            continue
        if is_folder:
            yield from travelling(entry) if not entry.is_symlink() else ()
        elif entry.is_file():
            yield entry
