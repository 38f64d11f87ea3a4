"""The record of a run: rows of metrics in a file of JSON lines, written at once and exactly."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from lockstep import run_files
from lockstep.config.plain import finite, naming

Row = dict[str, Any]
SPEED = "examples_per_second"  # what rows of training have, and others do not


class JsonlWriter:
    """One JSON object per line, each line whole."""

    def __init__(self, path: Path) -> None:
        self._path, self._stream = path, os.fdopen(run_files.append(path), "a", encoding="utf-8")

    def write(self, row: Row) -> None:
        with naming(self._path):
            self._stream.write(json.dumps(finite(row)) + "\n")
            self._stream.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a line that write() could not get rid of, and has raised for
            self._stream.close()


def read_rows(path: Path) -> list[Row]:
    """The rows of a jsonl file; what is no row, as a last line that a kill cut short, is left out."""
    rows = []
    with run_files.open_file(path) as stream:
        for _, line in run_files.lines(stream):
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line)
                if isinstance(row, dict) and type(row.get("step", 0)) in (int, float):
                    rows.append(row)
    return rows


def drop_rows_after(
    path: Path, step: int, training_step: int | None = None, keep: int | None = None
) -> tuple[int, list[Row]]:
    """Forget rows that a resumed run will write again, replacing the file in one move; how many are left, and those.

    Where it is not known how many rows to keep, those of later steps go. Those of training may be further back than
    the rest: the row that a run ends with comes after its last checkpoint.
    """
    if not path.exists():
        return 0, []
    rows = read_rows(path)
    last = {True: step if training_step is None else training_step, False: step}
    left = rows[:keep] if keep is not None else [row for row in rows if row.get("step", 0) <= last[SPEED in row]]
    with naming(path):
        run_files.write(path, "".join(json.dumps(row) + "\n" for row in left))
    stays = set(map(id, left))
    return len(left), [row for row in rows if id(row) not in stays]


def write_json(path: Path, value: Any, depth: int = 1) -> None:
    """Write a whole JSON file or none."""
    with naming(path):
        run_files.write(path, json.dumps(finite(value), indent=1) + "\n", depth)
