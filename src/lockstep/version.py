"""Returns the version of Lockstep, or of another package that is installed."""

from __future__ import annotations

import os
import sys


def installed() -> str:
    """Returns the version of the installation; a copy that was not installed has none."""
    return version_of("lockstep-train") or "unknown"


def version_of(distribution: str) -> str | None:
    """Returns what importlib.metadata would, without importing it, which takes long: hosts are asked often."""
    beginning = f"{distribution.replace('-', '_').lower()}-"
    for place in sys.path:
        try:
            names = os.listdir(place or ".")  # noqa: PTH208  pathlib need not be loaded yet
        except OSError:
            continue
        for name in names:
            if name.endswith(".dist-info") and name.lower().startswith(beginning):
                return name[len(beginning) : -len(".dist-info")]
    from importlib import metadata  # for an egg, a zip file or a custom finder

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
