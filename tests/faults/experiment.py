"""One cell of the fault matrix on real processes: the run that fails, what is left of it, and the run resumed."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cells
import sabotage
import torch
from cells import Cell

from conftest import Finished, Project, Started, last_weights, rows, steps_saved, summary
from lockstep.checkpoint.storage import CheckpointStorage

TASK_FILE = Path(__file__).parent / "faulty_task.py"
# Two units each: a layer by itself, and the rest of the model.
STRATEGIES: dict[str, Any] = {
    sabotage.DDP: "auto",
    sabotage.FSDP: {"type": "fsdp", "blocks": "hidden"},
    sabotage.HSDP: {"type": "hsdp", "mesh": {"replica": 2, "data": 2}, "blocks": "hidden"},
}


@dataclass(frozen=True)
class Outcome:
    """What was seen: how the command ended, or every rank where each was a command of its own."""

    ended: list[Finished]
    seconds: float  # from the fault to the last word
    saved: list[int] = field(default_factory=list)  # steps, once the run had failed
    lost: int | None = None
    resumed: Finished | None = None
    differences: list[str] = field(default_factory=list)


def settings(
    world_size: int,
    stall_after: int = cells.STALL_AFTER,
    workers: int = 0,
    way: str = sabotage.DDP,
    write_timeout: int = cells.WRITE_TIMEOUT,
) -> dict[str, Any]:
    """Limits of seconds, so that a cell takes seconds; a row every third step, so that the last is left to the end."""
    return {
        "strategy": STRATEGIES[way],
        "task": {"type": f"{TASK_FILE}:Faulty"},
        "processes": world_size,
        "train": {"epochs": 2, "batch_size": 12},
        "data": {"split": {"train": 0.8, "val": 0.2}, "workers": workers},
        "early_stop": {"patience": 50},
        "checkpoint": {"every": f"{cells.CHECKPOINT_EVERY} steps"},
        "log": {"every": "3 steps"},
        "watch": {"fingerprint_every": 2},
        "timeouts": {
            "stall": f"{stall_after} s",
            "first_step": f"{cells.FIRST_TIME} s",
            "rendezvous": f"{cells.JOIN_TIMEOUT} s",
            "checkpoint": f"{write_timeout} s",
        },
        "launch": {"threads": 1},
    }


def undisturbed(folder: Path, way: str, world_size: int) -> Path:
    return _project(folder).train(**settings(world_size, way=way))


def experiment(cell: Cell, folder: Path, reference: Path | None) -> Outcome:
    """Make a cell happen. With a reference, resume the run and compare its end with that of the reference."""
    project = _project(folder)
    if cell.starts_by_hand:
        return _by_hand(cell, project)
    fault = sabotage.fail_at(cell.rank, cell.step, cell.kind, cell.moment, folder, cell.slow, cell.settle)
    workers = 2 if cell.kind == sabotage.SIGTERM_GROUP else 0
    config = project.config(**settings(cell.world_size, cell.stall_after, workers, cell.way, cell.write_timeout))
    finished = project.run("train", config, env=fault.env())
    seconds = (folder / ".stderr").stat().st_mtime - sabotage.happened(fault)
    if reference is None or cell.kind in sabotage.IDENTITIES:
        return Outcome([finished], seconds)
    run = project.only_run()
    steps, storage = steps_saved(run), CheckpointStorage(run / "checkpoints")
    differences = [f"step {step} is not whole: {found}" for step in steps if (found := storage.problem(step))]
    saved = max(steps, default=0)
    lost = sabotage.steps_done(fault) - saved
    resumed = project.run("resume", run)
    differences += _differences(run, reference) if resumed.code == 0 else []
    if saved and f"restored step-{saved:08d}" not in resumed.out:
        differences.append(f"step {saved} was not restored")
    differences += [f"{path.name} is left" for path in storage.folder.iterdir() if not _belongs(path)]
    return Outcome([finished], seconds, steps, lost, resumed, differences)


def _project(folder: Path) -> Project:
    folder.mkdir(parents=True, exist_ok=True)
    return Project(folder)


def _differences(run: Path, reference: Path) -> list[str]:
    """Where the end of a run is not bit for bit that of another."""
    found = []
    for name in ("train/epoch_loss", "val/loss", "val/accuracy"):
        ours, theirs = ([(row["step"], row[name]) for row in rows(each) if name in row] for each in (run, reference))
        if ours != theirs:
            found.append(f"{name}: {ours} instead of {theirs}")
    weights, others = last_weights(run), last_weights(reference)
    found += [name for name in others if not torch.equal(weights[name], others[name])]
    found += [
        f"summary: {name} is {summary(run)[name]}"
        for name in ("status", "epoch", "step", "metrics", "best")
        if summary(run)[name] != summary(reference)[name]
    ]
    return found


# Ranks that are started one by one, as a foreign launcher does. Each has a folder of its own, like a host of its own.

_TASK = """
from pathlib import Path

from faulty_task import Faulty as Base

Path(__file__).with_name("arrived").touch()


class Faulty(Base):
    version = 1
"""


def _by_hand(cell: Cell, project: Project) -> Outcome:
    ranks = list(range(cell.world_size))
    if cell.kind == sabotage.SAME_RANK:
        ranks[-1] = 1 if cell.world_size > 2 else 0
    port = _free_port()
    homes = [project.folder / f"process-{number}" for number in range(cell.world_size)]
    started = [_start(cell, home, rank, port) for home, rank in zip(homes, ranks, strict=True)]
    ended = [each.wait() for each in started]
    last_word = max((home / ".stderr").stat().st_mtime for home in homes)
    arrived = [home / "arrived" for home in homes if (home / "arrived").exists()]
    return Outcome(ended, last_word - max(each.stat().st_mtime for each in arrived))


def _start(cell: Cell, home: Path, rank: int, port: int) -> Started:
    odd = rank == cell.rank
    project = _project(home)
    source = _TASK.replace("version = 1", "version = 2") if odd and cell.kind == sabotage.SOURCE else _TASK
    (home / "task.py").write_text(source)
    lr = 0.2 if odd and cell.kind == sabotage.CONFIG else 0.1
    usual = settings(cell.world_size, cell.stall_after)
    values = {
        **usual,
        "task": "task.py:Faulty",
        "optimizer": {"type": "torch.optim.SGD", "lr": lr},
        "timeouts": {**usual["timeouts"], "rendezvous": f"{cells.JOIN_BY_HAND} s"},
    }
    world_size = 6 - cell.world_size if odd and cell.kind == sabotage.WORLD_SIZE else cell.world_size
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([*sys.path, str(TASK_FILE.parent)]),
    }
    return project.start("train", project.config(**values), env=environment)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _belongs(path: Path) -> bool:
    """To a folder of checkpoints: one of them, what they went on from, or the link to the best, which leads to one."""
    if path.name == ".branch.json":
        return True
    return path.name.startswith("step-") or (path.name == "best" and path.is_symlink() and path.is_dir())
