"""How fast batches come: Lockstep beside torch's DataLoader and torchdata's StatefulDataLoader, with the same workers.

python benchmarks/data.py                   on the CPU: batches and nothing else
python benchmarks/data.py --runtime cuda    on an NVIDIA GPU: batches that are copied there, and a step on each
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import data_sets
import report

LOADERS = {"torch": "torch `DataLoader`", "stateful": "`StatefulDataLoader`", "lockstep": "Lockstep"}
WORKERS = (0, 2)

NOTES = """\
Images: {images} JPEG files of 160 x 160, decoded by Pillow, batches of 32. Text: windows of 512 tokens from a memory
map of {tokens} million, batches of 64. Tabular: rows of 32 columns and a label in memory (a `TensorDataset`), batches
of 256. Shuffled; the loaders keep their workers (`persistent_workers`) and, on a GPU, pin memory. First
batch: from making the loader (`run.batches`) to having it. Then the loaders take turns in one process, {rounds} times
for {seconds:g} s each in a random order, so that a slow moment of the machine hits all alike. Medians; a ratio is that
of two turns of one round, to torch's loader with as many workers, and in brackets its quartiles. Processor: time that
the loader's process and its workers used for an example, which others on the machine disturb less."""
NOTES_CUDA = """\
A step is eight products of matrices of 2048 x 2048 in bf16, of which every tenth is waited for. Batches are moved by
`.to(device, non_blocking=True)` from pinned memory in the loops of others, by Lockstep itself in ours."""

Measured = dict[str, Any]


def main() -> None:
    parser = report.options(__doc__, repeats=3)
    parser.add_argument("--runtime", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", choices=list(data_sets.KINDS), action="append", help="measure nothing else")
    parser.add_argument("--rounds", type=int, help="turns of every loader, per repeat (default: 6; 2 with --quick)")
    parser.add_argument("--measure", nargs=3, metavar=("KIND", "WORKERS", "FOLDER"), help=argparse.SUPPRESS)
    chosen = report.parse(parser)
    rounds, seconds = chosen.rounds or (2 if chosen.quick else 6), 0.1 if chosen.quick else 1.0
    loaders = [name for name in LOADERS if name != "stateful" or report.installed("torchdata")]
    if chosen.measure:
        kind, workers, folder = chosen.measure
        found_here = measure(kind, int(workers), Path(folder), loaders, chosen.runtime, rounds, seconds)
        chosen.json.write_text(json.dumps(found_here))
        return
    cases = list(itertools.product(chosen.only or data_sets.KINDS, WORKERS))
    found: dict[tuple[str, int], list[Measured]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="data-") as folder:
        sizes = data_sets.write(Path(folder), chosen.quick)
        for kind, workers in report.interleaved(cases, chosen):
            out = Path(folder) / "measured.json"
            options = ["--runtime", chosen.runtime, "--rounds", str(rounds), "--json", str(out)]
            options += ["--quick"] if chosen.quick else []
            command = [sys.executable, __file__, *options, "--measure", kind, str(workers), folder]
            report.run(command, limit=300, OMP_NUM_THREADS="1")
            found[kind, workers].append(json.loads(out.read_text()))
    notes = NOTES.format(**sizes, seconds=seconds, rounds=rounds * chosen.repeats)
    if chosen.runtime == "cuda":
        notes += "\n" + NOTES_CUDA
    raw = {f"{kind} {workers}": each for (kind, workers), each in found.items()}
    report.publish(f"{shown(found, loaders)}\n\n{notes}", raw, chosen.json)


def shown(found: dict[tuple[str, int], list[Measured]], loaders: list[str]) -> str:
    rows = []
    for (kind, workers), repeats in sorted(found.items()):
        for loader in loaders:
            turns = [each for repeat in repeats for each in repeat["turns"]]
            ratios = [each[loader] / each["torch"] for each in turns]
            low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            first = statistics.median(repeat["first"][loader] for repeat in repeats)
            rate = statistics.median(each[loader] for each in turns)
            ratio = "1" if loader == "torch" else f"{middle:.2f} ({low:.2f} to {high:.2f})"
            used = statistics.median(repeat["processor"][loader] for repeat in repeats) * 1e6
            title = f"{kind}, {workers} workers: {LOADERS[loader]}"
            rows.append([title, f"{rate:,.0f}", ratio, f"{used:,.1f} µs", f"{first * 1000:.0f} ms"])
    return report.table(["", "examples/s", "to torch's", "processor", "first batch"], rows)


# In a process of its own


def measure(
    kind: str, workers: int, folder: Path, loaders: list[str], runtime: str, rounds: int, seconds: float
) -> Measured:
    """Seconds to the first batch of every loader, and examples per second in turns."""
    import psutil

    import lockstep

    dataset, batch_size = data_sets.KINDS[kind](folder)

    def here(run: Any) -> Measured:
        step = gpu_step(run.device) if runtime == "cuda" else (lambda batch: None)
        batches, first, workers_of, used = {}, {}, {}, dict.fromkeys(loaders, 0.0)
        before = set(psutil.Process().children())
        for loader in random.sample(loaders, len(loaders)):
            time.sleep(seconds)  # until the workers of those before have fetched ahead what they may
            began = time.perf_counter()
            batches[loader] = (ours if loader == "lockstep" else others)(run, loader, dataset, batch_size, workers)
            step(next(batches[loader]))
            first[loader] = time.perf_counter() - began
            workers_of[loader] = set(psutil.Process().children()) - before
            before |= workers_of[loader]
        began_at = {loader: processor_time(workers_of[loader]) for loader in loaders}
        examples, turns = dict.fromkeys(loaders, 0), []
        for _ in range(rounds):
            turns.append({})
            for loader in random.sample(loaders, len(loaders)):
                time.sleep(seconds / 4)
                here_before = time.process_time()
                turns[-1][loader], done = rate(batches[loader], batch_size, step, seconds)
                used[loader] += time.process_time() - here_before
                examples[loader] += done
        for loader in loaders:
            used[loader] += processor_time(workers_of[loader]) - began_at[loader]
            batches[loader].close()
        return {"first": first, "turns": turns, "processor": {each: used[each] / examples[each] for each in loaders}}

    settings: dict[str, Any] = {
        "data": {"workers": workers, "persistent_workers": workers > 0},
        "log": {"every": "1000000 steps"},
        "launch": {"threads": 1},
    }
    with tempfile.TemporaryDirectory(prefix="data-run-") as runs, report.silent_processes():
        (found,) = lockstep.launch(here, 1, runtime=runtime, out=runs, **settings)
    return dict(found)


def ours(run: Any, _: str, dataset: Any, batch_size: int, workers: int) -> Generator[Any, None, None]:
    while True:
        yield from run.batches(dataset, batch_size, drop_last=True)


def others(run: Any, loader: str, dataset: Any, batch_size: int, workers: int) -> Generator[Any, None, None]:
    import torch
    from torch.utils.data import DataLoader

    if loader == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader as Chosen
    else:
        Chosen = DataLoader
    batches = Chosen(
        dataset, batch_size, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=workers > 0,
        pin_memory=run.device.type == "cuda",
    )  # fmt: skip

    def moved(batch: Any) -> Any:
        if isinstance(batch, torch.Tensor):
            return batch.to(run.device, non_blocking=True)
        return [moved(each) for each in batch]

    while True:
        for batch in batches:
            yield moved(batch) if run.device.type == "cuda" else batch


def processor_time(processes: Iterable[Any]) -> float:
    return sum(each.cpu_times().user + each.cpu_times().system for each in processes)


def rate(batches: Iterator[Any], batch_size: int, step: Callable[[Any], None], seconds: float) -> tuple[float, int]:
    """Examples per second, without what was fetched while others had their turn; and how many in all."""
    for _ in range(5):
        step(next(batches))
    began = now = time.perf_counter()
    done = 0
    while now - began < seconds:
        step(next(batches))
        done, now = done + batch_size, time.perf_counter()
    return done / (now - began), done + 5 * batch_size


def gpu_step(device: Any) -> Callable[[Any], None]:
    """Work for the GPU that depends on the batch, without reading anything back but now and then."""
    import torch

    matrix = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16) / 45
    count = itertools.count()

    def step(batch: Any) -> None:
        tensors = [batch] if isinstance(batch, torch.Tensor) else list(batch)
        value = matrix + torch.stack([each.float().mean() for each in tensors]).sum().to(torch.bfloat16)
        for _ in range(8):
            value = value @ matrix
        if next(count) % 10 == 0:
            value.mean().item()

    return step


if __name__ == "__main__":
    main()
