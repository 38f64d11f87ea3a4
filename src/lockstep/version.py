"""Which Lockstep this is, and which version of another package is installed."""

from __future__ import annotations

import os
import sys


def installed() -> str:
    """The version of the installation, which has it from pyproject.toml; a copy that was not installed has none."""
    return version_of("lockstep-train") or "unknown"


def version_of(distribution: str) -> str | None:
    """As importlib.metadata says it, by the same folder, but without all that it imports: hosts are asked often."""
    beginning = f"{distribution.replace('-', '_').lower()}-"
    for place in sys.path:
        try:
            names = os.listdir(place or ".")  # noqa: PTH208  pathlib need not be loaded yet
        except OSError:
            continue
        for name in names:
            if name.endswith(".dist-info") and name.lower().startswith(beginning):
                return name[len(beginning) : -len(".dist-info")]
    return _otherwise(distribution)


def _otherwise(distribution: str) -> str | None:
    """Of what was installed in a rarer way: an egg, a zip file, a finder of its own."""
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
