"""`lockstep evaluate`: loads a trained model and measures it over a dataset, as its training run would have."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from lockstep import run_files
from lockstep.config.plain import did_you_mean, finite
from lockstep.config.schema import After, RunConfig
from lockstep.data.permutation import Part
from lockstep.data.stream_reader import is_stream
from lockstep.engine.run import Run
from lockstep.errors import ConfigError
from lockstep.record.logs import file_only
from lockstep.record.writers import write_json
from lockstep.tasks.changes import SplitLength
from lockstep.tasks.create import create_task
from lockstep.tasks.measure import TaskMeasure
from lockstep.tasks.schedules import RunLength
from lockstep.tasks.setup import set_up
from lockstep.tasks.task import Task
from lockstep.tasks.trainer import check_data, datasets_of, without_loader
from lockstep.tasks.validation import evaluated

logger = logging.getLogger(__name__)

EVALUATIONS_FILE = "evaluations.jsonl"  # in the folder of the run that trained the model


def evaluate(run: Run, config: RunConfig, after: After) -> dict[str, Any]:
    """Measures a checkpoint of a run, and adds a line to the run's `evaluations.jsonl`."""
    task = create_task(config.task)
    task.begin(run, config)
    datasets = data_named(task, config, after.data)
    bring_back(run, task, config, after, datasets.values())
    measure, collate = TaskMeasure(run, task), getattr(task, "collate", None)
    batch_size = config.evaluation_batch_size
    metrics = evaluated(run, measure, datasets, batch_size, config.validation.on, collate)
    if metrics is None:
        run._engine.leave_unsaved()
    examples = {name: len(data) for name, data in datasets.items() if not is_stream(data)}  # type: ignore[arg-type]
    record = {
        "step": after.step,
        "data": list(datasets),
        "examples": examples,
        "metrics": metrics,
        "world_size": run.world_size,
        "strategy": run.devices.strategy,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    run.agree(lambda: _note(Path(after.run), run.folder, record, config.launch.type), "noting the evaluation")
    return {"status": "completed", "metrics": metrics}


def _note(trained: Path, folder: Path, record: dict[str, Any], launch: str) -> None:
    """Writes a line in one call, so that two evaluations at a time do not mix theirs."""
    file = trained / EVALUATIONS_FILE
    line = json.dumps(finite(record)) + "\n"
    try:
        descriptor = run_files.append(file)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        # Another user's run may be readable and not writable: the result is reported all the same.
        record = {**record, "unwritten": f"{file}: not written: {error.strerror}"}
    # Where this command waits for the ranks, it prints the result itself.
    (logger if launch in ("slurm", "ssh") else file_only).info(
        "step %s: %s", record["step"], "  ".join(f"{name} {value:.6g}" for name, value in record["metrics"].items())
    )
    write_json(folder / RESULT_FILE, record)


# Schedulers are made, and never stepped: so long a run refuses none of them.
_ANY_LENGTH = RunLength(10**9, 1000)

RESULT_FILE = "after.json"  # in the folder of the work, for the command that started it


def bring_back(run: Run, task: Task, config: RunConfig, after: After, datasets: Iterable[Dataset[Any]]) -> None:
    """Sets up everything that a training run would, then loads the weights of the checkpoint.

    Parts of one dataset (data.split) become those of the run: what it was trained on is in no other part.
    """
    set_up(run, task, config, _ANY_LENGTH)
    drawing = next((each.split for each in datasets if isinstance(each, Part)), None)
    length = SplitLength(drawing.count if drawing is not None else None)
    run._engine.load_weights(Path(after.run), after.step, {"split length": length})


@contextlib.contextmanager
def weights_asked_for(run: Run, after: After) -> Iterator[None]:
    """Gives the model the weights that were asked for inside the block: as trained, or averaged."""
    if after.weights == "raw":
        yield
        return
    if not run._engine.models.averages_were_saved:
        raise ConfigError(
            f"--weights ema: the checkpoint of step {after.step} in {after.run} has no averages: the run was not "
            "trained with train.ema"
        )
    with run.averaged_weights():
        yield


def data_named(task: Task, config: RunConfig, name: str | None) -> dict[str, Dataset[Any]]:
    """Returns the datasets that a name stands for, by their names.

    `train`, `val` and `test` are as in training; one of several validation sets has its own name, and `NAME` also
    stands for the task's `NAME_data()`. Without a name: test data where there is any, else validation data.
    """
    there = _there(task, config, name)
    if name is None:
        name = next((each for each in ("test", "val") if each in there), None)
        if name is None:
            raise ConfigError(
                "--data: the task has neither test nor validation data: define test_data() or val_data(), set "
                "data.split, or take the training data with --data train"
            )
    found = {
        each: without_loader(task, config, data, f"{each} data") for each, data in _chosen(task, there, name).items()
    }
    for each, data in found.items():
        check_data(data, f"--data {each}")
    return found


def _there(task: Task, config: RunConfig, name: str | None) -> dict[str, Any]:
    """Returns validation and test data, if any; training data only where the others are parts of it. Data that was
    asked for by name needs no other, which may be elsewhere."""
    if config.data.split is not None:
        return dict(datasets_of(task, config))
    makers = {"val": task.val_data, "test": task.test_data}
    if name in makers and (asked := makers[name]()) is not None:
        return {name: asked}
    made = {each: make() for each, make in makers.items()}
    return {each: data for each, data in made.items() if data is not None}


def _chosen(task: Task, there: dict[str, Any], name: str) -> dict[str, Dataset[Any]]:
    if name in there:
        return _by_name(name, there[name])
    single = {key: each for group, data in there.items() for key, each in _by_name(group, data).items() if "/" in key}
    for key, each in single.items():
        if name in (key, key.partition("/")[2]):
            return {key: each}
    own = getattr(task, f"{name}_data", None)
    if callable(own):
        data = own()
        if data is not None:
            return _by_name(name, data)
    valid = ["train", *there, *(key.partition("/")[2] for key in single)]
    raise ConfigError(
        f"--data {name}: the task has no such data, nor a method {name}_data(), {did_you_mean(name, valid)}"
    )


def _by_name(name: str, data: Any) -> dict[str, Dataset[Any]]:
    return {f"{name}/{key}": each for key, each in data.items()} if isinstance(data, Mapping) else {name: data}
