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

import report

# what was found, by framework and number of processes, a mapping per measurement
Found = dict[tuple[str, int], list[dict[str, float]]]

HERE = Path(__file__).parent
WARM_UP = 200
BATCH = 32  # per process, as in workload.py
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
OTHER = "lockstep-other"
NEEDS = {"fabric": "lightning", "lightning": "lightning", "accelerate": "accelerate"}

NOTES = """\
An MLP of 64-128-10 on 16,384 examples in memory (a `TensorDataset`), SGD, float32, 32 examples per process and step,
one thread per process, gloo between two. µs per step: the median over blocks of 50 steps of the mean step, so that what
is done once in 50 steps is in it. Median step: without that. Nobody saves, validates or shows progress. Plain, Fabric
and Accelerate log nothing; the Lightning Trainer is `barebones=True`; Lockstep, which has no such mode, brings together
the mean loss of all ranks, looks for NaN, and writes it to metrics.jsonl and the log every 50 steps. All but Lockstep
load with torch's `DataLoader` in the training process; Lockstep indexes the tensors of a whole batch at once."""


def main() -> None:
    parser = report.options(__doc__, repeats=9)
    parser.add_argument("--steps", type=int, help="steps per measurement (default: 3000; 300 with --quick)")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="default: 1 2")
    parser.add_argument("--other", metavar="CHECKOUT", type=Path, help="another version of Lockstep, as well")
    chosen = report.parse(parser)
    steps = chosen.steps or (300 if chosen.quick else 3000)

    present = {module: report.installed(module) for module in ("lightning", "accelerate")}
    names = [name for name in chosen.only if present.get(NEEDS.get(name, ""), True)]
    if chosen.other:
        NAMES[OTHER] = f"Lockstep Trainer, {chosen.other.name}"
        names.append(OTHER)
    cases = [(name, processes) for name in names for processes in chosen.processes]
    found: Found = defaultdict(list)
    for name, processes in report.interleaved(cases, chosen):
        found[name, processes].append(measure(name, processes, steps, chosen.other))

    text = f"{make_table(found, names, chosen.processes)}\n\n{NOTES}"
    raw = {"steps": steps, "cases": [{"name": n, "processes": p, "found": f} for (n, p), f in found.items()]}
    report.publish(text, raw, chosen.json)


def measure(name: str, processes: int, steps: int, other: Path | None) -> dict[str, float]:
    """Microseconds per step of one fresh run."""
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        stamps_file = Path(folder) / "stamps.json"
        source = {"PYTHONPATH": str(other.resolve() / "src")} if other and name == OTHER else {}
        report.run(command(name, processes, steps, stamps_file), limit=600, **ONE_THREAD, **source)
        stamps = json.loads(stamps_file.read_text(encoding="utf-8"))
    stamps = stamps[WARM_UP:] if len(stamps) > 2 * WARM_UP else stamps[len(stamps) // 2 :]
    each = [1e6 * (after - before) for before, after in itertools.pairwise(stamps)]
    blocks = [statistics.fmean(each[at : at + BLOCK]) for at in range(0, len(each) - BLOCK + 1, BLOCK)]
    return {"block": statistics.median(blocks), "step": statistics.median(each)}


def command(name: str, processes: int, steps: int, stamps_file: Path) -> list[str]:
    if name in ("lockstep-trainer", OTHER):
        settings = {
            "task.steps": steps,
            "task.stamps": str(stamps_file),
            "train.steps": steps,
            "train.batch_size": BATCH * processes,
            "processes": processes,
        }
        changes = [f"--set={key}={value}" for key, value in settings.items()]
        out = f"--out={stamps_file.parent / 'runs'}"
        return [*report.lockstep(), "train", str(HERE / "overhead.yaml"), out, *changes]
    loop = [str(HERE / "overhead_loops.py"), name, str(processes), str(steps), str(stamps_file)]
    if processes == 1 or name == "lockstep-run":  # which starts its processes itself
        return [sys.executable, *loop]
    return [*report.torchrun(processes), *loop]


def make_table(found: Found, names: list[str], counts: list[int]) -> str:
    def median(name: str, processes: int, what: str) -> float:
        return statistics.median(each[what] for each in found[name, processes])

    def cells(name: str, processes: int) -> list[str]:
        block, step = (median(name, processes, what) for what in ("block", "step"))
        ratio = f"{block / median('plain', processes, 'block'):.2f}" if "plain" in names else "-"
        return [f"{block:.0f}", ratio, f"{step:.0f}"]

    header = [""]
    for count in counts:
        processes = "1 process" if count == 1 else f"{count} processes"
        header += [f"{processes}, µs per step", "to plain", "median step"]
    return report.table(header, [[NAMES[name], *(cell for n in counts for cell in cells(name, n))] for name in names])


if __name__ == "__main__":
    main()
