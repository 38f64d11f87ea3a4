"""Writes the JSON files of a run's folder: rows of metrics at once, and small live files by a thread."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep import run_files
from lockstep.config.plain import finite, naming

METRICS_FILE = "metrics.jsonl"
Row = dict[str, Any]
SPEED = "examples_per_second"  # in rows of training only


class JsonlWriter:
    """Appends one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self._path, self._stream = path, os.fdopen(run_files.append(path), "a", encoding="utf-8")

    def write(self, row: Row) -> None:
        with naming(self._path):
            self._stream.write(json.dumps(finite(row)) + "\n")
            self._stream.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a line that write() has raised for
            self._stream.close()


def read_rows(path: Path, having: str = "") -> Iterator[Row]:
    """Yields the rows of a file, those of lines with this text; a line that a kill cut short is left out."""
    return (row for row in json_lines(path, having.encode()) if type(row.get("step", 0)) in (int, float))


def read_json(path: Path, depth: int = 1) -> dict[str, Any]:
    """Returns the object of a JSON file; empty where there is none that can be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(run_files.read_text(path, depth=depth))
        return found if isinstance(found, dict) else {}
    return {}


def json_lines(path: Path, having: bytes = b"") -> Iterator[dict[str, Any]]:
    """Yields the objects of a file of JSON lines; lines that are none are left out."""
    with run_files.open_file(path) as stream:
        yield from objects(line for _, line in run_files.lines(stream) if having in line)


def objects(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    decode = json.JSONDecoder().decode  # there may be a hundred thousand lines
    for line in lines:
        try:
            found = decode(line.decode())
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            yield found


def keep_rows(path: Path, count: int) -> int:
    """Cuts a file off after its first rows, since a resumed run writes the others again; returns how many it has."""
    rows = size = 0
    with (
        contextlib.suppress(FileNotFoundError),
        naming(path),
        os.fdopen(run_files.open_descriptor(path, os.O_RDWR), "r+b") as stream,
    ):
        for length, line in itertools.islice(run_files.lines(stream), count):
            if line.endswith(b"\n"):
                rows, size = rows + 1, size + length
        stream.truncate(size)
    return rows


def write_json(path: Path, value: Any, depth: int = 1) -> None:
    """Replaces a JSON file so that it is never seen half written."""
    with naming(path):
        run_files.write(path, json.dumps(finite(value), indent=1) + "\n", depth)


_LONGEST_QUEUE = 1000  # lines that wait for a disk; more are dropped
_END_SECONDS = 2.0


class LiveFiles:
    """Appends lines to files of a folder and replaces others, in a thread: a disk that does not answer blocks only it.

    An error costs one warning per file.
    """

    def __init__(self, folder: Path, warn: Callable[[str], object]) -> None:
        self._folder, self._warn = folder, warn
        self._warned: set[str] = set()
        # A file's name, and how to write it; None is the end.
        self._waiting: queue.Queue[tuple[str, Callable[[int], None]] | None] = queue.Queue(_LONGEST_QUEUE)
        self._thread: threading.Thread | None = None
        # The folder as it is now: one that is moved away is followed, and whatever has its name later is left alone.
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._thread = threading.Thread(target=self._work, args=(descriptor,), name="lockstep-aside", daemon=True)
            self._thread.start()

    def append(self, name: str, line: Mapping[str, Any]) -> None:
        """Appends a line of JSON to a file."""
        text = json.dumps(finite(line)) + "\n"
        self._put(name, lambda descriptor: _append(descriptor, name, text))

    def replace(self, name: str, make: Callable[[], Any]) -> None:
        """Replaces a file of JSON, which the thread makes."""
        self._put(name, lambda descriptor: run_files.write_at(descriptor, name, json.dumps(finite(make())) + "\n"))

    def close(self) -> None:
        """Writes what is left, within two seconds."""
        if self._thread is not None:
            with contextlib.suppress(queue.Full):  # the disk does not answer
                self._waiting.put(None, timeout=_END_SECONDS)
                self._thread.join(_END_SECONDS)

    def _put(self, name: str, write: Callable[[int], None]) -> None:
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._waiting.put_nowait((name, write))

    def _work(self, descriptor: int) -> None:
        while (waiting := self._waiting.get()) is not None:
            name, write = waiting
            try:
                write(descriptor)
            except Exception as error:
                if name not in self._warned:
                    self._warned.add(name)
                    why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                    self._warn(f"{self._folder / name} cannot be written: {why}. The run goes on without it")
        os.close(descriptor)


def _append(folder: int, name: str, text: str) -> None:
    descriptor = run_files.open_at(folder, name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        # In one write, so that the lines of several writers do not mix.
        data = text.encode()
        while data:
            data = data[os.write(descriptor, data) :]
    finally:
        os.close(descriptor)
