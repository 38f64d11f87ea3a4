"""What is installed: Python, Lockstep, torch and the packages that Lockstep's extras name. Nothing is imported."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import lockstep
from lockstep.doctor import versions
from lockstep.doctor.check import Check

# Optional packages, and the extra of Lockstep that brings each.
EXTRAS = {
    "tensorboard": "tensorboard",
    "torch_xla": "xla",
    "ray": "ray",
    "scikit-learn": "examples",
    "cloudpickle": "notebook",
}


def look(asked: Collection[str]) -> Iterator[Check]:
    found = {name: version for name in ("torch", *EXTRAS) if (version := version_of(name)) is not None}
    yield python(platform.python_version())
    yield Check("lockstep", "ok", f"{lockstep.__version__} in {Path(lockstep.__file__).parent}")
    yield torch(found.get("torch"))
    yield extras(found, asked)


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def python(version: str) -> Check:
    place, data = versions.place(version, versions.PYTHON), {"version": version, "executable": sys.executable}
    found = f"{version} at {sys.executable}"
    if place == "inside":
        return Check("python", "ok", found, data=data)
    remedy = f"Lockstep is made for Python {versions.PYTHON}: make an environment with one of these"
    return Check("python", "fail" if place == "older" else "warn", found, remedy, data)


def torch(version: str | None) -> Check:
    remedy = f"pip install 'torch{versions.TORCH}'"
    if version is None:
        return Check("torch", "fail", "not installed", remedy)
    place = versions.place(version, versions.TORCH)
    if place == "inside":
        return Check("torch", "ok", version, data={"version": version})
    found = f"{version} is {place} than what Lockstep is tested with ({versions.TORCH})"
    return Check("torch", "fail" if place == "older" else "warn", found, remedy, {"version": version})


def extras(found: Mapping[str, str], asked: Collection[str]) -> Check:
    """The optional packages in one line; torch_xla has to fit torch."""
    shown = ", ".join(f"{name} {found[name]}" if name in found else f"no {name}" for name in EXTRAS)
    data = {name: found.get(name) for name in EXTRAS}
    if "torch" not in found or "torch_xla" not in found or versions.fit_together(found["torch"], found["torch_xla"]):
        return Check("optional", "ok", shown, data=data)
    return Check(
        "optional",
        "fail" if "xla" in asked else "warn",
        f"{shown}: torch_xla {found['torch_xla']} does not fit torch {found['torch']}",
        "pip install 'lockstep-train[xla]', which brings versions of both that belong together",
        data,
    )
