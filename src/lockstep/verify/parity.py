"""Parity of parallel code: one process computes the reference, N gloo processes the same batches in parallel.

A program is four functions: `model()`, `batch(step)`, `loss(model, batch)` and `parallelize(model, mesh)`. The
reference writes what it computed into a folder; every rank compares its own parts with it and returns what differs.
"""

from __future__ import annotations

import importlib
import math
import pickle
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.errors import INTERRUPTED_EXIT_CODE, ConfigError, WorkerFailed
from lockstep.verify.parity_findings import DATA_AXES, OTHER_AXES, ParityReport, concluded

DTYPES = ("float64", "float32", "bfloat16")
NEEDED = {"model": "()", "batch": "(step)", "loss": "(model, batch)", "parallelize": "(model, mesh)"}
OPTIONAL = {"optimizer": "(model)", "after_backward": "(model, mesh)", "shard_batch": "(batch, mesh)"}
# The longest that ranks wait for each other in one collective.
_COLLECTIVE_SECONDS = 60.0


@dataclass(frozen=True)
class ParityCase:
    """A program (a file, or functions by name), the mesh to run it on, and how it is compared."""

    program: Path | Mapping[str, Callable[..., Any]]
    mesh: Mapping[str, int]
    steps: int = 5
    dtype: str = "float64"
    tolerance: float | None = None

    def __post_init__(self) -> None:
        wrong = [f"{axis}={size}" for axis, size in self.mesh.items() if not axis.isidentifier() or size < 1]
        if wrong or not self.mesh:
            raise ConfigError(f"mesh: {', '.join(wrong) or 'no axis'}: write for example data=2,model=2")
        if self.processes < 2:
            raise ConfigError("mesh: one process has nothing to compare with itself: write for example data=2")
        if self.steps < 1:
            raise ConfigError(f"steps: must be at least 1, got {self.steps}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype: must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if isinstance(self.program, Path):
            if not self.program.is_file():
                raise ConfigError(f"{self.program}: there is no such file")
        else:
            _check_functions(self.program, "assert_parity")

    @property
    def processes(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def name(self) -> str:
        if isinstance(self.program, Path):
            return str(self.program)
        function = self.program["parallelize"]
        return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Returns the functions of the program; a file is imported for them, in the process that runs it."""
        from lockstep.config.objects import import_object

        found = self.program
        if isinstance(found, Path):
            module = sys.modules[import_object(f"{found.resolve()}:__name__", str(found))]
            found = {name: vars(module)[name] for name in (*NEEDED, *OPTIONAL) if name in vars(module)}
            _check_functions(found, str(self.program))
        unknown = [axis for axis in self.mesh if not re.fullmatch(f"{DATA_AXES}|{OTHER_AXES}", axis)]
        if unknown and "shard_batch" not in found:
            raise ConfigError(
                f"mesh: {unknown[0]}: do ranks along this axis have different rows? If they do, call it data, replica, "
                "batch, fsdp or dp..., else model, tensor, tp, context, cp, expert or ep; or define shard_batch(batch, "
                "mesh)"
            )
        return dict(found)


def _check_functions(found: Mapping[str, Any], where: str) -> None:
    if missing := [f"{name}{arguments}" for name, arguments in NEEDED.items() if not callable(found.get(name))]:
        needed = ", ".join(f"{name}{arguments}" for name, arguments in NEEDED.items())
        raise ConfigError(f"{where}: there is no function {missing[0]}. A parity check needs {needed}")


def parse_mesh(text: str | None, processes: int | None) -> dict[str, int]:
    """Returns the mesh of `data=2,model=2`; without one, a data axis of all processes (2 unless given)."""
    if text is None:
        return {"data": processes or 2}
    mesh: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (each.strip() for each in part.partition("="))
        if not axis or not size.isdigit() or axis in mesh:
            raise ConfigError(f"--mesh {text}: {part!r} is no axis with its size: write for example data=2,model=2")
        mesh[axis] = int(size)
    if processes is not None and processes != math.prod(mesh.values()):
        raise ConfigError(
            f"--mesh {text} has {math.prod(mesh.values())} processes, but --processes is {processes}: give one of them"
        )
    return mesh


def check(cases: Sequence[ParityCase], limit: float = 300.0) -> list[ParityReport]:
    """Checks programs one after the other, in processes that are started once for each number of ranks."""
    reports: dict[int, ParityReport] = {}
    with tempfile.TemporaryDirectory(prefix="lockstep-parity-", ignore_cleanup_errors=True) as name:
        folder, began = Path(name), time.monotonic()
        work = partial(_in_process, "compute_reference", list(cases), folder, limit)
        _launch(work, 1, "the reference (one process, without parallelize)")
        for count in sorted({each.processes for each in cases}):
            chosen = [number for number, each in enumerate(cases) if each.processes == count]
            mine, wait = {number: cases[number] for number in chosen}, min(limit / 2, _COLLECTIVE_SECONDS)
            found = _launch(partial(_in_process, "compare_with_reference", mine, folder, limit, wait), count)
            seconds = time.monotonic() - began
            for index, (number, case) in enumerate(mine.items()):
                reports[number] = concluded(case.name, case.mesh, case.dtype, [each[index] for each in found], seconds)
    return [reports[number] for number in range(len(cases))]


def _in_process(function: str, *arguments: Any) -> Any:
    """Imports torch in the started process alone."""
    return getattr(importlib.import_module("lockstep.verify.parity_rank"), function)(*arguments)


def _launch(function: Callable[[], Any], processes: int, what: str = "") -> list[Any]:
    """Calls a function in so many processes of this host, and returns what each of them returned."""
    from lockstep.launchers.local import supervisor
    from lockstep.launchers.local.child import call_function
    from lockstep.launchers.plan import local_plan

    result = supervisor.launch(
        local_plan([sys.executable], processes), entry=call_function, argument=(_pickled(function),), grace=5.0
    )
    if result.failure is not None:
        failure = result.failure
        if failure.exit_code == ConfigError.exit_code:
            raise ConfigError(failure.cause)
        text = failure.render(processes)
        if what:
            text = f"{what} failed: {text.partition(' failed: ')[2] or text}"
        raise WorkerFailed(failure.rank, failure.host, text, failure.exit_code)
    if result.exit_code:
        raise KeyboardInterrupt if result.exit_code == INTERRUPTED_EXIT_CODE else SystemExit(result.exit_code)
    return [result.returned[rank] for rank in range(processes)]


def _pickled(function: Callable[[], Any]) -> bytes:
    try:
        return pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"the program cannot be sent to the ranks ({error}): define its functions in a module, not inside of others"
        ) from None
