"""`lockstep evaluate`: a trained model measured over a dataset, as its training run would have measured it."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from lockstep import run_files
from lockstep.config.plain import finite
from lockstep.config.schema import After, RunConfig
from lockstep.data.stream_reader import is_stream
from lockstep.engine.run import Run
from lockstep.record.logs import file_only
from lockstep.record.writers import write_json
from lockstep.tasks.callbacks import evaluated
from lockstep.tasks.measure import TaskMeasure
from lockstep.tasks.task import create_task
from lockstep.tasks.trained import RESULT_FILE, bring_back, data_named

logger = logging.getLogger(__name__)

EVALUATIONS_FILE = "evaluations.jsonl"  # in the folder of the run that trained the model


def evaluate(run: Run, config: RunConfig, after: After) -> dict[str, Any]:
    """Measure a checkpoint of a run, and note what came of it there: a line of `evaluations.jsonl`."""
    task = create_task(config.task)
    datasets = data_named(task, config, after.data)
    bring_back(run, task, config, after, datasets.values())
    measure, collate = TaskMeasure(run, task), getattr(task, "collate", None)
    batch_size = config.validation.batch_size or config.train.batch_size
    metrics = evaluated(run, measure, datasets, batch_size, config.validation.on, collate)
    if metrics is None:
        run.leave_unsaved()
    examples = {name: len(data) for name, data in datasets.items() if not is_stream(data)}  # type: ignore[arg-type]
    told = {
        "step": after.step,
        "data": list(datasets),
        "examples": examples,
        "metrics": metrics,
        "world_size": run.world_size,
        "strategy": run.strategy,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    run.agree(lambda: _note(Path(after.run), run.folder, told, config.launch.type), "noting the evaluation")
    return {"status": "completed", "metrics": metrics}


def _note(trained: Path, folder: Path, told: dict[str, Any], launch: str) -> None:
    """A line of its own in one write, so that two evaluations at a time do not mix theirs."""
    file = trained / EVALUATIONS_FILE
    line = json.dumps(finite(told)) + "\n"
    try:
        descriptor = run_files.append(file)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        # Somebody else's run may be read and not written: what was measured is told all the same.
        told = {**told, "unwritten": f"{file}: not written: {error.strerror}"}
    # Where this command waits for the ranks, it prints the result itself.
    (logger if launch in ("slurm", "ssh") else file_only).info(
        "step %s: %s", told["step"], "  ".join(f"{name} {value:.6g}" for name, value in told["metrics"].items())
    )
    write_json(folder / RESULT_FILE, told)
