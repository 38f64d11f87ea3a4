"""A folder of runs, followed: which there are, how each is, and rows that are read once, however often shown."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from lockstep import run_files
from lockstep.errors import ConfigError
from lockstep.record.run_folder import SUMMARY_FILE
from lockstep.record.timeline import newest_row
from lockstep.runs.findings import kind_of
from lockstep.runs.live import read_live
from lockstep.runs.reader import Run, holder_is_there, is_run, read_run, status_of
from lockstep.runs.records import number, read_json
from lockstep.runs.timeline import read_timeline

_LISTED = 500
_KEPT = 16  # runs whose rows are kept
_SHOWN = 4  # metrics of a run in the list


@dataclass
class _Rows:
    """The rows of a file that grows, up to where it was read."""

    file: tuple[int, int] = (0, 0)
    offset: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)


class RunsFolder:
    """Runs in a folder and, as those of a sweep, in folders below it. Names never lead out of it."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.alone = is_run(self.root)  # it is itself the folder of a run
        self._rows: dict[str, _Rows] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """All runs, the newest first."""
        if self.alone:
            return [self.root.name]
        found = [(_changed(folder), str(folder.relative_to(self.root))) for folder in self._folders()]
        return [name for _, name in sorted(found, reverse=True)]

    def read(self, name: str) -> Run:
        """ConfigError where there is no such run."""
        folder = self.path(name)
        with self._lock:
            return read_run(folder, rows=list(self._newest_rows(name, folder / "metrics.jsonl")))

    def path(self, name: str) -> Path:
        if self.alone and name == self.root.name:
            return self.root
        parts = Path(name).parts
        folder = (self.root / name).resolve() if parts and "\0" not in name else self.root
        hidden = any(part.startswith(".") for part in parts)  # .. is one of these
        if (
            hidden
            or len(parts) > 2
            or not folder.is_relative_to(self.root)
            or folder == self.root
            or not is_run(folder)
        ):
            raise ConfigError(f"there is no run {name!r} in {self.root}")
        return folder

    def listed(self) -> dict[str, Any]:
        """What a list of them shows, without reading all of each."""
        names = self.names()
        return {
            "title": f"Runs in {self.root.name}",
            "list": [self._brief(name) for name in names[:_LISTED]],
            "more": max(len(names) - _LISTED, 0),
            "link": "run",
        }

    def _brief(self, name: str) -> dict[str, Any]:
        folder = self.path(name)
        summary, live = read_json(folder / SUMMARY_FILE), read_live(folder)
        status = status_of(summary, read_timeline(folder), live, time.time(), holder_is_there(folder))
        row = newest_row(folder / "metrics.jsonl") or {}
        metrics = summary.get("metrics") if status != "running" else row
        told = metrics if isinstance(metrics, dict) and metrics else row
        values = [(key, number(value)) for key, value in told.items() if key not in ("step", "epoch")]
        words = [f"{key} {value:.4g}" for key, value in values if value is not None]
        steps = [number(summary.get("step")), number(row.get("step"))]
        return {
            "name": name,
            "status": status,
            "kind": kind_of(status),
            "step": int(max((each for each in steps if each is not None), default=0)),
            "metrics": " · ".join(words[:_SHOWN]),
            "at": round(_changed(folder)),
        }

    def _folders(self) -> Iterator[Path]:
        for folder in _below(self.root):
            if is_run(folder):
                yield folder
            else:
                yield from (each for each in _below(folder) if is_run(each))

    def _newest_rows(self, name: str, file: Path) -> list[dict[str, Any]]:
        """All rows by now: of a file that only grew since the last time, what is new is read."""
        known = self._rows.pop(name, None) or _Rows()
        self._rows[name] = known
        while len(self._rows) > _KEPT:
            del self._rows[next(iter(self._rows))]
        with contextlib.suppress(OSError), run_files.open_file(file) as stream:
            about = os.fstat(stream.fileno())
            same = (about.st_dev, about.st_ino)
            if known.file != same or about.st_size < known.offset:  # it was written anew, as by a restart
                known.file, known.offset, known.rows = same, 0, []
            _read_on(stream, known)
        return known.rows


def _read_on(stream: BinaryIO, known: _Rows) -> None:
    stream.seek(known.offset)
    for length, line in run_files.lines(stream):
        if not line.endswith(b"\n"):
            return  # still being written
        known.offset += length
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict) and number(row.get("step")) is not None:
                known.rows.append(row)


def _below(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for each in sorted(folder.iterdir()):
            if each.is_dir() and not each.is_symlink() and not each.name.startswith("."):
                yield each


def _changed(folder: Path) -> float:
    """When something was last written to a run."""
    times = []
    for name in ("live.json", "metrics.jsonl", "summary.json", "config.yaml"):
        with contextlib.suppress(OSError):
            times.append((folder / name).lstat().st_mtime)
    return max(times, default=0.0)
