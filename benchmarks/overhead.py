"""What a training step costs under each framework: the same small network and data, timed the same way.

Every measurement is a process (or two) of its own; all of them are interleaved in random order. The probe is the same
everywhere: the time at each call of the loss function, on rank 0. A step is the time from one call to the next.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import report

HERE = Path(__file__).parent
WARM_UP = 200
BLOCK = 50  # Lockstep writes a row of metrics as often as this
ONE_THREAD = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}

NAMES = {
    "plain": "plain PyTorch",
    "fabric": "Lightning Fabric",
    "lightning": "Lightning Trainer",
    "accelerate": "Accelerate",
    "lockstep-run": "Lockstep Run",
    "lockstep-trainer": "Lockstep Trainer",
}
NEEDS = {"fabric": "lightning", "lightning": "lightning", "accelerate": "accelerate"}

NOTES = """\
An MLP of 64-128-10 on 16,384 examples in memory (a `TensorDataset`), SGD, float32, 32 examples per process and step,
one thread per process, gloo between two. µs: the median step. With all: the median over blocks of 50 steps of their
mean, which also holds what is done only now and then. Nobody saves, validates or shows progress. Plain, Fabric
and Accelerate log nothing; the Lightning Trainer is `barebones=True`; Lockstep, which has no such mode, brings together
the mean loss of all ranks, looks for NaN, and writes it to metrics.jsonl and the log every 50 steps. All but Lockstep
load with torch's `DataLoader` in the training process; Lockstep indexes the tensors of a whole batch at once."""


def main() -> None:
    parser = report.options(__doc__, repeats=9)
    parser.add_argument("--steps", type=int, help="steps per measurement (default: 3000; 300 with --quick)")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="default: 1 2")
    chosen = report.parse(parser)
    steps = chosen.steps or (300 if chosen.quick else 3000)

    present = {module: report.installed(module) for module in ("lightning", "accelerate")}
    names = [name for name in chosen.only if present.get(NEEDS.get(name, ""), True)]
    cases = [(name, processes) for name in names for processes in chosen.processes]
    found: dict[tuple[str, int], list[dict[str, float]]] = defaultdict(list)
    for name, processes in report.interleaved(cases, chosen):
        found[name, processes].append(measure(name, processes, steps))

    text = f"{make_table(found, names)}\n\n{NOTES}"
    raw = {"steps": steps, "cases": [{"name": n, "processes": p, "found": f} for (n, p), f in found.items()]}
    report.publish(text, raw, chosen.json)


def measure(name: str, processes: int, steps: int) -> dict[str, float]:
    """Microseconds per step of one fresh run."""
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        stamps_file = Path(folder) / "stamps.json"
        report.run(command(name, processes, steps, stamps_file), limit=600, **ONE_THREAD)
        stamps = json.loads(stamps_file.read_text(encoding="utf-8"))
    stamps = stamps[WARM_UP:] if len(stamps) > 2 * WARM_UP else stamps[len(stamps) // 2 :]
    each = [1e6 * (after - before) for before, after in itertools.pairwise(stamps)]
    blocks = [statistics.fmean(each[at : at + BLOCK]) for at in range(0, len(each) - BLOCK + 1, BLOCK)]
    return {"p10": statistics.quantiles(each, n=10)[0], "step": statistics.median(each), "block": statistics.median(blocks)}


def command(name: str, processes: int, steps: int, stamps_file: Path) -> list[str]:
    if name == "lockstep-trainer":
        settings = {
            "task.steps": steps,
            "task.stamps": str(stamps_file),
            "train.steps": steps,
            "train.batch_size": 32 * processes,
            "processes": processes,
        }
        changes = [f"--set={key}={value}" for key, value in settings.items()]
        out = f"--out={stamps_file.parent / 'runs'}"
        return [*report.lockstep(), "train", str(HERE / "overhead.yaml"), out, *changes]
    loop = [str(HERE / "overhead_loops.py"), name, str(processes), str(steps), str(stamps_file)]
    if processes == 1 or name == "lockstep-run":  # which starts its processes itself
        return [sys.executable, *loop]
    return [*report.torchrun(processes), *loop]


def make_table(found: dict[tuple[str, int], list[dict[str, float]]], names: list[str]) -> str:
    def median(name: str, processes: int, what: str) -> float:
        return statistics.median(each[what] for each in found[name, processes])

    def cells(name: str, processes: int) -> list[Any]:
        step, block = (median(name, processes, what) for what in ("step", "block"))
        ratio = f"{step / median('plain', processes, 'step'):.2f}" if "plain" in names else "-"
        return [f"{step:.0f}", ratio, f"{block:.0f}"]

    header = ["", "1 process, µs", "to plain", "with all, µs", "2 processes, µs", "to plain", "with all, µs"]
    return report.table(header, [[NAMES[name], *(cell for p in processes for cell in cells(name, p))] for name in names])


if __name__ == "__main__":
    main()
