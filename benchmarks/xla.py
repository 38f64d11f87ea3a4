"""A training step on PJRT CPU: Lockstep beside a torch_xla loop written by hand, on one device and over a mesh.

Every measurement is a process of its own; all of them are interleaved in random order.
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

HERE = Path(__file__).parent
WARM_UP = 10
NAMES = {
    "by-hand": "torch_xla by hand, 1 device",
    "by-hand-1-thread": "the same with torch.set_num_threads(1)",
    "lockstep": "Lockstep, 1 device",
    "by-hand-spmd": "torch_xla by hand, SPMD over 4",
    "by-hand-spmd-1-thread": "the same with torch.set_num_threads(1)",
    "lockstep-spmd": "Lockstep, SPMD over 4",
    "native": "plain PyTorch, no XLA",
}
BESIDE = {
    "by-hand-1-thread": "by-hand",
    "lockstep": "by-hand",
    "by-hand-spmd-1-thread": "by-hand-spmd",
    "lockstep-spmd": "by-hand-spmd",
}
NOTES = """\
A convolutional network for 28 x 28 images, batches of 64, SGD with momentum, float32. Median step: from the end of one
to the end of the next. Tracing: the part of it in which Python writes the step down (forward, backward; for the loop by
hand the optimizer too). Torch's threads on the host spin while they wait for work, on the cores that XLA computes on:
Lockstep gives torch one thread on PJRT CPU, and so may a loop by hand. The loops by hand log nothing; Lockstep brings
together the mean loss and writes it to metrics.jsonl and the log every 50 steps, looks for NaN, and minds the number of
compilations."""


def main() -> None:
    parser = report.options(__doc__, repeats=5)
    parser.add_argument("--steps", type=int, help="steps per measurement (default: 150; 20 with --quick)")
    chosen = report.parse(parser)
    steps = chosen.steps or (20 if chosen.quick else 150)
    names = list(NAMES) if report.installed("torch_xla") else ["native"]
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for name in report.interleaved(names, chosen):
        found[name].append(measure(name, steps))
    report.publish(f"{table(found)}\n\n{NOTES}", {"steps": steps, "found": dict(found)}, chosen.json)


def measure(name: str, steps: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="xla-") as folder:
        file = Path(folder) / "times.json"
        report.run([sys.executable, str(HERE / "xla_loops.py"), name, str(steps), str(file)], limit=600)
        times = json.loads(file.read_text(encoding="utf-8"))
    each = [1e3 * (after - before) for before, after in itertools.pairwise(times["ends"][WARM_UP:])]
    return {
        "step": statistics.median(each),
        "tracing": 1e3 * statistics.median(times["traced"][WARM_UP:]),
        "compilations": times["compilations"],
    }


def table(found: dict[str, list[dict[str, float]]]) -> str:
    median = {name: statistics.median(each["step"] for each in measured) for name, measured in found.items()}
    rows = []
    for name in [each for each in NAMES if each in found]:
        ratio = f"{median[name] / median[BESIDE[name]]:.3f}" if name in BESIDE else ""
        tracing = statistics.median(each["tracing"] for each in found[name])
        compiled = ", ".join(str(each) for each in sorted({int(each["compilations"]) for each in found[name]}))
        rows.append((NAMES[name], f"{median[name]:.2f}", ratio, f"{tracing:.2f}", compiled))
    return report.table(("", "median step, ms", "beside the loop by hand", "tracing, ms", "compilations"), rows)


if __name__ == "__main__":
    main()
