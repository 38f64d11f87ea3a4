"""`lockstep predict`: writes the predictions of a trained model for every example, in the order of the data.

The data is divided into parts of consecutive examples, and a part into batches, in the same way on any number of ranks,
so that every batch is computed alike. Ranks take parts in turn, and write each to a file of its own; rank 0 joins them.
Where the forward pass takes all ranks together, those that have no part left compute a batch that nobody reads.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.checkpoint import manifest
from lockstep.checkpoint.storage import sync_folder
from lockstep.config.objects import import_object, source_of
from lockstep.config.schema import After, RunConfig
from lockstep.data import workers
from lockstep.data.loader import BatchFetcher, check_dataset
from lockstep.distributed.rollcall.report import source_files
from lockstep.engine.run import Run
from lockstep.errors import ConfigError, LockstepError
from lockstep.evaluation.means import evaluating
from lockstep.record.writers import write_json
from lockstep.tasks.create import create_task
from lockstep.tasks.evaluate import RESULT_FILE, bring_back, data_named, weights_asked_for
from lockstep.tasks.task import Task, defines
from lockstep.tasks.trainer import without_loader

logger = logging.getLogger(__name__)

_LOG_SECONDS = 10.0
Indices = np.ndarray[Any, Any]


class PredictionsFailed(LockstepError):
    """Predictions that were made could not be written or put together."""

    exit_code = 5


def predict(run: Run, config: RunConfig, after: After) -> dict[str, Any]:
    """Writes the predictions of a checkpoint of a run; continues with the parts of an earlier start."""
    task = create_task(config.task)
    task.begin(run, config)
    require_predict(task, after)
    data = _data(task, config, after)
    count = check_dataset(data, "the data to predict")
    batch_size = config.validation.batch_size or config.train.batch_size
    per_part = math.ceil(after.chunk / batch_size)
    parts, out = math.ceil(count / (per_part * batch_size)), Path(str(after.out))
    folder = Path(run.agree(lambda: _begin(out, config, after, count), "the folder of the parts"))
    _require_shared(run, folder)
    todo = run.agree(lambda: [part for part in range(parts) if not _file(folder, part).exists()], "the parts to make")
    bring_back(run, task, config, after, [data])
    if len(todo) < parts and run.is_main:
        logger.info("resuming: %d of %d parts are there", parts - len(todo), parts)
    began = time.monotonic()
    work = _Work(run, task, data, count, batch_size, per_part, config.data.workers)
    with weights_asked_for(run, after):
        left = work.write_parts(todo, folder)
    if any(run.gather(left, "the end of the predictions")):
        run._engine.leave_unsaved()
    run.agree(lambda: _join(folder, parts, count, out), "putting the parts together")
    record = {
        "out": str(out),
        "rows": count,
        "step": after.step,
        "parts_before": parts - len(todo),
        "world_size": run.world_size,
        "strategy": run.devices.strategy,
        "seconds": round(time.monotonic() - began, 3),
    }
    run.agree(lambda: write_json(run.folder / RESULT_FILE, record), "noting the predictions")
    return {"status": "completed", "metrics": {}}


def require_predict(task: Task, after: After) -> None:
    """Refuses a task that lacks the methods that `lockstep predict` calls."""
    if not defines(task, "predict"):
        raise ConfigError(
            f"task: {type(task).__name__} does not define predict(self, model, batch): return columns by name with "
            "a value per example"
        )
    if after.input is not None and not defines(task, "predict_data"):
        raise ConfigError(
            f"--input {after.input}: {type(task).__name__} does not define predict_data(self, input), which "
            "makes a dataset of it; or predict the task's own data with --data test"
        )


def _data(task: Task, config: RunConfig, after: After) -> Dataset[Any]:
    if after.input is not None:
        try:
            made = task.predict_data(after.input)
        except FileNotFoundError as error:
            raise ConfigError(f"--input {after.input}: there is no such file or folder ({error})") from None
        except OSError as error:
            name = type(task).__name__
            raise ConfigError(f"--input {after.input}: cannot be read by {name}.predict_data: {error}") from None
        data: Dataset[Any] = without_loader(task, config, made, "predict_data()")
        return data
    found = data_named(task, config, after.data)
    if len(found) > 1:
        raise ConfigError(f"--data {after.data}: stands for several datasets: name one of {', '.join(found)}")
    return next(iter(found.values()))


class _Work:
    """Computes this rank's parts."""

    def __init__(
        self, run: Run, task: Task, data: Dataset[Any], count: int, batch_size: int, per_part: int, worker_count: int
    ) -> None:
        self._run, self._engine, self._task, self._data = run, run._engine, task, data
        self._count, self._batch_size, self._per_part, self._workers = count, batch_size, per_part, worker_count
        self._together = run._engine.strategy.measures_together

    def write_parts(self, parts: Sequence[int], folder: Path) -> bool:
        """Writes the parts of this rank. Returns whether it was asked to leave before the last."""
        strategy = self._engine.strategy
        turns = range(strategy.dp_rank, _rounded(len(parts), strategy.dp_size), strategy.dp_size)
        mine = [parts[turn] if turn < len(parts) else None for turn in turns]
        batches = self._fetched([indices for part in mine for indices in self._batches_of(part)])
        next_line = time.monotonic() + _LOG_SECONDS
        with evaluating(self._run.modules.values()), torch.no_grad(), contextlib.closing(batches):
            for turn, part in enumerate(mine):
                if self._asked_to_leave():
                    return True
                found = [self._computed(indices, next(batches)) for indices in self._batches_of(part)]
                if part is not None and strategy.is_dp_leader:
                    columns = _joined([each for each in found if each is not None])
                    write = _write_parquet if _file(folder, part).suffix == ".parquet" else _write_jsonl
                    _write(_file(folder, part), lambda file: write(file, columns))  # noqa: B023
                if self._run.is_main and time.monotonic() > next_line:
                    next_line = time.monotonic() + _LOG_SECONDS
                    logger.info("%d of %d parts on rank 0", turn + 1, len(mine))
        return False

    def _asked_to_leave(self) -> bool:
        asked = self._engine.requests.leave is not None
        return self._run.any(asked, "whether to leave the predictions") if self._together else asked

    def _batches_of(self, part: int | None) -> list[Indices]:
        """Returns the indices of a part's batches. Where all ranks compute together, each part has as many batches."""
        found = []
        if part is not None:
            first = part * self._per_part * self._batch_size
            starts = (first + batch * self._batch_size for batch in range(self._per_part))
            ranges = ((start, min(start + self._batch_size, self._count)) for start in starts)
            found = [np.arange(start, end, dtype=np.int64) for start, end in ranges if start < end]
        missing = self._per_part - len(found) if self._together else 0
        return found + [np.empty(0, dtype=np.int64)] * missing

    def _filled(self, indices: Indices) -> Indices:
        """Repeats the last example up to the size that the device wants; it is cut off afterwards."""
        wanted = self._batch_size if self._engine.runtime.fixed_shapes else len(indices) or 1
        wanted = _rounded(wanted, self._engine.strategy.batch_multiple)
        last = int(indices[-1]) if len(indices) else 0
        return np.concatenate([indices, np.full(wanted - len(indices), last, dtype=np.int64)])

    def _computed(self, indices: Indices, batch: Any) -> dict[str, Any] | None:
        self._engine.group.activity.enter("predicting")
        modules = self._run.modules
        model: Any = self._run.module if len(modules) == 1 else modules
        with self._run.autocast():
            found = self._task.predict(model, self._engine.strategy.move(batch))
        self._engine.runtime.end_of_program()
        filled = len(self._filled(indices))
        return _columns(found, len(indices), filled, type(self._task).__name__) if len(indices) else None

    def _fetched(self, batches: Sequence[Indices]) -> Generator[Any, None, None]:
        filled = [self._filled(each) for each in batches]
        fetch = BatchFetcher(self._data, getattr(self._task, "collate", None))
        if not self._workers or not filled:
            yield from map(fetch, filled)
            return
        loader = workers.loader(fetch, workers.Loading(self._workers), sampler=[(each,) for each in filled])
        try:
            yield from workers.fetched(loader, type(self._data).__name__)
        finally:
            workers.end(loader, at_once=False)


def _rounded(count: int, multiple: int) -> int:
    return math.ceil(count / multiple) * multiple


def _begin(out: Path, config: RunConfig, after: After, count: int) -> str:
    """Makes the folder of the parts, on rank 0. Its name holds a digest of what they are made of."""
    if out.exists():
        raise ConfigError(f"--out {out}: is there already: name a file that is not, or move it away")
    try:
        checkpoint = manifest.read(Path(after.run) / "checkpoints" / manifest.step_name(after.step))["digest"]
    except (manifest.Damaged, manifest.Unreadable):
        checkpoint = None  # reported when it is read, or not on this host
    made_of = [checkpoint, after.model_dump(mode="json"), config.task.model_dump(mode="json"), count]
    made_of += [config.train.batch_size, config.validation.batch_size, config.train.precision, config.seed]
    code = source_files(import_object(source_of(config.task), "task"))
    made_of += [config.data.model_dump(mode="json"), code.digests]
    if after.input is not None and (given := Path(after.input)).exists():
        made_of += [given.stat().st_size, given.stat().st_mtime_ns]
    digest = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:16]
    folder = out.with_name(f"{out.name}.parts-{digest}")
    for other in set(out.parent.glob(f"{glob.escape(out.name)}.parts-*")) - {folder}:
        logger.info("%s is of other code, data or settings, and not used: delete it", other)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror}: name a writable folder") from None
    return str(folder)


def _file(folder: Path, part: int) -> Path:
    return folder / f"part-{part:08d}{Path(folder.name.rpartition('.parts-')[0]).suffix.lower()}"


def _require_shared(run: Run, folder: Path) -> None:
    sees = run.gather(folder.is_dir(), "who sees the parts")
    if not all(sees):
        raise ConfigError(f"--out: rank {sees.index(False)} does not see {folder}: name a file on a shared disk")


def _columns(found: Any, count: int, filled: int, task: str) -> dict[str, Any]:
    """Returns what Task.predict returned for a batch, on the host and cut from its `filled` size to the examples."""
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
        if isinstance(values, str) or length != filled:
            got = f"{length} values" if length is not None else f"a single {type(values).__name__}"
            raise ConfigError(
                f"task: {task}.predict returned {got} for {name!r} and a batch of {filled} examples: return one value "
                "per example"
            )
        columns[str(name)] = values[:count]
    return columns


def _joined(batches: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
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
    """Writes a file under another name first: it is there whole or not at all."""
    temporary = file.with_name(f".{file.name}.partial-{os.getpid()}")
    try:
        fill(temporary)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.rename(file)
        sync_folder(file.parent)
    except OSError as error:
        raise PredictionsFailed(
            f"{file}: could not be written: {error.strerror or error}: make room or name another file; the same "
            "command continues with the parts that are there"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _write_jsonl(file: Path, columns: Mapping[str, list[Any]]) -> None:
    with file.open("w", encoding="utf-8") as stream:
        for row in zip(*columns.values(), strict=True):
            try:
                stream.write(json.dumps(dict(zip(columns, map(_plain, row), strict=True))) + "\n")
            except TypeError as error:
                raise ConfigError(f"task: predict returned what JSON lines cannot hold: {error}") from None


def _write_parquet(file: Path, columns: Mapping[str, list[Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pa.table({name: _array(pa, values) for name, values in columns.items()})
    except pa.ArrowException as error:
        raise ConfigError(f"task: predict returned what a column of Parquet cannot hold: {error}") from None
    pq.write_table(table, file)


def _array(pa: Any, values: list[Any]) -> Any:
    """Returns a column with the type of number that the tensors had."""
    first = values[0]
    if not hasattr(first, "dtype"):
        return pa.array(values)
    kind = pa.from_numpy_dtype(first.dtype)
    for _ in range(first.ndim):
        kind = pa.list_(kind)
    return pa.array([_plain(each) for each in values], type=kind)


def _join(folder: Path, parts: int, rows: int, out: Path) -> None:
    """Joins all parts, which must have so many rows, and removes them, on rank 0."""
    files = [_file(folder, part) for part in range(parts)]
    join = _join_parquet if files[0].suffix == ".parquet" else _join_jsonl

    def fill(file: Path) -> None:
        try:
            written = join(file, files)
        except ValueError as error:  # of pyarrow
            raise PredictionsFailed(
                f"{folder}: the parts do not fit together: {error}. Delete it, and predict again"
            ) from None
        if written != rows:
            raise PredictionsFailed(f"{folder}: {written} rows for {rows} examples. Delete it, and predict again")

    _write(out, fill)
    shutil.rmtree(folder, ignore_errors=True)


def _join_jsonl(file: Path, parts: Sequence[Path]) -> int:
    rows = 0
    with file.open("wb") as stream:
        for part in parts:
            data = part.read_bytes()
            rows += data.count(b"\n")
            stream.write(data)
    return rows


def _join_parquet(file: Path, parts: Sequence[Path]) -> int:
    import pyarrow.parquet as pq

    rows = 0
    with pq.ParquetWriter(file, pq.read_schema(parts[0])) as writer:
        for part in parts:
            table = pq.read_table(part)
            writer.write_table(table)
            rows += table.num_rows
    return rows
