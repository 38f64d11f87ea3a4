"""What is installed, and whether this machine has a port on loopback and a disk or bucket to write to."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import lockstep
from lockstep.doctor.ask import Answer, Stage
from lockstep.doctor.check import Check, Verdict
from lockstep.shown import size

# The variables that change what a run does here; no other is ever shown.
VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "PJRT_DEVICE")
_CONNECT_SECONDS = 5.0
_ROOMY_DISK = 1_000_000_000


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
    yield variables(os.environ)


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
        return Check(name, "fail", answer.problem, "reinstall what this message names")
    broken = {module: problem for module, problem in answer.value.items() if problem}
    if not broken:
        return Check(name, "ok", ", ".join(answer.value), data=answer.value)
    shown = "; ".join(f"{module}: {problem}" for module, problem in broken.items())
    remedy = "pip install --force-reinstall " + " ".join(f"'{REQUIREMENTS[module]}'" for module in broken)
    return Check(name, "fail", shown, remedy, answer.value)


def _problem(module: str) -> str:
    try:
        importlib.import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module:
            return "not installed"
        return f"{type(error).__name__}: {error}"
    return ""


def variables(env: Mapping[str, str]) -> Check:
    found = {name: env[name] for name in VARIABLES if name in env}
    shown = " ".join(f"{name}={value}" for name, value in found.items())
    return Check("variables", "ok", shown or "none is set that changes a run", data=found)


def port(problem: str) -> Check:
    if problem:
        remedy = "ranks meet on 127.0.0.1: bring the loopback interface up, and let the firewall pass it"
        return Check("ports", "fail", f"127.0.0.1: {problem}", remedy)
    return Check("ports", "ok", "a port on 127.0.0.1 opens and answers")


def port_problem() -> str:
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), _CONNECT_SECONDS),
        ):
            return ""
    except OSError as error:
        return str(error.strerror or error)


def write_to_disk(stage: Stage, out: str) -> dict[str, Any]:
    """Runs in a subprocess: a network disk that is gone blocks every access."""
    stage(f"writing to {out}")
    path = Path(out).absolute()
    folder = next(each for each in (path, *path.parents) if each.exists())
    problem = ""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"lockstep")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        problem = str(error.strerror or error)
    return {"folder": str(folder), "free": shutil.disk_usage(folder).free, "problem": problem}


def judge_disk(answer: Answer) -> Check:
    facts = answer.value
    if facts is None:
        return Check("disk", "fail", answer.problem, "name a folder on a disk that answers with --out")
    found = f"{size(facts['free'])} free in {facts['folder']}"
    if facts["problem"]:
        remedy = "make room, or name another folder with --out"
        return Check("disk", "fail", f"{found}: cannot be written: {facts['problem']}", remedy, facts)
    if facts["free"] < _ROOMY_DISK:
        return Check("disk", "warn", found, "checkpoints may not fit: make room, or lower checkpoint.keep", facts)
    return Check("disk", "ok", found, data=facts)


def write_to_bucket(stage: Stage, url: str) -> dict[str, Any]:
    """Runs in a subprocess: a service that does not answer blocks the caller."""
    from lockstep.mirror.bucket import Bucket
    from lockstep.mirror.url import parse

    stage(f"writing to {url}")
    Bucket(parse(url, "--out")).probe("--out")
    return {"url": url}


def judge_bucket(answer: Answer) -> Check:
    if answer.value is None:
        remedy = "" if answer.problem.startswith("--out") else "check the network, or name another place with --out"
        return Check("bucket", "fail", answer.problem, remedy)
    found = f"{answer.value['url']} can be written, listed, read and deleted from"
    return Check("bucket", "ok", found, data=answer.value)
