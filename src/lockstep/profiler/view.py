"""TensorBoard on the traces of a run: finds them, makes all of them readable by one plugin, says how to start it."""

from __future__ import annotations

import gzip
import importlib.util
import socket
import sys
import zlib
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.profiler import FOLDER
from lockstep.profiler.xplane import SESSIONS, make_readable

_TORCH = "*.pt.trace.json.gz"


def prepare(run: Path, host: str, port: int) -> tuple[list[Path], list[str]]:
    """The traces of a run, and the command that shows them."""
    if not run.is_dir():
        raise ConfigError(f"{run}: there is no such folder")
    if not any((run / FOLDER).glob(f"proc_*/{_TORCH}")) and not any((run / FOLDER).glob(f"proc_*/{SESSIONS}/*")):
        raise ConfigError(f"{run} has no profile: train with `lockstep train --profile`, or with a profile section")
    missing = [name for name in ("tensorboard", "xprof") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"looking at a profile needs {' and '.join(missing)}: pip install 'lockstep-train[profile]'. "
            "Without it, a *.pt.trace.json.gz opens in Perfetto and in chrome://tracing"
        )
    _refuse_taken_port(host, port)
    for trace in sorted((run / FOLDER).glob(f"proc_*/{_TORCH}")):
        try:
            make_readable(trace)
        except (EOFError, ValueError, KeyError, TypeError, zlib.error, gzip.BadGzipFile) as error:
            raise ConfigError(
                f"{trace}: not a trace of torch.profiler, or not whole ({error!r}); move it away"
            ) from None
        except OSError as error:
            raise ConfigError(f"{trace}: {error}. Copy the run's folder to where it can be written") from None
    sessions = sorted(path for path in (run / FOLDER).glob(f"proc_*/{SESSIONS}/*") if path.is_dir())
    command = [
        sys.executable,
        "-P",
        "-m",
        "tensorboard.main",
        "--logdir",
        str(run),
        "--host",
        host,
        "--port",
        str(port),
    ]
    return sessions, command


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
