"""What the benchmarks share: options, a random order of measurements, processes, and the Markdown that goes to docs."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

Case = TypeVar("Case")

_PACKAGES = {"torch": "torch", "lightning": "lightning", "accelerate": "accelerate", "lockstep": "lockstep-train"}


def options(description: str | None, repeats: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run: proves the code, measures nothing")
    parser.add_argument("--repeats", type=int, help=f"measurements of each case (default: {repeats}; 1 with --quick)")
    parser.add_argument(
        "--patience", type=float, default=0, metavar="SECONDS", help="wait so long, each time, for an idle machine"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement there")
    parser.set_defaults(default_repeats=repeats)
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    chosen = parser.parse_args()
    chosen.repeats = chosen.repeats or (1 if chosen.quick else chosen.default_repeats)
    return chosen


def installed(module: str) -> bool:
    """Whether a peer is there to be measured; one that is not is left out of the table."""
    if importlib.util.find_spec(module) is not None:
        return True
    print(f"{module} is not installed, so it is left out (pip install 'lockstep-train[bench]')", file=sys.stderr)
    return False


def interleaved(cases: Sequence[Case], chosen: argparse.Namespace, shuffled: bool = True) -> Iterable[Case]:
    """Every case once per round, each round in a new random order: a slow minute of the machine hits all alike."""
    for number in range(chosen.repeats):
        for case in random.sample(cases, len(cases)) if shuffled else cases:
            await_idle(chosen.patience)
            print(f"round {number + 1} of {chosen.repeats}: {case}", file=sys.stderr, flush=True)
            yield case


def await_idle(patience: float) -> None:
    """Wait until nine tenths of the machine's time go unused, but no longer than patience lasts."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        idle, total = _idle_time()
        time.sleep(1)
        idle, total = (now - then for now, then in zip(_idle_time(), (idle, total), strict=True))
        if idle > 0.9 * total:
            return


def _idle_time() -> tuple[int, int]:
    """The machine's idle and total time since it was started, as Linux counts it."""
    times = [int(each) for each in Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]]
    return times[3] + times[4], sum(times)


class MeasurementFailed(SystemExit):
    """Ends a benchmark with the output of the command that failed, unless the benchmark can do without it."""


def run(command: Sequence[str], limit: float, **variables: str) -> None:
    """Run one measurement in processes of its own; their output is shown only where they fail."""
    process = subprocess.Popen(
        command,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        raise MeasurementFailed(f"{shlex.join(command)}\nhas not ended after {limit:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # whatever it started and left behind
    if process.returncode:
        raise MeasurementFailed(f"{shlex.join(command)}\n{output[-6000:]}\nexit code {process.returncode}")


@contextlib.contextmanager
def silent_processes() -> Iterator[None]:
    """Keep what the ranks of a run print out of the table that goes to the same output."""
    sys.stdout.flush()
    before, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(before, 1)
        os.close(before)
        os.close(nowhere)


def torchrun(processes: int) -> list[str]:
    """The command `torchrun`, by the module that it stands for, so that it is this interpreter's own."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]


def lockstep() -> list[str]:
    return [sys.executable, "-m", "lockstep"]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown, with the first column to the left and numbers to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def provenance() -> str:
    """Versions, cores and the command, in one line."""
    versions = [f"Python {platform.python_version()}", *(_version(name) for name in _PACKAGES)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    return f"{', '.join(filter(None, versions))}; {cores} {platform.machine()} cores; `{command}`"


def publish(text: str, raw: Mapping[str, Any], json_file: Path | None) -> None:
    print(f"{text}\n\n{provenance()}")
    if json_file is not None:
        json_file.write_text(json.dumps({"provenance": provenance(), **raw}, indent=1) + "\n", encoding="utf-8")


def _version(name: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(_PACKAGES[name])}"
    except importlib.metadata.PackageNotFoundError:
        if importlib.util.find_spec(name) is None:
            return ""
        return f"{name} {getattr(importlib.import_module(name), '__version__', 'from source')}"
