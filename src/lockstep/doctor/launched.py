"""Starts real processes through the launcher and measures how they talk; runs in a process of its own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.doctor.ask import Stage
from lockstep.doctor.units import MIB

if TYPE_CHECKING:
    import torch

    from lockstep.train.run import Run

# Sizes of what is summed over all ranks: a bucket of gradients is 25 MiB unless the config says otherwise.
SIZES = (1 * MIB, 8 * MIB, 32 * MIB)
_LATENCY_ROUNDS, _BANDWIDTH_ROUNDS, _WARM_UP_ROUNDS = 100, 5, 3


def look(stage: Stage, processes: str, family: str, folder: str, limit: str) -> dict[str, Any]:
    """What the ranks measured, by rank; a launch that fails raises what its user would see."""
    stage(f"starting {processes} processes on {family}")
    from lockstep.launcher.function import launch

    # Ranks give up before the asker does, so that it is they who say who did not arrive.
    wait = float(limit) / 3
    began = time.perf_counter()
    limits = {"join_timeout": wait, "timeout": wait, "grace": wait}
    ranks = launch(measure, int(processes), folder=folder, runtime=family, launch=limits)
    return {"ranks": ranks, "seconds": time.perf_counter() - began}


def measure(run: Run) -> dict[str, Any]:
    """On every rank: the median time of small and large exchanges, and that their result is right."""
    about: dict[str, Any] = {"device": str(run.device), "identity": run.runtime.identity()}
    if run.world_size == 1:
        return about
    about["correct"] = _correct(run)
    about["barrier"] = _median(lambda: run.barrier("doctor: a barrier"), _LATENCY_ROUNDS)
    about["latency"] = _all_reduce(run, 4, _LATENCY_ROUNDS)
    # The same number of bytes for every size, so that chance counts for as little in the small ones.
    about["seconds"] = {str(size): _all_reduce(run, size, _BANDWIDTH_ROUNDS * SIZES[-1] // size) for size in SIZES}
    about["open_files"] = _open_files()
    return about


def _correct(run: Run) -> bool:
    import torch

    tensor = torch.full((1024,), float(run.rank + 1), device=run.device)
    _sum(run, tensor, "doctor: a sum over all ranks")
    return bool((tensor == run.world_size * (run.world_size + 1) / 2).all())


def _all_reduce(run: Run, size: int, rounds: int) -> float:
    import torch

    tensor = torch.zeros(size // 4, dtype=torch.float32, device=run.device)
    name = f"doctor: an all_reduce of {size} bytes"

    def exchange() -> None:
        _sum(run, tensor, name)
        run.runtime.synchronize()

    run.barrier(f"before {name}")
    return _median(exchange, rounds)


def _sum(run: Run, tensor: torch.Tensor, name: str) -> None:
    import torch.distributed as dist

    try:
        dist.all_reduce(tensor)
    except RuntimeError as error:
        raise run.group.explain(error, name) from error


def _median(action: Callable[[], None], rounds: int) -> float:
    seconds = []
    for _ in range(_WARM_UP_ROUNDS + rounds):
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[_WARM_UP_ROUNDS:])


def _open_files() -> int | None:
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.is_dir() else None
