"""Which Lockstep this is."""

from __future__ import annotations

from importlib import metadata


def installed() -> str:
    """The version of the installation, which has it from pyproject.toml; a copy that was not installed has none."""
    try:
        return metadata.version("lockstep-train")
    except metadata.PackageNotFoundError:
        return "unknown"
