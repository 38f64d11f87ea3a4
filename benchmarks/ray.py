"""The same training under plain Ray Train and under Lockstep on Ray: a step, and the time to the first one.

Its parts are in benchmarks/ray_train, out of the way of `import ray`.
"""

from __future__ import annotations

import importlib.metadata
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import report

HERE = Path(__file__).parent / "ray_train"
STEPS, BATCH, LIMIT = 400, 64, 600

NAMES = {"ray": "Ray Train, `prepare_model` and a DataLoader", "lockstep": "`lockstep train` with `launch: ray`"}

NOTES = """\
Two workers on a Ray cluster of their own on this machine, CPU, gloo, one thread each; a network of 85,000 parameters,
4,096 examples in memory, 64 per step. A step is the median from one loss to the next on rank 0, without the first 100
of 400; the first step is seconds from the command to its end, with the start of the cluster. Lockstep's side also holds
the roll call, watches, writes a row of metrics every 50 steps and a checkpoint at the end."""


def main() -> None:
    chosen = report.parse(report.options(__doc__, repeats=5))
    importlib.metadata.version("ray")  # not `import ray`, which would be this file
    steps = 40 if chosen.quick else STEPS
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for name in report.interleaved(list(NAMES), chosen):
        found[name].append(measure(name, steps))

    reference = found["ray"]
    rows = []
    for name, label in NAMES.items():
        cells = [label]
        for what, unit, factor in (("step", "ms", 1000.0), ("first", "s", 1.0), ("end", "s", 1.0)):
            value, base = (statistics.median(each[what] for each in side) for side in (found[name], reference))
            cells += [f"{value * factor:.2f} {unit}", f"{value / base:.2f}"]
        rows.append(cells)
    header = ["", "step", "to Ray Train", "first step", "to Ray Train", "end of the command", "to Ray Train"]
    report.publish(f"{report.table(header, rows)}\n\n{NOTES}", {"found": found}, chosen.json)


def measure(name: str, steps: int) -> dict[str, float]:
    """One fresh start: seconds per step, to the first step and to the end."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        file = Path(folder) / "found.json"
        began = time.time()
        report.run(command(name, file, steps), limit=LIMIT, RAY_USAGE_STATS_ENABLED="0")
        ended = time.time()
        found = json.loads(file.read_text(encoding="ascii"))
    return {"step": found["step"], "first": found["first"] - began, "end": ended - began}


def command(name: str, file: Path, steps: int) -> list[str]:
    if name == "ray":
        return [sys.executable, str(HERE / "plain.py"), str(file), str(steps), str(BATCH)]
    values = (f"task.file={file}", f"task.steps={steps}", f"train.steps={steps}")
    changes = [f"--set={each}" for each in values]
    return [*report.lockstep(), "train", str(HERE / "config.yaml"), f"--out={file.parent / 'runs'}", *changes]


if __name__ == "__main__":
    main()
