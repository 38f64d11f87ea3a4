"""A real training step on every device of a family; runs in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep import runtime
from lockstep.doctor.ask import Stage

if TYPE_CHECKING:
    import torch


def look(stage: Stage, family: str) -> dict[str, Any]:
    """The devices of the family, each with how a step went there; none of them with what is known of the reason."""
    return {"cpu": _cpu, "cuda": _cuda, "xla": _xla}[family](stage)


def _cpu(stage: Stage) -> dict[str, Any]:
    stage("loading torch")
    import torch
    import torch.distributed as dist

    from lockstep.config.schema import RunSettings

    device = runtime.create("cpu", 0, 1, RunSettings())
    about = {"identity": device.identity(), "threads": torch.get_num_threads()}
    collectives = dist.is_available() and dist.is_gloo_available()
    return {"devices": [{**about, **_step(stage, device.device, device.synchronize)}], "collectives": collectives}


def _cuda(stage: Stage) -> dict[str, Any]:
    stage("loading torch")
    import torch
    import torch.distributed as dist

    stage("counting GPUs")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return {"devices": [], **_why_no_gpu(stage)}
    devices = [_gpu(stage, index) for index in range(count)]
    return {"devices": devices, "collectives": dist.is_available() and dist.is_nccl_available()}


def _gpu(stage: Stage, index: int) -> dict[str, Any]:
    import torch

    from lockstep.config.schema import RunSettings

    device = runtime.create("cuda", index, 1, RunSettings())
    about: dict[str, Any] = {"device": str(device.device), "identity": "unknown"}
    stage(f"opening {device.device}")
    try:
        about.update(identity=device.identity(), name=torch.cuda.get_device_name(device.device))
        device.prepare()
        about["free_memory"], about["memory"] = torch.cuda.mem_get_info(device.device)
        return {**about, **_step(stage, device.device, device.synchronize)}
    except RuntimeError as error:  # one GPU that is broken does not hide the others
        return {**about, "error": _first_line(error)}


def _why_no_gpu(stage: Stage) -> dict[str, Any]:
    import torch

    stage("asking the GPU driver")
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        problem = ""
    except (RuntimeError, AssertionError) as error:
        problem = _first_line(error)
    driver = any(Path(each).exists() for each in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))
    built = torch.version.cuda or torch.version.hip
    return {"torch": torch.__version__, "built_for": built, "driver": driver, "problem": problem}


def _xla(stage: Stage) -> dict[str, Any]:
    if importlib.util.find_spec("torch_xla") is None:
        return {"devices": []}
    from lockstep.config.schema import RunSettings

    stage("loading torch_xla")
    device = runtime.create("xla", 0, 1, RunSettings(runtime="xla"))
    stage("opening the XLA device")
    about = {"identity": device.identity(), "version": metadata.version("torch_xla")}
    about["name"] = (
        f"{os.environ['PJRT_DEVICE']}, {device.addressable_device_count()} of {device.global_device_count()}"
    )
    return {"devices": [{**about, **_step(stage, device.device, device.synchronize)}], "collectives": True}


def _step(stage: Stage, device: torch.device, synchronize: Callable[[], None]) -> dict[str, Any]:
    """Two steps of a small model: the loss of the second shows what the first one did."""
    import torch
    from torch import nn

    stage(f"a training step on {device}")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(64, 16)
    inputs, targets = inputs.to(device), inputs.sum(1, keepdim=True).to(device)
    losses = []
    began = time.perf_counter()
    for _ in range(2):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
        synchronize()
    seconds = time.perf_counter() - began
    weights = [parameter.detach() for parameter in model.parameters()]
    return {
        "device": str(device),
        "losses": [float(loss) for loss in losses],
        "finite": all(bool(torch.isfinite(each).all()) for each in weights),
        "changed": any(not torch.equal(old, new) for old, new in zip(before, weights, strict=True)),
        "seconds": seconds,
    }


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
