"""The part of checkpoint.py about state that is spread over four ranks: Lockstep beside torch.distributed.checkpoint.

Ranks are started by Lockstep for both, and have a model sharded by torch's fully_shard, with Adam's state.
"""

from __future__ import annotations

import functools
import hashlib
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import report

RANKS = 4
SAVES = 3  # per measurement; the first pays for what later ones find ready
WIDTH = 1024

NAMES = {
    "dcp-save": "`torch.distributed.checkpoint.save`",
    "dcp-async": "`torch.distributed.checkpoint.async_save`",
    "owners-sync": "Lockstep, `async: false`",
    "owners-async": "Lockstep, `async: true` (default)",
}
RESTORES = {
    "dcp-load": "`torch.distributed.checkpoint.load`",
    "owners-restore": "Lockstep",
}
DIGESTS = "digests"

NOTES = """\
Four ranks with a quarter of the state each, on the two cores of one machine. Blocked: how long the slowest rank is kept
from going on. On disk: from the call until all of it has reached the disk (both sync their files) and, for Lockstep,
every part has its digest and the folder its final name. Digests: how long it takes four ranks at once to make the
SHA-256 of a quarter of the state each, which Lockstep does beyond the others, when it saves and when it restores.
Restores are of as many ranks in new processes, from the page cache. Medians; the first save is shown apart."""


def table(found: dict[str, list[list[dict[str, float]]]], mib: int) -> str:
    """Markdown of all measurements: each a list of its saves, by the slowest rank."""

    def median(saves: list[dict[str, float]], what: str) -> str:
        return f"{statistics.median(each[what] for each in saves):.2f} s"

    rows = []
    for name, title in NAMES.items():
        first, later = [each[0] for each in found[name]], [save for each in found[name] for save in each[1:]]
        rows.append([title, *(median(saves, what) for what in ("blocked", "on disk") for saves in (first, later))])
    restores = [[title, median([each[0] for each in found[name]], "seconds")] for name, title in RESTORES.items()]
    digests = median([each[0] for each in found[DIGESTS]], "seconds")
    return (
        f"A state of {mib} MiB spread over {RANKS} ranks:\n\n"
        f"{report.table(['', 'blocked, first', 'blocked, later', 'on disk, first', 'on disk, later'], rows)}\n\n"
        f"{report.table(['', 'restored in'], restores)}\n\n"
        f"Digests alone: {digests}.\n\n{NOTES}"
    )


# On the ranks


def sharded(mib: int, trained: bool = True) -> tuple[Any, Any]:
    """A model over all ranks and its optimizer, that together hold so many MiB once a step is done."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("data",))
    layers = max(1, round(mib * 2**20 / (3 * 4 * WIDTH * WIDTH)))
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    if trained:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def checkpointer(run: Any, model: Any, optimizer: Any, asynchronous: bool, folder: Path) -> Any:
    """What a run saves with, for a model that was sharded by hand."""
    from torch import Tensor

    from lockstep.checkpoint.checkpointer import Checkpointer
    from lockstep.config.schema import Checkpoint
    from lockstep.engine.models import Entry, Models
    from lockstep.strategy.base import Strategy
    from lockstep.strategy.slices import load_module, load_optimizer

    class Sharded(Strategy):
        name: ClassVar[str] = "by hand"
        keeps_slices: ClassVar[bool] = True

        def place(self, model: Any) -> Any:
            return model

        def load_state_dict(self, module: Any, state: Any, strict: bool = True) -> None:
            load_module(module, state, strict)

        def load_optimizer_state_dict(self, optimizer: Any, state: Any) -> None:
            load_optimizer(optimizer, state)

        def parameters_to_check(self, modules: Any) -> dict[str, Tensor]:
            return {}

    strategy = Sharded(run._engine.runtime, run.world_size)
    models = Models(strategy)
    models.add(Entry("model", model, model, optimizer, "float32", None, False))
    settings = Checkpoint.model_validate({"every": None, "async": asynchronous, "keep": {"last": 1, "best": 0}})
    folder.mkdir(exist_ok=True)
    return Checkpointer(run._engine.group, run._engine.runtime, strategy, settings, 1800.0, folder, models, seed=0)


def save_by_owners(run: Any, mib: int, asynchronous: bool) -> list[dict[str, float]]:
    model, optimizer = sharded(mib)
    saving = checkpointer(run, model, optimizer, asynchronous, run.folder / "saved")
    found = []
    for step in range(1, SAVES + 1):
        position = {"progress": {"epoch": 0, "step": step}, "cursors": {}}
        run.barrier("a save")
        began, began_clock = time.perf_counter(), time.time()
        saving.save(step, position, {}, {"epoch": 0, "world_size": run.world_size})
        blocked = time.perf_counter() - began
        saving.finish()
        renamed = saving.storage.path(step).stat().st_ctime  # deleting the one before it comes after that
        found.append({"blocked": blocked, "on disk": renamed - began_clock})
    return found


def restore_by_owners(run: Any, mib: int) -> list[dict[str, float]]:
    there = (run.folder / "saved").exists()
    run.barrier("whether there is anything")
    model, optimizer = sharded(mib, trained=not there)
    saving = checkpointer(run, model, optimizer, True, run.folder / "saved")
    if there:
        run.barrier("a restore")
        began = time.perf_counter()
        saving.restore()
        return [{"seconds": time.perf_counter() - began}]
    run.barrier("a save")
    saving.save(1, {"progress": {"epoch": 0, "step": 1}, "cursors": {}}, {}, {"epoch": 0, "world_size": run.world_size})
    saving.finish()
    return []


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def save_by_dcp(run: Any, mib: int, asynchronous: bool) -> list[dict[str, float]]:
    from torch.distributed.checkpoint import state_dict_saver as dcp

    model, optimizer = sharded(mib)
    found = []
    for step in range(1, SAVES + 1):
        target = run.folder / f"save-{step}"
        run.barrier("a save")
        began = time.perf_counter()
        state = state_of(model, optimizer)
        if asynchronous:
            future: Any = dcp.async_save(state, checkpoint_id=str(target))
            blocked = time.perf_counter() - began
            future.result()
        else:
            dcp.save(state, checkpoint_id=str(target))
            blocked = time.perf_counter() - began
        found.append({"blocked": blocked, "on disk": time.perf_counter() - began})
        run.barrier("the save is there")
        if run.rank == 0:
            shutil.rmtree(target)
    return found


def load_by_dcp(run: Any, mib: int) -> list[dict[str, float]]:
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
    from torch.distributed.checkpoint.state_dict import set_state_dict

    target = run.folder / "save"
    there = target.exists()
    run.barrier("whether there is anything")
    model, optimizer = sharded(mib, trained=not there)
    if not there:
        run.barrier("a save")
        state_dict_saver.save(state_of(model, optimizer), checkpoint_id=str(target))
        return []
    run.barrier("a restore")
    began = time.perf_counter()
    state = state_of(model, optimizer)
    state_dict_loader.load(state, checkpoint_id=str(target))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return [{"seconds": time.perf_counter() - began}]


def digest(run: Any, mib: int) -> list[dict[str, float]]:
    data = memoryview(bytearray(mib * 2**20 // RANKS))
    run.barrier("the digests")
    began, found = time.perf_counter(), hashlib.sha256()
    for start in range(0, len(data), 4 * 2**20):
        found.update(data[start : start + 4 * 2**20])
    return [{"seconds": time.perf_counter() - began}]


def slowest(ranks: list[list[dict[str, float]]]) -> list[dict[str, float]]:
    return [{what: max(each[what] for each in saves) for what in saves[0]} for saves in zip(*ranks, strict=True)]


def contender(body: Callable[..., Any], twice: bool = False, **how: Any) -> Callable[[int, Path], Any]:
    """Runs a body on the ranks; `twice` where the first time writes what the second reads."""

    def measured(mib: int, folder: Path) -> list[dict[str, float]]:
        import lockstep

        ranks = functools.partial(body, mib=mib, **how)
        settings: Any = {"processes": RANKS, "runtime": "cpu", "folder": folder / "run"}
        for _ in range(2 if twice else 1):
            returned = lockstep.launch(ranks, **settings)
        return slowest(returned)

    return measured


CONTENDERS = {
    "dcp-save": contender(save_by_dcp, asynchronous=False),
    "dcp-async": contender(save_by_dcp, asynchronous=True),
    "owners-sync": contender(save_by_owners, asynchronous=False),
    "owners-async": contender(save_by_owners, asynchronous=True),
    "dcp-load": contender(load_by_dcp, twice=True),
    "owners-restore": contender(restore_by_owners, twice=True),
    DIGESTS: contender(digest),
}
