"""For tests of parallel code: `assert_parity` fails where it does not compute what one process computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError
from lockstep.verify.parity import NEEDED, OPTIONAL, ParityCase, check, parse_mesh
from lockstep.verify.parity_findings import Finding, ParityReport

__all__ = ["Finding", "ParityReport", "assert_parity"]


def assert_parity(
    file: str | Path | None = None,
    *,
    mesh: str | Mapping[str, int] = "data=2",
    steps: int = 3,
    dtype: str = "float64",
    tolerance: float | None = None,
    limit: float = 300.0,
    **functions: Callable[..., Any],
) -> ParityReport:
    """Compares parallel code with one process, as `lockstep verify FILE.py` does; raises AssertionError with its text.

    The program is a file, or functions by name: `model`, `batch`, `loss`, `parallelize`, and optionally `optimizer`,
    `after_backward` and `shard_batch` (docs/parity.md). Other processes call them: define them in a module, not inside
    of other functions. `limit` is in seconds.
    """
    if (file is None) == (not functions):
        raise ConfigError("assert_parity: name a file, or give the functions model, batch, loss and parallelize")
    if unknown := [name for name in functions if name not in (*NEEDED, *OPTIONAL)]:
        raise ConfigError(f"assert_parity: {unknown[0]!r} is none of {', '.join((*NEEDED, *OPTIONAL))}")
    sizes = parse_mesh(mesh, None) if isinstance(mesh, str) else dict(mesh)
    program = functions if file is None else Path(file)
    (report,) = check([ParityCase(program, sizes, steps, dtype, tolerance)], limit)
    if not report.agrees:
        raise AssertionError(f"not the same as one process\n{report}")
    return report
