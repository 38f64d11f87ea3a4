"""How long a save holds up training, how long it takes until the save is safe on the disk, and how long the way back.

One process trains a model whose weights and Adam state are --mib MiB together, and saves every few steps: through
Lockstep (waiting, or in the background), with torch.save, with Accelerate's save_state. Then one process, or two,
restore what was saved. Every measurement is a process of its own, in random order. The same for a state of
--sharded-mib MiB that is spread over four ranks, beside torch.distributed.checkpoint (checkpoint_sharded.py).
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_sharded as sharded
import report

NAMES = {
    "torch": "`torch.save`",
    "accelerate": "Accelerate `save_state`",
    "lockstep-sync": "Lockstep, `async: false`",
    "lockstep-async": "Lockstep, `async: true` (default)",
}
RESTORES = {
    "torch-load": "`torch.load`, 1 process",
    "lockstep-restore-1": "Lockstep, 1 process",
    "lockstep-restore-2": "Lockstep, 2 processes",
}
WIDTH = 1024  # a layer is WIDTH x WIDTH: 4 MiB, and 12 MiB with its Adam state
SAVES = 4  # per measurement; the first pays for what later ones find ready

NOTES = """\
Blocked: how long the call keeps training from going on. On disk: from the call until the data has reached the disk
(fsync of files and folders; torch and Accelerate do not do that themselves, so here it is done for them, and counted
as "on disk" only) and, for Lockstep, every file has its digest and the folder its final name. Steps meanwhile: how much
longer a training step takes while a save is written in the background, by one core of this machine. CPU, one thread,
Adam, float32. The first save of a process allocates, so it is shown apart. Medians.

Memory: the most that the process had beyond what it had before its first save, or before its restore, as a share of
the state. A save keeps one copy for the next; a restore ends with the optimizer's state, which is two thirds. Restores
read from the page cache, and are of the model and the optimizer, with digests checked by Lockstep alone."""


def main() -> None:
    parser = report.options(__doc__, repeats=5)
    parser.add_argument("--mib", type=int, help="size of the state (default: 1024; 48 with --quick)")
    parser.add_argument("--sharded-mib", type=int, help="size of the spread state (default: 2048; 48 with --quick)")
    parser.add_argument("--only", choices=("whole", "sharded"), help="one of the two tables")
    parser.add_argument("--folder", type=Path, help="where to save (default: the temporary folder)")
    parser.add_argument("--child", nargs=2, metavar=("NAME", "FILE"), help=argparse.SUPPRESS)
    chosen = report.parse(parser)
    chosen.mib = chosen.mib or (48 if chosen.quick else 1024)
    chosen.sharded_mib = chosen.sharded_mib or (48 if chosen.quick else 2048)
    if chosen.child:
        name, file = chosen.child
        Path(file).write_text(json.dumps(CONTENDERS[name](chosen.mib, Path(file).parent)), encoding="utf-8")
        return

    names = [name for name in NAMES if name != "accelerate" or report.installed("accelerate")]
    cases = [*names, *RESTORES] if chosen.only != "sharded" else []
    cases += sharded.CONTENDERS if chosen.only != "whole" else []
    found: dict[str, list[list[dict[str, float]]]] = defaultdict(list)
    for name in report.interleaved(cases, chosen):
        mib = chosen.sharded_mib if name in sharded.CONTENDERS else chosen.mib
        found[name].append(measure(name, mib, chosen.folder))
    texts = [whole_table(names, found, chosen.mib)] if chosen.only != "sharded" else []
    texts += [sharded.table(found, chosen.sharded_mib)] if chosen.only != "whole" else []
    sizes = {"mib": chosen.mib, "sharded mib": chosen.sharded_mib}
    report.publish("\n\n".join(texts), {**sizes, "found": found}, chosen.json)


def whole_table(names: list[str], found: dict[str, list[list[dict[str, float]]]], mib: int) -> str:
    header = ["", "blocked, first", "blocked, later", "on disk, first", "on disk, later", "steps meanwhile", "memory"]
    rows = [[NAMES[name], *cells(found[name], mib)] for name in names]
    restores = [[RESTORES[name], *restore_cells(found[name], mib)] for name in RESTORES]
    tables = f"{report.table(header, rows)}\n\n{report.table(['', 'restored in', 'memory'], restores)}"
    return f"A state of {mib} MiB:\n\n{tables}\n\n{NOTES}"


def measure(name: str, mib: int, parent: Path | None) -> list[dict[str, float]]:
    """The saves of one fresh process, in order."""
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=parent) as folder:
        file = Path(folder) / "found.json"
        command = [sys.executable, __file__, f"--mib={mib}", "--child", name, str(file)]
        report.run(command, limit=1800, OMP_NUM_THREADS="1")
        return list(json.loads(file.read_text(encoding="utf-8")))


def restore_cells(found: list[list[dict[str, float]]], mib: int) -> list[str]:
    ranks = [rank for ranks in found for rank in ranks]
    seconds = [max(rank["seconds"] for rank in ranks) for ranks in found]
    memory = statistics.median(rank["memory"] for rank in ranks) / mib
    return [f"{statistics.median(seconds):.2f} s", f"{memory:.2f}"]


def cells(found: list[list[dict[str, float]]], mib: int) -> list[str]:
    first, later = [saves[0] for saves in found], [save for saves in found for save in saves[1:]]
    slowdown = [save["slowdown"] for save in later if "slowdown" in save]

    def median(saves: list[dict[str, float]], what: str) -> str:
        return f"{statistics.median(save[what] for save in saves):.2f} s"

    return [
        median(first, "blocked"),
        median(later, "blocked"),
        median(first, "on disk"),
        median(later, "on disk"),
        f"{statistics.median(slowdown):.2f} times" if slowdown else "-",
        f"{statistics.median(saves[-1]['memory'] for saves in found) / mib:.2f}",
    ]


# In the child process


def make_training(mib: int) -> tuple[Any, Any, Callable[[], Any]]:
    """A model and its optimizer, that together hold so many MiB once a step is done, and the loss of a step."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = max(1, round(mib * 2**20 / (3 * 4 * WIDTH * WIDTH)))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    batch = torch.randn(4, WIDTH)
    return model, optimizer, lambda: model(batch).square().mean()


class Memory:
    """The most that this process has had beyond what it has now, in MiB."""

    def __init__(self) -> None:
        # Linux counts the peak from here on.
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._before = self._peak()

    def more(self) -> float:
        return self._peak() - self._before

    @staticmethod
    def _peak() -> float:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


def save_with_torch(mib: int, folder: Path) -> list[dict[str, float]]:
    import torch

    model, optimizer, loss = make_training(mib)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    def save(target: Path) -> None:
        target.mkdir()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, target / "state.pt")

    return _saves(step, save, folder)


def save_with_accelerate(mib: int, folder: Path) -> list[dict[str, float]]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, loss = make_training(mib)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step() -> None:
        accelerator.backward(loss())
        optimizer.step()
        optimizer.zero_grad()

    def save(target: Path) -> None:
        accelerator.save_state(str(target))

    return _saves(step, save, folder)


def _saves(step: Callable[[], None], save: Callable[[Path], None], folder: Path) -> list[dict[str, float]]:
    step()
    memory = Memory()
    found = [_save_and_sync(step, save, folder / f"save-{number}") for number in range(SAVES)]
    return [{**each, "memory": memory.more()} for each in found]


def _save_and_sync(step: Callable[[], None], save: Callable[[Path], None], target: Path) -> dict[str, float]:
    step()
    began = time.perf_counter()
    save(target)
    blocked = time.perf_counter() - began
    for path in [*target.rglob("*"), target, target.parent]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    on_disk = time.perf_counter() - began
    shutil.rmtree(target)
    return {"blocked": blocked, "on disk": on_disk}


def save_with_lockstep(asynchronous: bool) -> Callable[[int, Path], list[dict[str, float]]]:
    def contender(mib: int, folder: Path) -> list[dict[str, float]]:
        import lockstep

        def loop(run: Any) -> list[dict[str, float]]:
            model, optimizer, loss = make_training(mib)
            run.setup(model, optimizer)
            steps = run.steps(None)

            def step() -> float:
                next(steps)
                began = time.perf_counter()
                run.backward(loss())
                run.step()
                return time.perf_counter() - began

            step()
            memory = Memory()
            saves = [_save_and_go_on(run, step) for _ in range(SAVES)]
            return [{**each, "memory": memory.more()} for each in saves]

        checkpoint = {"every": None, "async": asynchronous, "keep": {"last": 1, "best": 0}}
        returned = lockstep.launch(loop, processes=1, runtime="cpu", out=folder, checkpoint=checkpoint)
        return list(returned[0])

    return contender


def _save_and_go_on(run: Any, step: Callable[[], float]) -> dict[str, float]:
    """Save, and train on until the checkpoint is there under its final name."""
    quiet = statistics.median([step(), step(), step()])
    final = run.folder / "checkpoints" / f"step-{run.progress.step:08d}"
    began, began_clock = time.perf_counter(), time.time()
    run.checkpoint()
    blocked = time.perf_counter() - began
    if final.exists():
        return {"blocked": blocked, "on disk": blocked}
    meanwhile = []
    while not final.exists():
        meanwhile.append(step())
    on_disk = final.stat().st_ctime - began_clock  # the moment of its renaming
    during = meanwhile[:-1] or meanwhile  # the last step may have gone on after the save was done
    return {"blocked": blocked, "on disk": on_disk, "slowdown": statistics.median(during) / quiet}


def save_once_with_torch(mib: int, folder: Path) -> None:
    import torch

    model, optimizer, loss = make_training(mib)
    loss().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "state.pt")


def load_with_torch(mib: int, folder: Path) -> list[dict[str, float]]:
    import torch

    # Saved by a process of its own, which leaves no memory behind for the one that restores.
    saving = multiprocessing.get_context("spawn").Process(target=save_once_with_torch, args=(mib, folder))
    saving.start()
    saving.join()
    model, optimizer, _ = make_training(mib)
    memory, began = Memory(), time.perf_counter()
    state = torch.load(folder / "state.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return [{"seconds": time.perf_counter() - began, "memory": memory.more()}]


def save_once(run: Any, mib: int) -> None:
    model, optimizer, loss = make_training(mib)
    run.setup(model, optimizer)
    for _ in run.steps(1):
        run.backward(loss())
        run.step()
    run.checkpoint()


def restore(run: Any, mib: int) -> dict[str, float]:
    model, optimizer, _ = make_training(mib)
    run.setup(model, optimizer)
    run.barrier("the restore")
    memory, began = Memory(), time.perf_counter()
    if not run.restore():
        raise SystemExit("there is nothing to restore")
    return {"seconds": time.perf_counter() - began, "memory": memory.more()}


def restore_with_lockstep(processes: int) -> Callable[[int, Path], list[dict[str, float]]]:
    def contender(mib: int, folder: Path) -> list[dict[str, float]]:
        import lockstep

        checkpoint = {"every": None, "async": False, "keep": {"last": 1, "best": 0}}
        settings: Any = {"runtime": "cpu", "folder": folder / "run", "checkpoint": checkpoint}
        # Two, so that these as well are processes of their own.
        lockstep.launch(functools.partial(save_once, mib=mib), processes=2, **settings)
        return lockstep.launch(functools.partial(restore, mib=mib), processes=processes, **settings)

    return contender


CONTENDERS: dict[str, Callable[[int, Path], Any]] = {
    **sharded.CONTENDERS,
    "torch": save_with_torch,
    "accelerate": save_with_accelerate,
    "lockstep-sync": save_with_lockstep(asynchronous=False),
    "lockstep-async": save_with_lockstep(asynchronous=True),
    "torch-load": load_with_torch,
    "lockstep-restore-1": restore_with_lockstep(processes=1),
    "lockstep-restore-2": restore_with_lockstep(processes=2),
}

if __name__ == "__main__":
    main()
