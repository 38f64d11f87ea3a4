"""What is installed, and whether this machine has a port on loopback and a disk or bucket to write to."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import lockstep
from lockstep.doctor.ask import Stage
from lockstep.doctor.check import Check
from lockstep.shown import size
from lockstep.version import version_of

# The variables that change what a run does here; no other is ever shown.
VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "PJRT_DEVICE")
_CONNECT_SECONDS = 5.0
_ROOMY_DISK = 1_000_000_000


# By import name; torch has its own check, and takes long.
DEPENDENCIES = {"numpy": "numpy", "pydantic": "pydantic", "yaml": "PyYAML", "click": "click", "rich": "rich",
                "safetensors": "safetensors"}  # fmt: skip
OPTIONAL = ("tensorboard", "torch_xla", "ray", "scikit-learn", "cloudpickle")


def look(asked: Collection[str]) -> Iterator[Check]:
    about = {"version": platform.python_version(), "executable": sys.executable}
    yield Check("python", "ok", f"{about['version']} at {about['executable']}", data=about)
    yield Check("lockstep", "ok", f"{lockstep.__version__} in {Path(lockstep.__file__).parent}")
    versions = {name: version_of(name) for name in ("torch", *OPTIONAL)}
    yield torch(versions["torch"])
    yield optional(versions, asked)
    yield variables(os.environ)


def fit_together(torch: str | None, torch_xla: str | None) -> bool:
    """torch_xla is built against one minor version of torch and crashes with any other."""
    return torch is None or torch_xla is None or torch.split(".")[:2] == torch_xla.split(".")[:2]


def torch(version: str | None) -> Check:
    if version is None:
        return Check("torch", "fail", "not installed", "pip install torch (https://pytorch.org/get-started/locally)")
    return Check("torch", "ok", version, data={"version": version})


def optional(versions: Mapping[str, str | None], asked: Collection[str]) -> Check:
    shown = ", ".join(f"{name} {versions[name]}" if versions.get(name) else f"no {name}" for name in OPTIONAL)
    data, torch, torch_xla = dict(versions), versions.get("torch"), versions.get("torch_xla")
    if fit_together(torch, torch_xla):
        return Check("optional", "ok", shown, data=data)
    remedy = "pip install 'lockstep-train[xla]', which brings versions of both that belong together"
    shown += f": torch_xla {torch_xla} does not fit torch {torch}"
    return Check("optional", "fail" if "xla" in asked else "warn", shown, remedy, data)


def import_dependencies(stage: Stage) -> Check:
    problems = {}
    for module in DEPENDENCIES:
        stage(f"loading {module}")
        try:
            importlib.import_module(module)
        except Exception as error:
            missing = isinstance(error, ModuleNotFoundError) and error.name == module
            problems[module] = "not installed" if missing else f"{type(error).__name__}: {error}"
    if not problems:
        return Check("dependencies", "ok", ", ".join(DEPENDENCIES))
    shown = "; ".join(f"{module}: {problem}" for module, problem in problems.items())
    remedy = "pip install --force-reinstall " + " ".join(DEPENDENCIES[module] for module in problems)
    return Check("dependencies", "fail", shown, remedy, problems)


def variables(env: Mapping[str, str]) -> Check:
    found = {name: env[name] for name in VARIABLES if name in env}
    shown = " ".join(f"{name}={value}" for name, value in found.items())
    return Check("variables", "ok", shown or "none is set that changes a run", data=found)


def port() -> Check:
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), _CONNECT_SECONDS),
        ):
            return Check("ports", "ok", "a port on 127.0.0.1 opens and answers")
    except OSError as error:
        remedy = "ranks meet on 127.0.0.1: bring the loopback interface up, and let the firewall pass it"
        return Check("ports", "fail", f"127.0.0.1: {error.strerror or error}", remedy)


def write_to_disk(stage: Stage, out: str) -> Check:
    """Runs in a subprocess: a network disk that is gone blocks every access."""
    stage(f"writing to {out}")
    path = Path(out).absolute()
    folder = next(each for each in (path, *path.parents) if each.exists())
    free = shutil.disk_usage(folder).free
    found, facts = f"{size(free)} free in {folder}", {"folder": str(folder), "free": free}
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"lockstep")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        remedy = "make room, or name another folder with --out"
        return Check("disk", "fail", f"{found}: cannot be written: {error.strerror or error}", remedy, facts)
    if free < _ROOMY_DISK:
        return Check("disk", "warn", found, "checkpoints may not fit: make room, or lower checkpoint.keep", facts)
    return Check("disk", "ok", found, data=facts)


def write_to_bucket(stage: Stage, url: str) -> Check:
    """Runs in a subprocess: a service that does not answer blocks the caller."""
    from lockstep.mirror.bucket import Bucket
    from lockstep.mirror.url import parse

    stage(f"writing to {url}")
    Bucket(parse(url, "--out")).probe("--out")
    return Check("bucket", "ok", f"{url} can be written, listed, read and deleted from", data={"url": url})
