"""What ranks do in tests: functions that `lockstep.launch` can find by name in every process."""

from __future__ import annotations

import ctypes
import logging
import logging.handlers
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.checkpoint import ranges, reader
from lockstep.checkpoint.manifest import FILES
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.errors import CheckpointError, RankZeroFailed


def dataset(count: int = 50) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 4, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def own_loop(run: lockstep.Run, epochs: int = 2) -> dict[str, Any]:
    """A training loop of one's own: what plain PyTorch has, and a handful of `run.` lines."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = run.setup(model, optimizer)
    restored = run.restore()
    losses = []
    for _ in run.epochs(epochs):
        for inputs, targets in run.batches(dataset(), batch_size=12):
            loss = F.mse_loss(model(inputs), targets)
            run.backward(loss)
            run.step(optimizer)
            run.log(loss=loss)
            losses.append(loss.item())
        run.checkpoint()
    measured = run.evaluate(lambda batch: {"error": (run.module(batch[0]) - batch[1]).abs().squeeze(1)}, dataset(), 12)
    weights = torch.cat([p.detach().flatten() for p in run.module.parameters()]).tolist()
    return {
        "rank": run.rank,
        "world_size": run.world_size,
        "device": str(run.device),
        "steps": run.progress.step,
        "restored": restored,
        "weights": weights,
        "measured": measured,
    }


def fails_without_restore(run: lockstep.Run) -> None:
    """Saves, does not call run.restore, and fails in its second epoch."""
    model = nn.Linear(4, 1)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for epoch in run.epochs(2):
        train_one_epoch(run)
        if epoch == 1:
            raise ValueError("after the checkpoint")
        run.checkpoint()


def loop_with_values(run: lockstep.Run) -> None:
    """Saves with a value in every epoch, the best of them in the first; values of its own in between."""
    model = nn.Linear(4, 1)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    run.restore()
    for epoch in run.epochs(2):
        for inputs, targets in run.batches(dataset(), batch_size=25):
            loss = F.mse_loss(run.model(inputs), targets)
            run.backward(loss)
            run.step()
            run.log(loss=loss)
        run.log(error=1.0 + epoch)
        run.checkpoint(value=1.0 + epoch)


def goes_back(run: lockstep.Run) -> list[int]:
    model = nn.Linear(4, 1)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    run.restore(best=True)
    found = [run.progress.step, run.progress.epoch]
    run.checkpoint(value=0.5)
    return found


def own_loop_longer(run: lockstep.Run) -> dict[str, Any]:
    return own_loop(run, epochs=4)


def only_evaluates(run: lockstep.Run, restores: bool = True) -> tuple[int, dict[str, float]]:
    run.setup(nn.Linear(4, 1))
    if restores:
        run.restore()
    measure = lambda batch: {"error": (run.module(batch[0]) - batch[1]).abs().squeeze(1)}  # noqa: E731
    return run.progress.step, run.evaluate(measure, dataset(), 12)


def talk(run: lockstep.Run) -> dict[str, Any]:
    """Every way of deciding together, with values that differ by rank."""
    found: dict[str, Any] = {
        "agree": run.agree({"from": run.rank}),
        "agree_callable": run.agree(lambda: run.rank + 100),
        "gather": run.gather([run.rank, "x"]),
        "rendezvous": [
            part.decode() for part in run.devices.rendezvous("exchange", f"from {run.rank}".encode() * (run.rank + 1))
        ],
        "empty": run.devices.rendezvous("nothing"),
        "long": [len(part) for part in run.devices.rendezvous("much", b"x" * (5000 * run.rank))],
        "agree_long": len(run.agree("y" * 5000)),
        "any": [run.any(run.rank == 1), run.any(False)],
    }
    run.barrier("the end")
    try:
        run.agree(_fails, "something that fails on rank 0")
    except (ValueError, RankZeroFailed) as error:
        found["failure"] = f"{type(error).__name__}: {error}"
    try:
        run.gather(object())
    except TypeError as error:
        found["refused"] = str(error)
    return found


def _fails() -> int:
    raise ValueError("no such thing")


def slow_on_rank_0(run: lockstep.Run) -> list[Any]:
    """Both take longer than `timeouts.collective`; rank 1 comes late to the first, which is over by then."""
    run.setup(nn.Linear(4, 1))
    if run.rank == 1:
        time.sleep(1.5)
    found: list[Any] = [run.agree(lambda: time.sleep(1) or 7, "a short decision")]
    found.append(run.agree(lambda: time.sleep(5) or "x" * 2000, "a long decision"))

    def measure(batch: Any) -> dict[str, torch.Tensor]:
        time.sleep(1)
        return {"one": torch.ones(len(batch[0]))}

    return [*found, run.evaluate(measure, dataset(), 10, on="rank0")]


def one_rank_is_missing(run: lockstep.Run) -> None:
    if run.rank == 1:
        signal.pause()
    run.barrier("the start of the feast")


def one_rank_fails(run: lockstep.Run) -> None:
    if run.rank == 1:
        raise KeyError("what rank 1 was looking for")
    run.barrier("what the others wait at")


def threads_and_variables(run: lockstep.Run) -> dict[str, Any]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    return {"threads": torch.get_num_threads(), **{name: os.environ.get(name) for name in names}}


def seventy_five(run: lockstep.Run) -> Any:
    """A value that is also an exit code, and on other ranks one that no other process can get, or make."""
    return [75, threading.Lock(), _Unknown()][run.rank]


class _Unknown:
    def __reduce__(self) -> Any:
        return _fails, ()


def random_numbers(run: lockstep.Run) -> dict[str, Any]:
    before = torch.rand(3).tolist()
    model = nn.Linear(2, 2)
    run.setup(model)
    return {"before": before, "weights": model.weight.tolist(), "after": torch.rand(3).tolist()}


class HalfUsed(nn.Module):
    """One of its layers never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.used(inputs)  # type: ignore[no-any-return]


def half_used(run: lockstep.Run) -> dict[str, Any]:
    model = HalfUsed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = run.setup(model, optimizer)
    for _ in run.epochs(1):
        for inputs, targets in run.batches(dataset(), batch_size=10):
            run.backward(F.mse_loss(model(inputs), targets))
            run.step()
    wrapper: Any = run.model
    return {
        "device_ids": wrapper.device_ids,
        "find_unused_parameters": wrapper.find_unused_parameters,
        "bucket_bytes": wrapper.bucket_bytes_cap,
        "parameter_devices": sorted({str(each.device) for each in run.module.parameters()}),
        "steps": run.progress.step,
    }


def connections(run: lockstep.Run) -> int:
    """How many others this rank is connected to, after it talked to all of them in every way."""
    model = nn.Linear(4, 1)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for _ in run.steps(1):
        run.backward(run.model(torch.ones(2, 4)).mean())
    run.gather("a word")
    run.barrier("before counting")
    mine = psutil.Process().net_connections("tcp")
    count = sum(each.status == psutil.CONN_ESTABLISHED for each in mine)
    run.barrier("after counting")
    return count


def rank_1_stops_training(run: lockstep.Run) -> dict[str, Any]:
    """Only one rank knows why, and only it asks."""
    model = nn.Linear(4, 1)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in run.epochs(100):
        for inputs, targets in run.batches(dataset(), batch_size=12):
            run.backward(F.mse_loss(run.model(inputs), targets))
            run.step()
            time.sleep(0.02)
            if run.rank == 1 and run.progress.step == 7:
                run.stop("pruned")
    return {"step": run.progress.step, "stopped": run.stopped}


def skipping_nan(run: lockstep.Run) -> dict[str, Any]:
    """Rank 1 has a batch that cannot be right at step 3."""
    model = nn.Linear(4, 1)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), on_nan="skip")
    weights = []
    for _ in run.epochs(1):
        for inputs, targets in run.batches(dataset(), batch_size=10):
            loss = F.mse_loss(run.model(inputs), targets)
            if run.rank == 1 and run.progress.step == 2:
                loss = loss * float("nan")
            run.log(loss=loss)
            run.backward(loss)
            run.step()
            weights.append(run.module.weight.flatten().tolist())
    return {"weights": weights, "steps": run.progress.step}


def always_nan(run: lockstep.Run) -> None:
    model = nn.Linear(4, 1)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.05), on_nan="skip")
    for _ in run.epochs(None):
        for inputs, _ in run.batches(dataset(), batch_size=10):
            run.backward(run.model(inputs).mean() * float("nan"))
            run.step()


# Mistakes that everybody makes once


def train_one_epoch(run: lockstep.Run) -> None:
    for inputs, targets in run.batches(dataset(), batch_size=10):
        run.backward(F.mse_loss(run.model(inputs), targets))
        run.step()


def validating_through_the_wrapper_on_rank_0(run: lockstep.Run) -> int:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    model, _ = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for _ in run.epochs(2):
        if run.is_main:
            model.eval()
            with torch.no_grad():
                model(torch.ones(2, 4))
            model.train()
        train_one_epoch(run)
    return run.progress.step


def saving_on_rank_0_with_a_barrier_elsewhere(run: lockstep.Run) -> None:
    model = nn.Linear(4, 1)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for _ in run.epochs(2):
        train_one_epoch(run)
        if run.is_main:
            run.checkpoint()
        else:
            run.barrier("rank 0 has saved")


def different_numbers_of_batches(run: lockstep.Run) -> None:
    """Rank 1 makes one step more."""
    model = nn.Linear(4, 1)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for _ in run.steps(5 + run.rank):
        run.backward(run.model(torch.ones(2, 4)).mean())
        run.step()


def own_data(run: lockstep.Run, kinds: list[str]) -> int:
    """Loops that make their own data: different on every rank, or the same."""
    model = nn.Linear(4, 1)
    model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for kind in kinds:
        if run.progress.step:  # as in a run of its own
            run._engine.checks = type(run._engine.checks)(run._engine.group, run._engine.runtime, run.dp_size)
        for step in run.steps(run.progress.step + 5):
            inputs = torch.randn(5, 4) if kind == "different" else torch.full((1, 4), float(step))
            run.backward(F.mse_loss(model(inputs), inputs.sum(1, keepdim=True)))
            run.step(optimizer)
    return run.progress.step


def replicas_that_drift_apart(run: lockstep.Run) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for _ in run.epochs(10):
        for inputs, targets in run.batches(dataset(), batch_size=12):
            run.backward(F.mse_loss(run.model(inputs), targets))
            run.step()
            if run.rank == 2 and run.progress.step == 5:
                with torch.no_grad():
                    run.module[1].weight[0, 0] += 1e-6


def fails_and_cannot_leave(run: lockstep.Run) -> None:
    """A thread of the user's own keeps the process alive after the error."""
    if run.rank == 1:
        threading.Thread(target=time.sleep, args=(60,)).start()
        raise ValueError("the real reason")
    time.sleep(60)


def slow_synchronous_saves(run: lockstep.Run) -> int:
    """Every save takes longer than a rank may go without progress, and less than a save may take."""
    create = CheckpointStorage.create

    def slowly(store: CheckpointStorage, *how: Any) -> Any:
        time.sleep(4)
        return create(store, *how)

    CheckpointStorage.create = slowly  # type: ignore[method-assign]
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for _ in run.epochs(2):
        train_one_epoch(run)
        run.checkpoint()
        run.evaluate(lambda batch: {"x": run.module(batch[0])[:, 0]}, dataset(), 10)
    return run.progress.step


def slow_in_user_code(run: lockstep.Run) -> int:
    """Longer than `timeouts.stall` on all ranks at once, then half as long on one of them."""
    model = nn.Linear(4, 1)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for inputs, targets in run.batches(dataset(), batch_size=2):
        if run.progress.step == 1:
            time.sleep(7.5)
        if run.progress.step == 3 and run.rank == 1:
            time.sleep(3)
        run.backward(F.mse_loss(run.model(inputs), targets))
        run.step()
    return run.progress.step


def restores(run: lockstep.Run) -> dict[str, Any]:
    """As if rank 1 were on a host of its own, with a disk of its own."""
    host = "b" if run.rank == 1 else "a"
    socket.gethostname = lambda: host
    store, warnings = CheckpointStorage(run.folder / host), logging.handlers.MemoryHandler(1000)
    logging.getLogger("lockstep.checkpoint").addHandler(warnings)

    def told(which: dict[str, Any]) -> dict[str, Any] | None:
        loaded = reader.restore(store, run._engine.group, **which)
        if loaded is None:
            return None
        return {
            "step": loaded.step,
            "sum": loaded.model["big"].double().sum().item(),
            "momentum": loaded.state["momentum"].mean().item(),
            "tied": loaded.model["tied"] is loaded.model["big"],
        }

    def refused(which: dict[str, Any]) -> str:
        try:
            return f"not refused: {told(which)}"
        except CheckpointError as error:
            return str(error)

    opened: Counter[str] = Counter()
    folders = [""]  # that were opened: a file is opened by the descriptor of its folder

    def note(event: str, details: tuple[Any, ...]) -> None:
        if event == "open" and "step-" in str(details[0]):
            folders.append(str(details[0]))
        elif event == "open" and "step-00000002" in folders[-1]:
            opened[str(details[0])] += 1

    sys.addaudithook(note)
    found: dict[str, Any] = {"newest": told({}), "opened": {name: opened[name] for name in opened if name in FILES}}
    found["warnings"] = [each.getMessage() for each in warnings.buffer if each.levelno >= logging.WARNING]
    return found | {
        "best": told({"best": True}),
        "missing": refused({"step": 7}),
        "asked": refused({"step": 3}),
        "empty": reader.restore(CheckpointStorage(run.folder / "nothing"), run._engine.group),
    }


def reads_for_ever(run: lockstep.Run) -> None:
    """The disk of the rank that reads does not answer, and rank 1 has none of what is on it."""
    if run.rank == 0:
        ranges.fill = lambda *piece: time.sleep(60)  # type: ignore[assign,misc]
    reader.restore(CheckpointStorage(run.folder / ("b" if run.rank else "a")), run._engine.group)


def profiled_loop(run: lockstep.Run) -> int:
    """A loop of one's own, with a region of its own."""
    model = nn.Linear(4, 1)
    model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for _ in run.epochs(2):
        for inputs, targets in run.batches(dataset(), batch_size=12):
            with run.region("my model"):
                outputs = model(inputs)
            loss = F.mse_loss(outputs, targets)
            run.backward(loss)
            run.step(optimizer)
        run.evaluate(lambda batch: {"error": (run.module(batch[0]) - batch[1]).abs().squeeze(1)}, dataset(), 12)
        run.checkpoint()
    return run.progress.step


def threads_of_a_new_thread(run: lockstep.Run) -> int:
    """How many threads a library would take that computes in a thread which torch has not seen yet."""
    with Path("/proc/self/maps").open() as maps:
        library = next(line.split()[-1] for line in maps if "libgomp" in line)
    with ThreadPoolExecutor(1) as pool:
        return int(pool.submit(ctypes.CDLL(library).omp_get_max_threads).result())


class Carried:
    """A hidden state that is carried from batch to batch: another one on every rank."""

    def __init__(self, hidden: float) -> None:
        self.hidden, self.seen = torch.full((2,), hidden), 0

    def state_dict(self) -> dict[str, Any]:
        return {"hidden": self.hidden, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.hidden, self.seen = state["hidden"], state["seen"]


def carries_state(run: lockstep.Run, per_rank: bool = False) -> tuple[list[float], int, int]:
    """Saves where there is nothing to restore; the state that it then has."""
    model = nn.Linear(1, 1)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    carried, common = Carried(0.0), Carried(0.0)
    run.register_state("carried", carried, per_rank=per_rank)
    run.register_state("common", common)
    if not run.restore():
        carried.hidden += torch.tensor([1.0, 2.0] if run.rank == 0 else [2.0, 1.0])  # the same numbers
        carried.seen = common.seen = 5
        run.checkpoint()
    return carried.hidden.tolist(), carried.seen, common.seen


def clipped(run: lockstep.Run, until: int | None = None) -> dict[str, float]:
    """An epoch with clipped gradients, saved and left after so many steps; its means."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.5), clip_norm=0.1)
    run.restore()
    for _ in run.epochs(1):
        for (batch,) in run.batches(TensorDataset(torch.arange(16.0).reshape(16, 1)), 4):
            run.backward(run.model(batch).square().mean())
            run.step()
            if run.progress.step == until:
                run.checkpoint()
                break
    run._engine.aggregator.bring_together(run.progress)
    return run._engine.aggregator.since_validation.means()


def saves_as_set(run: lockstep.Run, own_data: bool) -> list[int]:
    """A loop that never calls run.checkpoint: the steps that were saved."""
    model = nn.Linear(4, 1)
    model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.restore()
    if own_data:
        for _ in run.steps(7):
            run.backward(model(torch.ones(2, 4)).mean())
            run.step(optimizer)
    else:
        for (inputs,) in run.batches(TensorDataset(torch.ones(56, 4)), 8):
            run.backward(model(inputs).mean())
            run.step(optimizer)
    run._engine.checkpointer.finish()
    return sorted(int(each.name.removeprefix("step-")) for each in (run.folder / "checkpoints").glob("step-*"))
