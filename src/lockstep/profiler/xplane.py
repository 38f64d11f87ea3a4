"""Shows the traces of a run in TensorBoard: converts those of torch.profiler to the format that XLA writes.

TensorBoard's plugin for torch.profiler is no longer maintained, and needs a connection to the internet; the one for XLA
is maintained, and needs none (decision 011). The messages are those of XLA's xplane.proto.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import socket
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lockstep import run_files
from lockstep.errors import ConfigError
from lockstep.profiler import FOLDER

_PICOSECONDS = 1_000_000  # in a microsecond, the unit of a Chrome trace

# XSpace.planes; XPlane.id, name, lines, event_metadata; a map's entries are key and value
_PLANES, _PLANE_ID, _PLANE_NAME, _PLANE_LINES, _PLANE_EVENT_METADATA, _KEY, _VALUE = 1, 1, 2, 3, 4, 1, 2
# XEventMetadata.id, name; XLine.id, name, timestamp_ns, events, display_id; XEvent.metadata_id, offset_ps, duration_ps
_METADATA_ID, _METADATA_NAME = 1, 2
_LINE_ID, _LINE_NAME, _LINE_TIMESTAMP, _LINE_EVENTS, _LINE_DISPLAY_ID = 1, 2, 3, 4, 10
_EVENT_METADATA, _EVENT_OFFSET, _EVENT_DURATION = 1, 2, 3

SESSIONS = Path("plugins") / "profile"  # where the plugin looks, below any folder
_FIRST_LINE = 1000  # the plugin adds lines with small numbers
Event = dict[str, Any]
_LONGEST_TRACE = 2_000_000_000


def make_readable(trace: Path) -> None:
    """Writes a trace of torch.profiler once more, beside itself, as the plugin reads it."""
    worker, nanoseconds, *_ = trace.name.split(".")
    stamp = time.strftime("%Y_%m_%d_%H_%M_%S", time.localtime(int(nanoseconds) / 1e9))
    file = trace.parent / SESSIONS / stamp / f"{worker}.xplane.pb"
    if file.exists():
        return
    converted = convert(trace)
    run_files.write(file, converted, depth=len(file.relative_to(trace.parents[2]).parts))


def convert(trace: Path) -> bytes:
    """Returns the slices of a trace, by process (or device) and thread (or stream), as an XSpace."""
    packed = run_files.read_bytes(trace, _LONGEST_TRACE, depth=3)
    events: list[Event] = json.loads(gzip.decompress(packed))["traceEvents"]
    processes, threads = _names(events, "process_name"), _names(events, "thread_name")
    labels = _names(events, "process_labels", "labels")
    lines: dict[Any, dict[Any, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        if event.get("ph") == "X" and not str(event["pid"]).startswith(("Spans", "Traces")):  # those repeat the whole
            lines[event["pid"]][event["tid"]].append(event)
    start = min((event["ts"] for each in lines.values() for line in each.values() for event in line), default=0.0)
    space = b""
    for number, (pid, in_process) in enumerate(lines.items()):
        # One plane for the host, one per device.
        device = labels.get((pid, 0), "CPU").split(" ")
        plane = f"/device:{':'.join(device)}" if device[0] == "GPU" else "/host:CPU"
        named = {tid: threads.get((pid, tid), f"{processes.get((pid, 0), pid)} {tid}") for tid in in_process}
        space += _field(_PLANES, _plane(number, plane, named, in_process, start))
    return space


def _names(events: Iterable[Event], kind: str, argument: str = "name") -> dict[tuple[Any, Any], str]:
    """Returns the trace's names of processes (whose thread is 0) or threads."""
    return {
        (event["pid"], event["tid"] if kind == "thread_name" else 0): str(event["args"][argument])
        for event in events
        if event.get("ph") == "M" and event.get("name") == kind
    }


def _plane(number: int, name: str, names: dict[Any, str], lines: dict[Any, list[Event]], start: float) -> bytes:
    known: dict[str, int] = {}
    body = [_field(_PLANE_ID, number), _field(_PLANE_NAME, name)]
    for position, (tid, events) in enumerate(lines.items(), start=_FIRST_LINE):
        line = [_field(_LINE_ID, position), _field(_LINE_DISPLAY_ID, position)]
        line += [_field(_LINE_NAME, names[tid]), _field(_LINE_TIMESTAMP, 0)]
        for event in sorted(events, key=lambda each: (each["ts"], -each["dur"])):
            metadata = known.setdefault(str(event["name"]), len(known) + 1)
            offset, duration = (round(each * _PICOSECONDS) for each in (event["ts"] - start, event["dur"]))
            fields = ((_EVENT_METADATA, metadata), (_EVENT_OFFSET, offset), (_EVENT_DURATION, duration))
            line.append(_field(_LINE_EVENTS, b"".join(_field(*each) for each in fields)))
        body.append(_field(_PLANE_LINES, b"".join(line)))
    for called, metadata in known.items():
        described = _field(_METADATA_ID, metadata) + _field(_METADATA_NAME, called)
        body.append(_field(_PLANE_EVENT_METADATA, _field(_KEY, metadata) + _field(_VALUE, described)))
    return b"".join(body)


def _field(number: int, value: int | str | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_TORCH = "*.pt.trace.json.gz"


def prepare(run: Path, host: str, port: int) -> tuple[list[Path], list[str]]:
    """Makes the traces of a run readable; returns them, and the command that shows them."""
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
    options = ["--logdir", str(run), "--host", host, "--port", str(port)]
    return sessions, [sys.executable, "-P", "-m", "tensorboard.main", *options]


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
