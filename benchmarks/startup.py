"""How long it takes from a command to the first finished training step on several processes.

The same DDP script is started by torchrun and by Accelerate; an equivalent task by `lockstep train`.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import report

HERE = Path(__file__).parent

NAMES = {
    "torchrun": "`torchrun plain.py`",
    "accelerate": "`accelerate launch plain.py`",
    "lockstep-train": "`lockstep train`",
}

NOTES = """\
Seconds from the command to the end of the first optimizer step on rank 0, median; and to the end of the command. CPU,
gloo, one thread per process. The first two start the very same DDP script (benchmarks/startup_plain.py); the last
trains the same network as a task, and its end includes a whole checkpoint. Accelerate starts several processes without
MPI only by its `--multi_gpu` launcher, which is what is measured here, with no GPU."""


def main() -> None:
    parser = report.options(__doc__, repeats=9)
    chosen = report.parse(parser)
    names = [name for name in NAMES if name != "accelerate" or report.installed("accelerate")]
    counts = (2,) if chosen.quick else (2, 4)
    found: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for name, processes in report.interleaved([(name, count) for name in names for count in counts], chosen):
        found[name, processes].append(measure(name, processes))

    header = [""]
    for count in counts:
        header += [f"{count} processes, first step", "to torchrun", "end of the command"]
    rows = [[NAMES[name], *(cell for count in counts for cell in cells(found, name, count))] for name in names]
    raw = {"cases": [{"name": n, "processes": p, "found": f} for (n, p), f in found.items()]}
    report.publish(f"{report.table(header, rows)}\n\n{NOTES}", raw, chosen.json)


def cells(found: dict[tuple[str, int], list[tuple[float, float]]], name: str, processes: int) -> list[str]:
    first, end = (statistics.median(each) for each in zip(*found[name, processes], strict=True))
    reference = statistics.median(each for each, _ in found["torchrun", processes])
    return [f"{first:.1f} s", f"{first / reference:.2f}", f"{end:.1f} s"]


def measure(name: str, processes: int) -> tuple[float, float]:
    """Seconds to the first step and to the end of one fresh launch."""
    with tempfile.TemporaryDirectory(prefix="startup-") as folder:
        stamp = Path(folder) / "stamp"
        began = time.time()
        report.run(command(name, processes, stamp), limit=300, OMP_NUM_THREADS="1")
        ended = time.time()
        return float(stamp.read_text(encoding="ascii")) - began, ended - began


def command(name: str, processes: int, stamp: Path) -> list[str]:
    script = [str(HERE / "startup_plain.py"), str(stamp)]
    if name == "torchrun":
        return [*report.torchrun(processes), *script]
    if name == "accelerate":
        launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu"]
        options = ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"]
        return [*launch, f"--num_processes={processes}", *options, *script]
    changes = [f"--set=processes={processes}", f"--set=task.file={stamp}"]
    return [*report.lockstep(), "train", str(HERE / "startup.yaml"), f"--out={stamp.parent / 'runs'}", *changes]


if __name__ == "__main__":
    main()
