"""The packages that Lockstep itself stands on, beside torch: each is really imported, in a process of its own."""

from __future__ import annotations

import importlib
import importlib.metadata
import traceback
from typing import Any

from lockstep.doctor import versions
from lockstep.doctor.ask import Answer, Stage
from lockstep.doctor.check import Check

# What is imported, and what pip knows it by: the dependencies of pyproject.toml, which a test holds equal.
REQUIREMENTS = {
    "torch": f"torch{versions.TORCH}",
    "numpy": "numpy",
    "pydantic": "pydantic>=2",
    "yaml": "PyYAML",
    "click": "click",
    "rich": "rich",
    "safetensors": "safetensors",
}


def look(stage: Stage) -> dict[str, Any]:
    """What is wrong with each of them; torch has a check of its own, and takes long."""
    found = {}
    for module in REQUIREMENTS:
        if module != "torch":
            stage(f"loading {module}")
            found[module] = _problem(module)
    return found


def judge(answer: Answer) -> Check:
    name = "dependencies"
    if answer.value is None:
        return Check(name, "fail", answer.trouble, reinstall(answer.module) or "reinstall what this message names")
    broken = {module: problem for module, problem in answer.value.items() if problem}
    if not broken:
        return Check(name, "ok", ", ".join(answer.value), data=answer.value)
    shown = "; ".join(f"{module}: {problem}" for module, problem in broken.items())
    wanted = " ".join(f"'{REQUIREMENTS[module]}'" for module in broken)
    return Check(name, "fail", shown, f"pip install --force-reinstall {wanted}", answer.value)


def reinstall(module: str) -> str:
    """The remedy for a package that cannot be imported; none where it is not one of ours."""
    return f"pip install --force-reinstall '{REQUIREMENTS[module]}'" if module in REQUIREMENTS else ""


def culprit(error: BaseException) -> str:
    """The package that an error is about, by its import name: one that is not there, or that raised it."""
    if isinstance(error, ImportError) and error.name:
        return error.name.split(".")[0]
    packages = [
        frame.f_globals.get("__name__", "").split(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    return next((package for package in reversed(packages) if package in REQUIREMENTS), "")


def _problem(module: str) -> str:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        return "not installed" if culprit(error) == module else f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
