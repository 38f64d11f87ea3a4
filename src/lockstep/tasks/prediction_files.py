"""Prediction files: one per part while they are made, joined to one file when all of them are there.

Parquet (by pyarrow) or JSON lines, with one row for every example, in the order of the data. A part is there whole or
not at all, so that a run that resumes makes the missing ones. Its name holds the digest of its content: a damaged part
is made again.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.storage import sync_folder
from lockstep.errors import ConfigError, LockstepError

logger = logging.getLogger(__name__)

PARTS, PLAN_FILE = ".parts", "plan.json"
_PART = re.compile(r"part-(\d{8})-([0-9a-f]{16})\.(parquet|jsonl)")
_DIGEST = "{digest}"  # in a name that the file's digest is filled into

Columns = Mapping[str, Any]


class PredictionsFailed(LockstepError):
    """Predictions that were made could not be written or put together."""

    exit_code = 5


class PredictionFiles:
    """The file that predictions go to, and its parts until it is there."""

    def __init__(self, out: Path) -> None:
        self.out, self.folder = out, out.with_name(out.name + PARTS)
        self._form = form_of(out)

    def begin(self, plan: Mapping[str, Any]) -> list[int]:
        """Makes or continues the folder of the parts, on rank 0. Returns the numbers of the parts that are there."""
        if self.out.exists():
            raise ConfigError(f"--out {self.out}: is there already: name a file that is not, or move it away")
        text = json.dumps(plan, indent=1, sort_keys=True) + "\n"
        known = self.folder / PLAN_FILE
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if known.exists():
                self._require_same(known.read_text(encoding="utf-8"), plan)
            else:
                _write(known, lambda file: file.write_text(text, encoding="utf-8"))
            for leftover in self.folder.glob(".*.partial-*"):
                leftover.unlink()
            for number, part in self._parts().items():
                try:
                    _content(part)
                except PredictionsFailed:
                    logger.warning("%s: the part is damaged; part %d is predicted again", part, number)
                    part.unlink()
            return sorted(self._parts())
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(f"--out {self.out}: cannot be written: {why}: name a writable folder") from None

    def write(self, number: int, columns: Columns) -> None:
        write = _write_parquet if self._form == "parquet" else _write_jsonl
        _write(self.folder / f"part-{number:08d}-{_DIGEST}.{self._form}", lambda file: write(file, columns))

    def put_together(self, count: int, rows: int) -> None:
        """Joins all parts, which must have so many rows, and removes them, on rank 0."""
        there = self._parts()
        missing = [number for number in range(count) if number not in there]
        if missing:
            raise PredictionsFailed(
                f"{self.folder}: {len(missing)} of {count} parts are not there, the first is part {missing[0]}: --out "
                "has to be on a disk that the hosts of all ranks share"
            )
        join = _join_parquet if self._form == "parquet" else _join_jsonl

        def fill(file: Path) -> None:
            written = join(file, [there[number] for number in range(count)])
            if written != rows:
                raise PredictionsFailed(
                    f"{self.folder}: the parts have {written} rows for {rows} examples. Delete that folder and predict "
                    "again"
                )

        _write(self.out, fill)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _parts(self) -> dict[int, Path]:
        return {int(found[1]): each for each in self.folder.iterdir() if (found := _PART.fullmatch(each.name))}

    def _require_same(self, text: str, plan: Mapping[str, Any]) -> None:
        try:
            before = dict(json.loads(text))
        except ValueError:
            before = {}
        differing = [key for key in {**before, **plan} if before.get(key) != plan.get(key)]
        if differing:
            key = differing[0]
            raise ConfigError(
                f"--out {self.out}: {self.folder} holds parts of other predictions ({key}: {before.get(key)!r} there, "
                f"{plan.get(key)!r} now): repeat what was asked for then, or delete that folder, or name another "
                "file"
            )


def form_of(out: Path) -> str:
    """Returns `parquet` or `jsonl`, by the name of the file; requires pyarrow for Parquet."""
    form = out.suffix.lower().lstrip(".")
    if form not in ("parquet", "jsonl"):
        raise ConfigError(f"--out {out}: must end with .parquet or .jsonl")
    if form == "parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError:
            raise ConfigError(
                f"--out {out}: Parquet needs pyarrow: pip install 'lockstep-train[predict]'; or name a .jsonl file"
            ) from None
    return form


def columns_of(found: Any, count: int, task: str) -> dict[str, Any]:
    """Returns what Task.predict returned for a batch, on the host and cut to the examples that count."""
    if not isinstance(found, Mapping) or not found:
        raise ConfigError(
            f"task: {task}.predict returned a {type(found).__name__}: return columns by name, each with a value per "
            'example: {"label": model(batch).argmax(1)}'
        )
    columns: dict[str, Any] = {}
    for name, values in found.items():
        if isinstance(values, Tensor):
            values = values.detach()
            values = values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
            values = values.cpu().numpy()
        length = len(values) if hasattr(values, "__len__") and getattr(values, "shape", (1,)) != () else None
        if isinstance(values, str) or length is None or length < count:
            got = f"{length} values" if length is not None else f"a single {type(values).__name__}"
            raise ConfigError(
                f"task: {task}.predict returned {got} for {name!r} and a batch of {count} examples: return one value "
                "per example"
            )
        columns[str(name)] = values[:count]
    return columns


def joined(batches: Sequence[Columns]) -> dict[str, list[Any]]:
    """Returns the columns of a part from those of its batches."""
    first = batches[0]
    for each in batches[1:]:
        if set(each) != set(first):
            raise ConfigError(
                f"task: predict returned the columns {', '.join(first)} for one batch, {', '.join(each)} for another: "
                "return the same for each"
            )
    return {name: [value for each in batches for value in each[name]] for name in first}


def _write(file: Path, fill: Callable[[Path], Any]) -> None:
    temporary = file.with_name(f".{file.name}.partial-{os.getpid()}")
    try:
        fill(temporary)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
            digest = hashlib.file_digest(written, "sha256").hexdigest()[:16] if _DIGEST in file.name else ""
        temporary.rename(file.with_name(file.name.replace(_DIGEST, digest)))
        sync_folder(file.parent)
    except OSError as error:
        raise PredictionsFailed(
            f"{file}: could not be written: {error.strerror or error}: make room or name another file; the same "
            "command continues with the parts that are there"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


def _content(part: Path) -> bytes:
    """Returns what a part holds, after comparing it with the digest in its name."""
    data = part.read_bytes()
    if hashlib.sha256(data).hexdigest()[:16] not in part.name:
        raise PredictionsFailed(
            f"{part}: the part is damaged: its content does not match the digest in its name. Nothing was written to "
            "--out: run the same command again, which makes this part again and keeps the others"
        )
    return data


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _write_jsonl(file: Path, columns: Columns) -> None:
    names = list(columns)
    with file.open("w", encoding="utf-8") as stream:
        for row in zip(*columns.values(), strict=True):
            values = {name: _plain(value) for name, value in zip(names, row, strict=True)}
            try:
                stream.write(json.dumps(values) + "\n")
            except TypeError as error:
                raise ConfigError(f"task: predict returned what JSON lines cannot hold: {error}") from None


def _join_jsonl(file: Path, parts: Sequence[Path]) -> int:
    rows = 0
    with file.open("wb") as stream:
        for part in parts:
            data = _content(part)
            rows += data.count(b"\n")
            stream.write(data)
    return rows


def _write_parquet(file: Path, columns: Columns) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        arrays = {name: _array(pa, values) for name, values in columns.items()}
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise ConfigError(f"task: predict returned what a column of Parquet cannot hold: {error}") from None
    pq.write_table(pa.table(arrays), file)


def _array(pa: Any, values: list[Any]) -> Any:
    """A column with the type of number that the tensors had."""
    first = values[0]
    dtype = getattr(first, "dtype", None)
    if dtype is None:
        return pa.array(values)
    kind = pa.from_numpy_dtype(dtype)
    for _ in range(getattr(first, "ndim", 0)):
        kind = pa.list_(kind)
    return pa.array([_plain(each) for each in values], type=kind)


def _join_parquet(file: Path, parts: Sequence[Path]) -> int:
    import pyarrow.parquet as pq

    schema = pq.read_schema(io.BytesIO(_content(parts[0])))
    rows = 0
    with pq.ParquetWriter(file, schema) as writer:
        for part in parts:
            table = pq.read_table(io.BytesIO(_content(part)))
            if table.schema != schema:
                raise PredictionsFailed(
                    f"{part}: its columns are {_described(table.schema)}, those of {parts[0].name} are "
                    f"{_described(schema)}: have Task.predict return the same types for every batch, delete the folder "
                    "of the parts and begin anew"
                )
            writer.write_table(table)
            rows += table.num_rows
    return rows


def _described(schema: Any) -> str:
    return ", ".join(f"{each.name} {each.type}" for each in schema)
