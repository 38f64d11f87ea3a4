"""Reads rows of columns from files of texts, and names the place of what is wrong in them."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.config.plain import did_you_mean
from lockstep.errors import ConfigError
from lockstep.shown import brief


def read_rows(path: str, columns: Sequence[str], at: str, lists: bool = False) -> list[dict[str, Any]]:
    """Returns these columns of all rows of a file, or of a folder that `datasets` saved: texts, or lists."""
    rows, missing = [], f"{at}: {path}: there is no such file or folder"
    try:
        for place, row in _rows(Path(path), at):
            rows.append(_chosen(row, columns, f"{at}: {path}, {place}", lists))
    except FileNotFoundError:
        raise ConfigError(missing) from None
    except ImportError as error:
        raise ConfigError(f"{at}: {path}: {error}: pip install 'lockstep-train[text]'") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{at}: {path} cannot be read: {error}") from None
    if not rows:
        raise ConfigError(f"{at}: {path} has no rows")
    return rows


def _chosen(row: Any, columns: Sequence[str], place: str, lists: bool) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise ConfigError(f"{place}: must be an object such as {{{columns[0]!r}: ...}}, got {brief(repr(row), 60)}")
    for name in columns:
        if name not in row:
            raise ConfigError(f"{place}: there is no column {name!r}, {did_you_mean(name, row)}")
        if row[name] is None:
            raise ConfigError(f"{place}: {name!r} has no value (null): give it a value, or leave the row out")
        if isinstance(row[name], list) != lists or isinstance(row[name], dict):
            wanted = "a list of messages" if lists else "a text or a number"
            raise ConfigError(f"{place}: {name!r} must be {wanted}, got {brief(repr(row[name]), 60)}")
        if isinstance(row[name], str) and not _is_text(row[name]):
            raise ConfigError(f"{place}: {name!r} has half of a character (a lone surrogate such as \\ud800): mend it")
    return {name: row[name] for name in columns}


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _rows(path: Path, at: str) -> Iterator[tuple[str, Any]]:
    """Yields every row and where it is."""
    kind = path.suffix.lower()
    if path.is_dir():
        import datasets

        try:
            found = datasets.load_from_disk(str(path))
        except FileNotFoundError:
            raise ConfigError(f"{at}: {path}: is no folder that save_to_disk of datasets wrote") from None
        if isinstance(found, datasets.DatasetDict):
            raise ConfigError(f"{at}: {path} has several parts: name one of them, such as {path}/{next(iter(found))}")
        yield from _numbered(found)
    elif kind == ".parquet":
        from pyarrow import parquet

        batches = parquet.ParquetFile(path).iter_batches()
        yield from _numbered(row for batch in batches for row in batch.to_pylist())
    elif kind == ".csv":
        yield from _rows_of_csv(path, at)
    elif kind == ".json":
        found = _parsed("".join(line for _, line in lines_of(path, at)), f"{at}: {path}")
        if not isinstance(found, list):
            raise ConfigError(f"{at}: {path}: must be a list of objects, got {brief(repr(found), 60)}")
        yield from _numbered(found)
    elif kind in (".jsonl", ".txt"):
        for number, line in lines_of(path, at):
            if line.strip():
                text = line.rstrip("\r\n")
                row = _parsed(text, f"{at}: {path}, line {number}") if kind == ".jsonl" else {"text": text}
                yield f"line {number}", row
    else:
        raise ConfigError(
            f"{at}: {path}: must end with .jsonl, .json, .csv, .parquet or .txt, or be a folder that datasets saved"
        )


def _numbered(rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(rows, 1):
        yield f"row {number}", row


def lines_of(path: Path, at: str) -> Iterator[tuple[int, str]]:
    """Yields the lines of a text file with their numbers, without a byte order mark."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                byte = error.object[error.start]
                raise ConfigError(
                    f"{at}: {path}, line {number}: byte 0x{byte:02x} is no UTF-8: save the file as UTF-8"
                ) from None


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        there = f"line {error.lineno}, column {error.colno}" if "\n" in text else f"column {error.colno}"
        lines = ". Name a file with an object per line .jsonl" if error.msg == "Extra data" and "\n" in text else ""
        raise ConfigError(f"{place}: broken JSON: {error.msg} ({there}){lines}") from None
    except RecursionError:
        raise ConfigError(f"{place}: JSON that is nested too deep") from None


def _rows_of_csv(path: Path, at: str) -> Iterator[tuple[str, Any]]:
    rows = csv.DictReader(line for _, line in lines_of(path, at))
    try:
        for row in rows:
            place, columns = f"line {rows.line_num}", len(rows.fieldnames or ())
            extra: Any = row.pop(None, None)
            if any(extra or ()):
                raise ConfigError(
                    f"{at}: {path}, {place}: {columns + len(extra)} values for {columns} columns: put a text with "
                    "commas between quotes"
                )
            yield place, row
    except csv.Error as error:
        raise ConfigError(
            f"{at}: {path}, after line {rows.line_num}: {error}: look for a quote that is left open; longer texts can "
            "be in .jsonl"
        ) from None
