"""Returns the version of Lockstep, or of another package that is installed."""

from __future__ import annotations

from importlib import metadata


def installed() -> str:
    """Returns the version of the installation; a copy that was not installed has none."""
    return version_of("lockstep-train") or "unknown"


def version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
