"""What works: a training step on every device, and processes of the launcher that sum over all ranks.

Both run in a subprocess of the doctor (`take_step`, `start_processes`).
"""

from __future__ import annotations

import importlib.util
import math
import os
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.doctor.ask import Answer, Question, Stage
from lockstep.doctor.check import Check, Verdict, duration
from lockstep.shown import size

if TYPE_CHECKING:
    from lockstep.engine.run import Run
    from lockstep.runtime.base import Runtime

FAMILIES = ("cpu", "cuda", "xla")
_LIBRARIES = {"cpu": "gloo", "cuda": "NCCL", "xla": "XLA"}
_BROKEN = {
    "cpu": "torch does not work in this environment: pip install --force-reinstall torch",
    "cuda": "check the GPU with nvidia-smi, that nobody else fills it, and that torch fits the driver",
    "xla": "check that torch_xla fits torch (pip install 'lockstep-train[xla]') and what PJRT_DEVICE says",
}


def look(asked: Collection[str], limit: float) -> Iterator[Check]:
    """Tries the runtimes that were asked for, which have to work, or all."""
    families = [family for family in FAMILIES if family in asked or not asked]
    with ExitStack() as questions:
        # All at once: most of the time goes into loading torch.
        pending = {family: questions.enter_context(Question("runtime", family, limit=limit)) for family in families}
        for family, question in pending.items():
            yield from judge(family, question.answer(), family in asked)


def judge(family: str, answer: Answer, asked: bool) -> Iterator[Check]:
    """Yields a line for the family and, if devices differ, a line for each."""
    facts = answer.value
    if facts is None:
        yield Check(family, "fail", answer.problem, _BROKEN[family])
        return
    devices = facts["devices"]
    if not devices:
        if family == "cuda":
            yield no_gpu(facts, asked)
        elif asked:
            yield Check("xla", "fail", "torch_xla is not installed", "pip install 'lockstep-train[xla]'")
        else:
            yield Check("xla", "none", "none here: torch_xla is not installed")
        return
    problems = {each["device"]: problem for each in devices if (problem := step_problem(each))}
    verdict: Verdict
    if problems:
        verdict, remedy = "fail", _BROKEN[family]
        found = "; ".join(f"{device}: {problem}" for device, problem in problems.items())
    else:
        where = f" on each of {len(devices)} devices" if len(devices) > 1 else ""
        verdict, remedy, found = "ok", "", f"a training step works{where}: {', '.join(_steps(devices[0]))}"
        if not facts["collectives"]:
            verdict = "warn"
            remedy = f"this build of torch has no {_LIBRARIES[family]}: one process works, several cannot talk"
    yield Check(family, verdict, found, remedy, {"devices": devices})
    if family != "cpu":
        for each in devices:
            yield Check(each["device"], "fail" if each["device"] in problems else "ok", described(each), data=each)


def step_problem(device: Mapping[str, Any]) -> str:
    """Says what was wrong with the step on a device, if anything."""
    if "error" in device:
        return str(device["error"])
    first, second = device["losses"]
    if not (math.isfinite(first) and math.isfinite(second) and device["finite"]):
        return f"the step gave numbers that are not finite (losses {first}, {second})"
    if not device["changed"]:
        return "the step changed no weight"
    return "" if second < first else f"the loss did not go down ({first:.6g}, then {second:.6g})"


def described(device: Mapping[str, Any]) -> str:
    parts = [str(device[key]) for key in ("identity", "name") if key in device]
    if "memory" in device:
        parts.append(f"{size(device['free_memory'])} of {size(device['memory'])} free")
    return ", ".join([*parts, *([device["error"]] if "error" in device else _steps(device))])


def _steps(device: Mapping[str, Any]) -> list[str]:
    first, second = device["losses"]
    threads = [f"{device['threads']} thread{'s' if device['threads'] > 1 else ''}"] if "threads" in device else []
    return [f"loss {first:.4f} then {second:.4f} in {duration(device['seconds'])}", *threads]


def no_gpu(facts: Mapping[str, Any], asked: bool) -> Check:
    """A GPU that is absent is no problem unless it was asked for; one that cannot be used is."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    found = "hidden by CUDA_VISIBLE_DEVICES" if hidden else facts["problem"]
    if not asked and (hidden or not facts["driver"]):
        return Check("cuda", "none", f"none here: {found}", data=facts)
    remedy = (
        "unset CUDA_VISIBLE_DEVICES" if hidden else "check the driver with nvidia-smi, in a container that GPUs are "
        "passed on (--gpus all), and that torch is a build for CUDA (https://pytorch.org/get-started/locally)"
    )  # fmt: skip
    return Check("cuda", "fail" if asked else "warn", found, remedy, facts)


def take_step(stage: Stage, family: str) -> dict[str, Any]:
    """Returns the devices of the family, each with the result of a step; without any, the reason."""
    if family == "xla" and importlib.util.find_spec("torch_xla") is None:
        return {"devices": []}
    stage(f"loading {'torch_xla' if family == 'xla' else 'torch'}")
    from lockstep import runtime
    from lockstep.config.schema import RunSettings

    if family == "xla":
        device = runtime.create("xla", 0, 1, RunSettings(runtime="xla"))
        stage("opening the XLA device")
        about = {"identity": device.identity(), "version": metadata.version("torch_xla")}
        devices_here = f"{device.addressable_device_count()} of {device.global_device_count()}"
        about["name"] = f"{os.environ['PJRT_DEVICE']}, {devices_here}"
        return {"devices": [{**about, **_step(stage, device)}], "collectives": True}
    import torch
    import torch.distributed as dist

    if family == "cpu":
        device = runtime.create("cpu", 0, 1, RunSettings())
        here = {"identity": device.identity(), "threads": torch.get_num_threads()}
        collectives = dist.is_available() and dist.is_gloo_available()
        return {"devices": [{**here, **_step(stage, device)}], "collectives": collectives}
    stage("counting GPUs")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        stage("asking the GPU driver")
        problem = "torch sees no GPU"
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:
            problem = _first_line(error)
        driver = any(Path(each).exists() for each in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))
        return {"devices": [], "problem": problem, "driver": driver}
    devices = [_gpu(stage, runtime.create("cuda", index, 1, RunSettings())) for index in range(count)]
    return {"devices": devices, "collectives": dist.is_available() and dist.is_nccl_available()}


def _gpu(stage: Stage, device: Runtime) -> dict[str, Any]:
    import torch

    about: dict[str, Any] = {"device": str(device.device), "identity": "unknown"}
    stage(f"opening {device.device}")
    try:
        about.update(identity=device.identity(), name=torch.cuda.get_device_name(device.device))
        device.prepare()
        about["free_memory"], about["memory"] = torch.cuda.mem_get_info(device.device)
        return {**about, **_step(stage, device)}
    except RuntimeError as error:  # one broken GPU does not hide the others
        return {**about, "error": _first_line(error)}


def _step(stage: Stage, runtime: Runtime) -> dict[str, Any]:
    """Takes two steps of a small model: the loss of the second shows what the first one did."""
    import torch
    from torch import nn

    device = runtime.device
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
        runtime.synchronize()
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


def look_at_processes(count: int, family: str, limit: float) -> Check:
    remedy = "see to the checks above that failed first; give a slow machine more time with --limit"
    with (
        tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as folder,
        Question("processes", count, family, folder, limit, limit=limit) as question,
    ):
        return question.check(f"processes on {family}", remedy)


def start_processes(stage: Stage, processes: str, family: str, folder: str, limit: str) -> Check:
    """Starts processes that sum over all ranks; a launch that fails raises what its user would see."""
    stage(f"starting {processes} processes on {family}")
    from lockstep.launchers.launch import launch

    wait = float(limit) / 3  # ranks give up before the doctor does, and say who did not arrive
    began = time.perf_counter()
    limits = {"rendezvous": wait, "collective": wait, "stop": wait}
    ranks = launch(_sum, int(processes), folder=folder, runtime=family, timeouts=limits)
    return judge_processes(ranks, time.perf_counter() - began, family)


def judge_processes(ranks: Sequence[Mapping[str, Any]], seconds: float, family: str) -> Check:
    name, facts = f"processes on {family}", {"ranks": ranks, "seconds": seconds}
    wrong = [str(rank) for rank, each in enumerate(ranks) if not each["correct"]]
    if wrong:
        remedy = "the data plane gives wrong numbers: check the devices, and the interconnect between them"
        return Check(name, "fail", f"a sum over all ranks came out wrong on rank {', '.join(wrong)}", remedy, facts)
    came = "1 process ran" if len(ranks) == 1 else f"{len(ranks)} processes came together"
    return Check(name, "ok", f"{came}, start to end in {duration(seconds)}", data=facts)


def _sum(run: Run) -> dict[str, Any]:
    """Runs on every rank: whether a sum over all ranks is right."""
    import torch
    import torch.distributed as dist

    tensor = torch.full((1024,), float(run.rank + 1), device=run.device)
    if run.world_size > 1:
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            raise run._engine.group.explain(error, "doctor: a sum over all ranks") from error
    correct = bool((tensor == run.world_size * (run.world_size + 1) / 2).all())
    return {"device": str(run.device), "identity": run._engine.runtime.identity(), "correct": correct}
