"""What is installed: Python, Lockstep, torch, and the packages that Lockstep depends on or has extras for."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import re
import sys
import traceback
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import lockstep
from lockstep.doctor.ask import Answer, Stage
from lockstep.doctor.check import Check, Verdict


class Range(NamedTuple):
    """From `low` up to `high`, which is excluded; both are minor versions."""

    low: str
    high: str

    def __str__(self) -> str:
        return f">={self.low},<{self.high}"


# Those of pyproject.toml, which is not installed; a test holds them equal.
PYTHON = Range("3.11", "3.14")
TORCH = Range("2.9", "2.16")
REQUIREMENTS = {  # by import name
    "torch": f"torch{TORCH}",
    "numpy": "numpy",
    "pydantic": "pydantic>=2",
    "yaml": "PyYAML",
    "click": "click",
    "rich": "rich",
    "safetensors": "safetensors",
}
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


def minor(version: str) -> tuple[int, int]:
    """Returns the major and minor number; (0, 0) for a version that has none."""
    match = re.match(r"v?(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _judge(version: str, supported: Range) -> Verdict:
    if minor(version) < minor(supported.low):
        return "fail"
    return "ok" if minor(version) < minor(supported.high) else "warn"


def fit_together(torch: str, torch_xla: str) -> bool:
    """torch_xla is built against one minor version of torch and crashes with any other."""
    return minor(torch) == minor(torch_xla)


def python(version: str) -> Check:
    verdict, data = _judge(version, PYTHON), {"version": version, "executable": sys.executable}
    remedy = "" if verdict == "ok" else f"Lockstep is made for Python {PYTHON}: make an environment with one of these"
    return Check("python", verdict, f"{version} at {sys.executable}", remedy, data)


def torch(version: str | None) -> Check:
    remedy = f"pip install '{REQUIREMENTS['torch']}'"
    if version is None:
        return Check("torch", "fail", "not installed", remedy)
    verdict = _judge(version, TORCH)
    if verdict == "ok":
        return Check("torch", "ok", version, data={"version": version})
    found = f"{version} is {'older' if verdict == 'fail' else 'newer'} than what Lockstep is tested with ({TORCH})"
    return Check("torch", verdict, found, remedy, {"version": version})


def extras(found: Mapping[str, str], asked: Collection[str]) -> Check:
    shown = ", ".join(f"{name} {found[name]}" if name in found else f"no {name}" for name in EXTRAS)
    data = {name: found.get(name) for name in EXTRAS}
    if "torch" not in found or "torch_xla" not in found or fit_together(found["torch"], found["torch_xla"]):
        return Check("optional", "ok", shown, data=data)
    shown += f": torch_xla {found['torch_xla']} does not fit torch {found['torch']}"
    remedy = "pip install 'lockstep-train[xla]', which brings versions of both that belong together"
    return Check("optional", "fail" if "xla" in asked else "warn", shown, remedy, data)


def import_dependencies(stage: Stage) -> dict[str, Any]:
    """Returns the problem of each; torch has its own check, and takes long."""
    found = {}
    for module in REQUIREMENTS:
        if module != "torch":
            stage(f"loading {module}")
            found[module] = _problem(module)
    return found


def judge_dependencies(answer: Answer) -> Check:
    name = "dependencies"
    if answer.value is None:
        return Check(name, "fail", answer.problem, reinstall(answer.module) or "reinstall what this message names")
    broken = {module: problem for module, problem in answer.value.items() if problem}
    if not broken:
        return Check(name, "ok", ", ".join(answer.value), data=answer.value)
    shown = "; ".join(f"{module}: {problem}" for module, problem in broken.items())
    return Check(name, "fail", shown, reinstall(*broken), answer.value)


def reinstall(*modules: str) -> str:
    """Returns the remedy for packages that cannot be imported, if they are dependencies of Lockstep."""
    wanted = " ".join(f"'{REQUIREMENTS[module]}'" for module in modules if module in REQUIREMENTS)
    return f"pip install --force-reinstall {wanted}" if wanted else ""


def culprit(error: BaseException) -> str:
    """Returns the import name of the package that is missing, or that raised the error."""
    if isinstance(error, ImportError) and error.name:
        return error.name.split(".")[0]
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    packages = [name.split(".")[0] for name in reversed(frames)]
    return next((package for package in packages if package in REQUIREMENTS), "")


def _problem(module: str) -> str:
    try:
        importlib.import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and culprit(error) == module:
            return "not installed"
        return f"{type(error).__name__}: {error}"
    return ""
