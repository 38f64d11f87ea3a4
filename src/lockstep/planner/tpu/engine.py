"""Traces a step for a slice of TPUs in one process, compiles it in another, and returns a plan's figures."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import json
import math
import platform
import re
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from lockstep.config.accelerators import Accelerator
from lockstep.errors import ConfigError
from lockstep.planner.plan import Collective, NotPlanned, Step, Work, kept, run_module
from lockstep.planner.tpu.compile import COMPILED
from lockstep.planner.tpu.trace import TRACED, Traced, of_crash, part

_USED = re.compile(r"Used (?P<used>[\d.]+[KMGT]?) of [\d.]+[KMGT]? hbm", re.IGNORECASE)
_PART = re.compile(r"^\s*(?P<name>program|arguments)\s+(?P<size>[\d.]+[KMGT]?)B?\s*$", re.MULTILINE)
_WIDTHS = {"bool": 1, "uint8": 1, "int8": 1, "bfloat16": 2, "float16": 2, "int16": 2}  # others have 4 bytes
_TIMES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def refused(text: str) -> tuple[int, int] | None:
    """Parses libtpu's message for a program that does not fit; returns None for any other error.

    Returns the bytes of the program and of its arguments, 0 where it does not count them, as for a slice that is not
    there.
    """
    used = _USED.search(text)
    if used is None:
        return None
    parts = {each["name"]: size(each["size"]) for each in _PART.finditer(text)}
    arguments = parts.get("arguments", 0)
    return parts.get("program", size(used["used"]) - arguments), arguments


def size(text: str) -> int:
    return round(float(text.rstrip("KMGT")) * _TIMES[text[-1] if text[-1] in "KMGT" else ""])


# torch_xla's own extras name these: another libtpu speaks another version of XLA's messages.
WANTED = {"jax": "0.7.1", "jaxlib": "0.7.1", "libtpu": "0.0.21"}
INSTALL = "pip install 'lockstep-train[tpu-plan]'"
_LIMIT_SECONDS = 1800.0
_SHOWN = 300


def planned(config: Path, overrides: Sequence[str], target: Accelerator) -> Step:
    require_tools()
    with tempfile.TemporaryDirectory(prefix="lockstep-plan-") as folder:
        traced = _traced(config, overrides, target, Path(folder))
        return _compiled(traced, target, Path(folder))


def _traced(config: Path, overrides: Sequence[str], target: Accelerator, folder: Path) -> Traced:
    arguments = [str(config), target.type, str(folder), *overrides]
    log, code = run_module("lockstep.planner.tpu.trace", arguments, _LIMIT_SECONDS, f"{config}: tracing a step")
    found = json.loads((folder / TRACED).read_text(encoding="utf-8")) if (folder / TRACED).exists() else {}
    if "error" in found:
        raise ConfigError(f"{config}: {found['error']}")
    if code != 0 or not found:
        why = of_crash(log) or f"the step cannot be traced: {_crash(log, code)}"
        raise NotPlanned(f"{config}: {why}. {kept(log)}")
    return TypeAdapter(Traced).validate_python(found)


def _compiled(traced: Traced, target: Accelerator, folder: Path) -> Step:
    log, code = run_module(
        "lockstep.planner.tpu.compile", [str(folder), target.type], _LIMIT_SECONDS, f"compiling for {target.type}"
    )
    if code != 0 or not (folder / COMPILED).exists():
        raise NotPlanned(f"libtpu ended while it compiled for {target.type}: {_crash(log, code)}. {kept(log)}")
    found = json.loads((folder / COMPILED).read_text(encoding="utf-8"))
    if "error" in found:
        raise ConfigError(f"--on {target.type}: {found['error']}")
    if "refused" in found:
        said = refused(found["refused"])
        if said is None:
            first = found["refused"].strip().splitlines()[0][:_SHOWN]
            log_kept = kept(f"{found['refused']}\n\n{log}")
            raise NotPlanned(f"libtpu does not compile the step for {target.type}: {first}. {log_kept}")
        return _not_fitting(traced, *said)
    return _fitting(traced, found)


def require_tools() -> None:
    """Raises ConfigError where torch_xla, jax and libtpu are not installed in versions that belong together."""
    here = f"{platform.system()} on {platform.machine()}"
    if here != "Linux on x86_64":
        raise ConfigError(
            "plans for TPUs are made by torch_xla and libtpu, which exist for Linux on x86_64 only, and this is "
            f"{here}. On such a machine (any, it needs no TPU): {INSTALL}, then the same lockstep plan"
        )
    if importlib.util.find_spec("torch_xla") is None:
        raise ConfigError(f"a step for TPUs is traced by torch_xla, which is not installed here: {INSTALL}")
    for name, wanted in WANTED.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "not installed"
        if found != wanted:
            raise ConfigError(
                f"{name} is {found}, and a step for TPUs is compiled with {name} {wanted}: torch_xla, jax and libtpu "
                f"have to be of versions that belong together: {INSTALL}"
            )


def _crash(log: str, code: int) -> str:
    lines = [each.strip() for each in log.splitlines() if each.strip()]
    for wanted in (r"Check fail", r"^F\d{4} ", r"\bFATAL\b", r"Error\b"):
        for line in lines:
            if re.search(wanted, line):
                return line[:_SHOWN]
    how = f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{how}{': ' + lines[-1][:_SHOWN] if lines else ''}"


def _fitting(traced: Traced, found: Mapping[str, Any]) -> Step:
    sizes, times = found["sizes"], traced.programs
    made = sizes["temporaries"] + max(sizes["results"] - sizes["shared"], 0) + sizes["code"]
    flops, moved = round(found["flops"] * times), round(found["bytes"] * times)
    return _step(
        traced, found["by_argument"], sizes["arguments"], made, found["seconds"], flops=flops, bytes=moved,
        work=[Work("bfloat16", flops, moved, 1)],
        collectives=collectives(found["exchanges"], traced.mesh, traced.devices, times),
    )  # fmt: skip


def _not_fitting(traced: Traced, program: int, arguments: int) -> Step:
    """libtpu compiles nothing then, and reports only what it would have needed."""
    exact: dict[str, int] = {}
    for each in traced.arguments:
        held = math.prod(part(each.shape, each.sharding)) * _WIDTHS.get(each.dtype, 4)
        exact[each.kind] = exact.get(each.kind, 0) + held
    return _step(traced, exact, arguments or sum(exact.values()), program)


def _step(
    traced: Traced, exact: Mapping[str, int], arguments: int, made: int, seconds: float = 0.0, **known: Any
) -> Step:
    """Counts everything that a program makes as temporaries: the compiler says of it only how much it is."""
    return Step(
        world_size=traced.devices,
        batch=traced.batch,
        examples=traced.examples,
        parameters=traced.parameters,
        weights_bytes=traced.weights_bytes,
        optimizer_bytes=traced.optimizer_bytes,
        peak=arguments + made,
        phase="program",
        by_kind={**_by_kind(exact, arguments), "temporaries": made},
        mesh=traced.mesh,
        seconds=traced.seconds + seconds,
        **known,
    )


def _by_kind(exact: Mapping[str, int], total: int) -> dict[str, int]:
    """Scales to libtpu's total: the rest (tiles, small values) counts as `batch`."""
    kinds = {kind: size for kind, size in exact.items() if kind != "other" and size}
    kinds["batch"] = max(kinds.get("batch", 0) + total - sum(kinds.values()), 0)
    return kinds


def collectives(
    exchanges: Sequence[Mapping[str, Any]], mesh: Mapping[str, int], devices: int, times: int
) -> list[Collective]:
    found: dict[tuple[str, str, int, int], list[int]] = {}
    for each in exchanges:
        group = each["group"] or list(range(devices))
        key = (each["name"], axis_of(group, mesh), len(group), max(group) - min(group) + 1)
        total = found.setdefault(key, [0, 0])
        total[0] += each["count"] * times
        total[1] += each["bytes"] * each["count"] * times
    return [Collective(*key, count, size) for key, (count, size) in sorted(found.items())]


def axis_of(group: Sequence[int], mesh: Mapping[str, int]) -> str:
    """Returns the axis, or axes, along which a group of devices lies."""
    names = [name for name, size in mesh.items() if size > 1]
    places = np.arange(math.prod(mesh.values())).reshape(list(mesh.values()))
    for count in range(1, len(names) + 1):
        for chosen in itertools.combinations(names, count):
            line = places[tuple(slice(None) if name in chosen else 0 for name in mesh)]
            if sorted(group) == sorted(line.ravel().tolist()):
                return " x ".join(chosen)
    return "all ranks" if len(group) == math.prod(mesh.values()) else f"{len(group)} devices"
