"""Which device families work here: each takes a real training step, in a process of its own."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from lockstep.doctor import versions
from lockstep.doctor.ask import Answer, Question
from lockstep.doctor.check import Check, Verdict
from lockstep.doctor.dependencies import reinstall
from lockstep.doctor.units import duration, size

FAMILIES = ("cpu", "cuda", "xla")
_CUDA_BUILD = "install a build of torch for CUDA (https://pytorch.org/get-started/locally)"
_LIBRARIES = {"cpu": "gloo", "cuda": "NCCL", "xla": "XLA"}


def look(asked: Collection[str], limit: float) -> Iterator[Check]:
    """Those that were asked for, or all; a family that was asked for has to work."""
    families = [family for family in FAMILIES if family in asked or not asked]
    with ExitStack() as questions:
        # All at once: most of the time goes into loading torch.
        pending = {family: questions.enter_context(Question("runtime", family, limit=limit)) for family in families}
        for family, question in pending.items():
            yield from judge(family, question.answer(), family in asked)


def not_tried(asked: Collection[str]) -> Iterator[Check]:
    """Without torch there is nothing to try."""
    for family in FAMILIES:
        if family in asked or not asked:
            remedy = f"pip install 'torch{versions.TORCH}'" if asked else ""
            yield Check(family, "fail" if asked else "none", "not tried: torch is not installed", remedy)


def judge(family: str, answer: Answer, asked: bool) -> Iterator[Check]:
    """A line for the family and, where devices differ, a line for each."""
    facts = answer.value
    if facts is None:
        others_fault = answer.module not in ("", "torch", "torch_xla")
        yield Check(family, "fail", answer.trouble, reinstall(answer.module) if others_fault else _broken(family))
        return
    devices = facts["devices"]
    if not devices:
        yield (no_gpu(facts, os.environ.get("CUDA_VISIBLE_DEVICES"), asked) if family == "cuda" else no_xla(asked))
        return
    troubles = {each["device"]: trouble for each in devices if (trouble := trouble_of(each))}
    verdict, found, remedy = _family(family, devices, troubles, facts["collectives"])
    yield Check(family, verdict, found, remedy, {"devices": devices})
    if family == "cpu":
        return  # which is one device, and all of it is said
    for each in devices:
        yield Check(each["device"], "fail" if each["device"] in troubles else "ok", described(each), data=each)


def _family(
    family: str, devices: list[dict[str, Any]], troubles: Mapping[str, str], collectives: bool
) -> tuple[Verdict, str, str]:
    if troubles:
        return "fail", "; ".join(f"{device}: {trouble}" for device, trouble in troubles.items()), _broken(family)
    where = f" on each of {len(devices)} devices" if len(devices) > 1 else ""
    found = f"a training step works{where}: {', '.join(_steps(devices[0]))}"
    if not collectives:
        return "warn", found, f"this build of torch has no {_LIBRARIES[family]}: one process works, several cannot talk"
    return "ok", found, ""


def trouble_of(device: Mapping[str, Any]) -> str:
    """What was wrong with the step on a device; nothing where it did what it has to."""
    if "error" in device:
        return str(device["error"])
    first, second = device["losses"]
    if not (math.isfinite(first) and math.isfinite(second) and device["finite"]):
        return f"the step gave numbers that are not finite (losses {first}, {second})"
    if not device["changed"]:
        return "the step changed no weight"
    if not second < first:
        return f"the loss did not go down ({first:.6g}, then {second:.6g})"
    return ""


def described(device: Mapping[str, Any]) -> str:
    parts = [str(device[key]) for key in ("identity", "name") if key in device]
    if "memory" in device:
        parts.append(f"{size(device['free_memory'])} of {size(device['memory'])} free")
    return ", ".join([*parts, *([device["error"]] if "error" in device else _steps(device))])


def _steps(device: Mapping[str, Any]) -> list[str]:
    first, second = device["losses"]
    threads = [f"{device['threads']} thread{'s' if device['threads'] > 1 else ''}"] if "threads" in device else []
    return [f"loss {first:.4f} then {second:.4f} in {duration(device['seconds'])}", *threads]


def no_gpu(facts: Mapping[str, Any], visible: str | None, asked: bool) -> Check:
    """Absent, or present and out of reach: only the first is nothing to mention."""
    hidden = visible is not None and visible.strip() in ("", "-1")
    if hidden:
        found, remedy = f"hidden by CUDA_VISIBLE_DEVICES={visible}", "unset CUDA_VISIBLE_DEVICES"
    elif not facts["driver"]:
        found = "no GPU driver"
        remedy = "use a machine with a GPU and its driver (nvidia-smi shows both), or --runtime cpu"
    elif not facts["built_for"]:
        found, remedy = f"a GPU driver is here, but torch {facts['torch']} is built without CUDA", _CUDA_BUILD
    else:
        found = f"a GPU driver is here, but torch {facts['torch']} sees no GPU" + (
            f": {facts['problem']}" if facts["problem"] else ""
        )
        remedy = "check the driver with nvidia-smi, and in a container that GPUs are passed on (--gpus all)"
    absent = hidden or not facts["driver"]
    if asked and absent and not facts["built_for"]:
        remedy += f"; and {_CUDA_BUILD}"
    if not asked and absent:
        return Check("cuda", "none", f"none here: {found}", data=facts)
    return Check("cuda", "fail" if asked else "warn", found, remedy, facts)


def no_xla(asked: bool) -> Check:
    if asked:
        return Check("xla", "fail", "torch_xla is not installed", "pip install 'lockstep-train[xla]'")
    return Check("xla", "none", "none here: torch_xla is not installed")


def _broken(family: str) -> str:
    return {
        "cpu": f"torch does not work in this environment: pip install --force-reinstall 'torch{versions.TORCH}'",
        "cuda": "check the GPU with nvidia-smi, that nobody else fills it, and that torch fits the driver",
        "xla": "check that torch_xla fits torch (pip install 'lockstep-train[xla]') and what PJRT_DEVICE says",
    }[family]
