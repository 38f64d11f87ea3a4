"""TensorBoard on the traces of a run: finds them, makes all of them readable by one plugin, says how to start it."""

from __future__ import annotations

import importlib.util
import socket
import sys
import time
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.profiler import FOLDER
from lockstep.profiler.xplane import convert

_TORCH = "*.pt.trace.json*"
_SESSIONS = Path("plugins") / "profile"  # where the plugin looks, below any folder


def prepare(run: Path, host: str, port: int) -> tuple[list[Path], list[str]]:
    """The traces of a run, and the command that shows them."""
    if not run.is_dir():
        raise ConfigError(f"{run}: there is no such folder")
    if not any((run / FOLDER).glob(f"proc_*/{_TORCH}")) and not any((run / FOLDER).glob(f"proc_*/{_SESSIONS}/*")):
        raise ConfigError(f"{run} has no profile: train with `lockstep train --profile`, or with a profile section")
    missing = [name for name in ("tensorboard", "xprof") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"looking at a profile needs {' and '.join(missing)}: pip install 'lockstep-train[profile]'. "
            "Without it, a *.pt.trace.json.gz opens in Perfetto and in chrome://tracing"
        )
    _refuse_taken_port(host, port)
    for trace in sorted((run / FOLDER).glob(f"proc_*/{_TORCH}")):
        _make_readable(trace)
    sessions = sorted(path for path in (run / FOLDER).glob(f"proc_*/{_SESSIONS}/*") if path.is_dir())
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(run), "--host", host, "--port", str(port)]
    return sessions, command


def _make_readable(trace: Path) -> None:
    """A trace of torch.profiler, once more beside itself, as the plugin reads it."""
    worker, nanoseconds = trace.name.split(".")[:2]
    stamp = time.strftime("%Y_%m_%d_%H_%M_%S", time.localtime(int(nanoseconds) / 1e9))
    file = trace.parent / _SESSIONS / stamp / f"{worker}.xplane.pb"
    if file.exists():
        return
    try:
        converted = convert(trace)
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{trace} is not a trace of torch.profiler, or not whole: {error!r}. Move it away") from None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_bytes(converted)
        partial.replace(file)
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be written: {error.strerror}. Copy the run's folder to where it can"
        ) from None


def _refuse_taken_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"TensorBoard cannot listen at {host}:{port}: {error.strerror}; choose another with --port or --host"
            ) from None
