"""Whether runs can be written where they are to go, and how fast."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from lockstep.doctor.ask import Answer, Stage
from lockstep.doctor.check import Check
from lockstep.doctor.units import GIB, MIB, duration, size

_SAMPLE_BYTES = 4 * MIB
_ROOMY = 1 * GIB
_SLOW_SECONDS = 2.0


def look(stage: Stage, out: str) -> dict[str, Any]:
    """In a process of its own: a network disk that is gone keeps whoever touches it waiting."""
    stage(f"looking for {out}")
    folder = nearest_existing(Path(out))
    usage = shutil.disk_usage(folder)
    facts = {"folder": str(folder), "total": usage.total, "free": usage.free}
    stage(f"writing {size(_SAMPLE_BYTES)} in {folder}")
    try:
        return {**facts, "seconds": _write(folder), "problem": ""}
    except OSError as error:
        return {**facts, "seconds": None, "problem": str(error.strerror or error)}


def judge(answer: Answer) -> Check:
    facts = answer.value
    if facts is None:
        return Check("disk", "fail", answer.trouble, "name a folder on a disk that answers with --out")
    name, free = facts["folder"], facts["free"]
    found = f"{size(free)} of {size(facts['total'])} free in {name}"
    if facts["problem"]:
        remedy = "make room, or name another folder with --out"
        return Check("disk", "fail", f"{found}: cannot be written: {facts['problem']}", remedy, facts)
    found += f"; {size(_SAMPLE_BYTES)} reach it in {duration(facts['seconds'])}"
    if free < _ROOMY:
        return Check("disk", "warn", found, "checkpoints may not fit: make room, or lower checkpoint.keep", facts)
    if facts["seconds"] > _SLOW_SECONDS:
        return Check("disk", "warn", found, "checkpoints will be slow: name a folder on a local disk with --out", facts)
    return Check("disk", "ok", found, data=facts)


def nearest_existing(path: Path) -> Path:
    """The folder itself or, where it is yet to be made, the one that it would be made in."""
    path = path.absolute()
    return next(each for each in (path, *path.parents) if each.exists())


def _write(folder: Path) -> float:
    sample = os.urandom(_SAMPLE_BYTES)  # which no file system can make smaller
    with tempfile.TemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        file.write(sample)
        file.flush()
        os.fsync(file.fileno())
        return time.perf_counter() - began
