"""`lockstep predict`: writes the predictions of a trained model for every example, in the order of the data.

The data is divided into parts of consecutive examples, and a part into batches, in the same way on any number of ranks,
so that every batch is computed alike. Ranks take parts in turn. Where the forward pass takes all ranks together, those
that have no part left compute a batch that nobody reads.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from lockstep.checkpoint import manifest
from lockstep.config.schema import After, RunConfig
from lockstep.data import workers
from lockstep.data.loader import Collate, batch_fetcher, check_dataset
from lockstep.engine.run import Run
from lockstep.errors import ConfigError
from lockstep.evaluation.means import evaluating
from lockstep.record.writers import write_json
from lockstep.strategy.base import dp_rank_of
from lockstep.tasks.create import create_task
from lockstep.tasks.evaluate import RESULT_FILE, bring_back, data_named, weights_asked_for
from lockstep.tasks.prediction_files import PredictionFiles, columns_of, joined
from lockstep.tasks.task import Task, defines

logger = logging.getLogger(__name__)

_LOG_SECONDS = 10.0


def predict(run: Run, config: RunConfig, after: After) -> dict[str, Any]:
    """Writes the predictions of a checkpoint of a run; continues with the parts of an earlier start."""
    task = create_task(config.task)
    require_predict(task, after)
    data = _data(task, config, after)
    count = check_dataset(data, "the data to predict")
    batch_size = config.validation.batch_size or config.train.batch_size
    chunk = math.ceil(after.chunk / batch_size) * batch_size
    files = PredictionFiles(Path(str(after.out)))
    plan = _plan(config, after, count, chunk, batch_size)
    done = run.agree(lambda: files.begin(plan), "the parts that are there")
    _require_shared(run, files)
    bring_back(run, task, config, after, [data])
    began = time.monotonic()
    todo = [part for part in range(math.ceil(count / chunk)) if part not in set(done)]
    if done and run.is_main:
        logger.info("resuming: %d of %d parts are there", len(done), len(done) + len(todo))
    work = _Work(run, task, data, files, count, chunk, batch_size, config.data.workers)
    with weights_asked_for(run, after):
        left = work.all_of(todo)
    if any(run.gather(left, "the end of the predictions")):
        run._engine.leave_unsaved()
    run.agree(lambda: files.put_together(math.ceil(count / chunk), count), "putting the parts together")
    seconds = time.monotonic() - began
    record = {
        "out": str(files.out),
        "rows": count,
        "step": after.step,
        "parts_before": len(done),
        "world_size": run.world_size,
        "strategy": run.devices.strategy,
        "seconds": round(seconds, 3),
    }
    run.agree(lambda: write_json(run.folder / RESULT_FILE, record), "noting the predictions")
    return {"status": "completed", "metrics": {}}


class _Work:
    """Computes this rank's parts."""

    def __init__(
        self,
        run: Run,
        task: Task,
        data: Dataset[Any],
        files: PredictionFiles,
        count: int,
        chunk: int,
        batch_size: int,
        worker_count: int,
    ) -> None:
        self._run, self._engine, self._task, self._data, self._files = run, run._engine, task, data, files
        self._count, self._chunk, self._batch_size, self._workers = count, chunk, batch_size, worker_count
        self._collate: Collate | None = getattr(task, "collate", None)
        self._fetch = batch_fetcher(data, self._collate)

    def all_of(self, parts: Sequence[int]) -> bool:
        """Computes the parts of this rank. Returns whether it was asked to leave before the last."""
        strategy, group = self._engine.strategy, self._engine.group
        dp_rank = dp_rank_of(strategy, group)
        together = strategy.measures_together
        mine = [parts[at] if at < len(parts) else None for at in range(dp_rank, _rounded(len(parts), strategy.dp_size),
                                                                       strategy.dp_size)]  # fmt: skip
        batches = [indices for part in mine for indices in self._batches_of(part, together)]
        fetched = self._fetched(batches)
        next_line = time.monotonic() + _LOG_SECONDS
        with evaluating(self._run.modules.values()), torch.no_grad(), contextlib.closing(fetched):
            for turn, part in enumerate(mine):
                if self._asked_to_leave(together):
                    return True
                found = [self._computed(indices, next(fetched)) for indices in self._batches_of(part, together)]
                if part is not None and strategy.is_dp_leader:
                    real = [each for each in found if each is not None]
                    self._files.write(part, joined(real))
                if self._run.is_main and time.monotonic() > next_line:
                    next_line = time.monotonic() + _LOG_SECONDS
                    logger.info("%d of %d parts on rank 0", turn + 1, len(mine))
        return False

    def _asked_to_leave(self, together: bool) -> bool:
        asked = self._engine.requests.leave is not None
        return self._run.any(asked, "whether to leave the predictions") if together else asked

    def _batches_of(self, part: int | None, together: bool) -> list[np.ndarray[Any, Any]]:
        """Returns the indices of a part's batches. Where all ranks compute together, each part has as many batches."""
        per_part = self._chunk // self._batch_size
        if part is None:
            return [_nothing() for _ in range(per_part)] if together else []
        begin, end = part * self._chunk, min((part + 1) * self._chunk, self._count)
        found = [
            np.arange(start, min(start + self._batch_size, end), dtype=np.int64)
            for start in range(begin, end, self._batch_size)
        ]
        return found + [_nothing() for _ in range(per_part - len(found))] if together else found

    def _filled(self, indices: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Repeats the last example up to the size that the device wants; it is cut off afterwards."""
        wanted = len(indices) or 1
        if self._engine.runtime.fixed_shapes:
            wanted = self._batch_size
        wanted = math.ceil(wanted / self._engine.strategy.batch_multiple) * self._engine.strategy.batch_multiple
        last = int(indices[-1]) if len(indices) else 0
        return np.concatenate([indices, np.full(wanted - len(indices), last, dtype=np.int64)])

    def _computed(self, indices: np.ndarray[Any, Any], batch: Any) -> dict[str, Any] | None:
        self._engine.group.activity.enter("predicting")
        modules = self._run.modules
        model: Any = self._run.module if len(modules) == 1 else modules
        with self._run.autocast():
            found = self._task.predict(model, self._engine.strategy.move(batch))
        self._engine.runtime.end_of_program()
        return columns_of(found, len(indices), type(self._task).__name__) if len(indices) else None

    def _fetched(self, batches: Sequence[np.ndarray[Any, Any]]) -> Generator[Any, None, None]:
        filled = [self._filled(each) for each in batches]
        if not self._workers or not filled:
            for indices in filled:
                yield self._fetch(indices)
            return
        loader: DataLoader[Any] = DataLoader(
            self._data,
            batch_sampler=[each.tolist() for each in filled],
            collate_fn=self._collate or default_collate,
            num_workers=self._workers,
            multiprocessing_context=workers.context(),
            worker_init_fn=workers.begin,
        )
        yield from loader


def _nothing() -> np.ndarray[Any, Any]:
    return np.empty(0, dtype=np.int64)


def _rounded(count: int, dp_size: int) -> int:
    return math.ceil(count / dp_size) * dp_size


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
        return task.predict_data(after.input)
    found = data_named(task, config, after.data)
    if len(found) > 1:
        raise ConfigError(f"--data {after.data}: stands for several datasets: name one of {', '.join(found)}")
    return next(iter(found.values()))


def _plan(config: RunConfig, after: After, count: int, chunk: int, batch_size: int) -> dict[str, Any]:
    """Returns what existing parts must have been made for."""
    try:
        digest = manifest.read(Path(after.run) / "checkpoints" / manifest.step_name(after.step))["digest"]
    except (manifest.Damaged, manifest.Unreadable):
        digest = None  # reported when it is read, or not on this host
    return {
        "checkpoint": digest,
        "step": after.step,
        "weights": after.weights,
        "data": after.data,
        "input": after.input,
        "examples": count,
        "chunk": chunk,
        "batch_size": batch_size,
        "precision": config.train.precision,
    }


def _require_shared(run: Run, files: PredictionFiles) -> None:
    sees = run.gather(files.folder.is_dir(), "who sees the parts")
    blind = [rank for rank, each in enumerate(sees) if not each]
    if blind:
        raise ConfigError(
            f"--out {files.out}: rank {blind[0]} does not see {files.folder}: name a file on a disk that they share"
        )
