"""Measures a task on a batch: its loss, its metrics, and the outputs for metrics of a whole set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.engine.run import Run
from lockstep.engine.stepper import loss_and_count
from lockstep.errors import ConfigError
from lockstep.evaluation.epoch_metrics import EpochMetrics
from lockstep.evaluation.means import BatchMean, Mean
from lockstep.runtime.base import Runtime
from lockstep.tasks.task import Task, defines


class TaskMeasure:
    """Calls the task's loss and metrics with the bare modules, so that a rank may measure alone."""

    def __init__(self, run: Run, task: Task) -> None:
        self._run, self._task = run, task
        self.epoch_metrics: EpochMetrics | None = epoch_metrics_of_task(task, run._engine.runtime)
        self.one_pass = defines(task, "evaluate_step")
        self._outputs: Any = None  # that evaluate_step returned for the current batch
        self.beside_loss: set[str] = set()  # names of values that the loss came with so far

    def __call__(self, batch: Any) -> Mapping[str, Any]:
        if self.one_pass:
            with self._run.autocast():
                returned = self._task.evaluate_step(self._model, batch)
            found, self._outputs = metrics_and_outputs(returned, self._task, self.epoch_metrics is not None)
            return found
        found = self.of_loss(batch)
        with self._run.autocast():
            metrics = self._task.metrics(self._model, batch)
        if not isinstance(metrics, Mapping):
            raise ConfigError(
                f"task: {type(self._task).__name__}.metrics() returned {_described(metrics)}: return metrics by name, "
                'such as {"accuracy": right.float()}'
            )
        twice = [name for name in metrics if name in found and name != "loss"]
        if twice:
            raise ConfigError(
                f"task: {type(self._task).__name__}.metrics() returns {twice[0]!r}, and so does loss(): give one of "
                "them another name"
            )
        return {**found, **metrics}

    def of_loss(self, batch: Any) -> dict[str, Any]:
        """Returns the loss, as training computes it, and the values beside it."""
        if not defines(self._task, "loss"):
            return {}
        with self._run.autocast():
            loss, values = loss_and_values(self._task.loss(self._model, batch), self._task)
            loss_and_count(loss)  # refuses what is no loss
            found = {name: _as_mean(each) for name, each in {"loss": loss, **values}.items()}
        self.beside_loss.update(values)
        return found

    def outputs(self, batch: Any) -> Any:
        """Returns the outputs of the batch that was measured last."""
        if self.one_pass:
            outputs, self._outputs = self._outputs, None
            return outputs
        with self._run.autocast():
            return self._task.outputs(self._model, batch)

    @property
    def _model(self) -> Any:
        return self._run.module if len(self._run.modules) == 1 else self._run.modules


def metrics_and_outputs(returned: Any, task: Task, needs_outputs: bool) -> tuple[dict[str, Any], Any]:
    """Splits what `Task.evaluate_step` returned into loss and metrics by name, and outputs."""
    name = f"task: {type(task).__name__}.evaluate_step()"
    metrics, outputs = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"{name} returned {_described(metrics)}: return metrics by name, such as "
            '{"loss": loss, "accuracy": correct}, or such a mapping and the outputs'
        )
    if needs_outputs and outputs is None:
        raise ConfigError(
            f"{name} returned no outputs, which torchmetrics() and epoch_metrics() are computed from: return `metrics, "
            'outputs`, with outputs such as {"preds": ..., "target": ...}'
        )
    if defines(task, "loss") and "loss" not in metrics:
        raise ConfigError(f"{name} returned {', '.join(metrics) or 'nothing'}, but no 'loss': return it too")
    found = dict(metrics)
    if _is_single(found.get("loss")):
        found["loss"] = _as_mean(found["loss"])
    return found, outputs


def loss_and_values(returned: Any, task: Task) -> tuple[Any, dict[str, Any]]:
    """Splits what `Task.loss` returned into the loss and the values beside it."""
    if not isinstance(returned, tuple):
        return returned, {}
    name = type(task).__name__
    if len(returned) != 2 or not isinstance(returned[1], Mapping):
        kinds = ", ".join(type(each).__name__ for each in returned)
        raise ConfigError(
            f'task: {name}.loss() returned a tuple of {kinds}: return the loss, or `loss, {{"name": value}}` with '
            "values to log beside it"
        )
    loss, values = returned
    if "loss" in values:
        raise ConfigError(f"task: {name}.loss() returned a value {'loss'!r} beside the loss: give it another name")
    for key, each in values.items():
        if not (isinstance(each, (Mean, int, float)) or _is_single(each)):
            raise ConfigError(
                f"task: {name}.loss() returned {key!r} beside the loss, {_described(each)}: give a single number, the "
                "mean over the batch, or a lockstep.Mean"
            )
    return loss, dict(values)


def _as_mean(value: Any) -> Any:
    return value if isinstance(value, Mean) else BatchMean(torch.as_tensor(value).reshape(()))


def _is_single(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _described(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def epoch_metrics_of_task(task: Task, runtime: Runtime) -> EpochMetrics | None:
    """Returns the metrics of whole sets that a task defines, if any."""
    if (of_adapter := getattr(task, "module_metrics", None)) is not None:  # of a module that computes them itself
        found: EpochMetrics = of_adapter
        return found
    wants = [name for name in ("torchmetrics", "epoch_metrics") if defines(task, name)]
    if not wants:
        return None
    if not (defines(task, "outputs") or defines(task, "evaluate_step")):
        raise ConfigError(
            f"task: {type(task).__name__} defines {wants[0]}, but not outputs(self, model, batch), which says what it "
            'is computed from: return tensors with a row for every example, such as {"preds": ..., "target": ...}. Or '
            "have evaluate_step(self, model, batch) return `metrics, outputs`"
        )
    return EpochMetrics(task, runtime, keeps_outputs=defines(task, "epoch_metrics"))
