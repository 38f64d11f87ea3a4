"""Epoch metrics: computed once from all examples of a set, whatever the number of ranks.

Every rank keeps the outputs of its examples and updates torchmetrics objects with them, without the examples that a
batch was filled up with. At the end rank 0 receives what the others have, and computes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lockstep.data.batches import MicroBatch
from lockstep.data.permutation import Indices
from lockstep.errors import ConfigError
from lockstep.evaluation.metric_states import computed, plain, require_metrics, require_reducible, states_of
from lockstep.runtime.base import Runtime
from lockstep.runtime.moving import map_tensors, tensors_of

logger = logging.getLogger(__name__)

Part = dict[str, Any]  # what one rank found: indices, outputs, states


class Computes(Protocol):
    """The methods of a task that epoch metrics need."""

    def torchmetrics(self) -> Mapping[str, Any]: ...
    def update_metrics(self, metrics: Mapping[str, Any], outputs: Mapping[str, Any]) -> None: ...
    def epoch_metrics(self, outputs: Mapping[str, Any]) -> Mapping[str, Any]: ...


class EpochMetrics:
    """The epoch metrics of a task."""

    def __init__(self, task: Computes, runtime: Runtime, *, keeps_outputs: bool) -> None:
        """`keeps_outputs`: the task defines epoch_metrics."""
        self._task, self._runtime = task, runtime
        self._keeps_outputs = keeps_outputs
        self._name = type(task).__name__
        # Where every new shape is compiled, leaving rows out is for the host to do, and so is all that follows.
        self._device = torch.device("cpu") if runtime.fixed_shapes else runtime.device
        self.metrics = {
            name: each.to(self._device) for name, each in require_metrics(task.torchmetrics(), self._name).items()
        }

    def begin(self, name: str = "") -> Collected:
        """Begins a new set."""
        for each in self.metrics.values():
            each.reset()
        return Collected(self)

    def real(self, outputs: Any, rows: Indices, length: int) -> Mapping[str, Any]:
        """Returns the outputs of those rows of a micro-batch that count."""
        if self._device != self._runtime.device:
            self._runtime.end_of_program()
            outputs = on_host(outputs, self._runtime)
        outputs = {name: map_tensors(_exact, each) for name, each in outputs.items()}
        return outputs if len(rows) == length else {name: _chosen(each, rows) for name, each in outputs.items()}

    def check(self, outputs: Any, length: int) -> None:
        """Refuses outputs without a row for every example."""
        if not isinstance(outputs, Mapping):
            raise ConfigError(
                f"task: {self._name}.outputs() must return a mapping by name, got a {type(outputs).__name__}"
            )
        for name, each in outputs.items():
            _require_rows(self._name, name, each, length)

    def update(self, outputs: Mapping[str, Any]) -> None:
        if self.metrics:
            self._task.update_metrics(self.metrics, outputs)

    def kept(self, outputs: Mapping[str, Any]) -> Mapping[str, Any]:
        return on_host(outputs, self._runtime) if self._keeps_outputs else {}

    def computed(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Computes all metrics from what the ranks found."""
        found: dict[str, Any] = {}
        for name, metric in self.metrics.items():
            _add(found, name, computed(metric, [part["states"].get(name, []) for part in parts]))
        values = self._task.epoch_metrics(in_order(parts)) if self._keeps_outputs else {}
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"task: {self._name}.epoch_metrics() must return a mapping by name, got a {type(values).__name__}"
            )
        for name, value in values.items():
            _add(found, name, value)
        return found

    def finish(self, values: Mapping[str, Any], alone: bool) -> dict[str, Any]:
        """Called with all values of the set, on every rank or `alone` on rank 0. Returns further ones."""
        return {}

    def tried(self, outputs: Mapping[str, Any]) -> dict[str, Any] | None:
        """Computes the metrics of a few examples, and makes sure that it does not matter which rank has them; None
        where so few have no value."""
        rows = min(map(len, outputs.values()), default=0)

        def update(metrics: Mapping[str, Any], some: Indices) -> None:
            self._task.update_metrics(metrics, {name: _chosen(each, some) for name, each in outputs.items()})

        self.begin()
        if self.metrics:
            require_reducible(self.metrics, update, rows)
        try:
            collected = self.begin()
            collected.add(np.arange(rows, dtype=np.int64), outputs)
            return self.computed([collected.part()])
        except ConfigError:
            raise
        except Exception as error:  # an AUC of examples that all have one label
            logger.info(
                "metrics of whole sets have no value for the first %d examples (%s: %s): their names are looked for in "
                "the first validation", rows, type(error).__name__, error,
            )  # fmt: skip
            return None


class Collected:
    """What one rank has collected of a set so far."""

    def __init__(self, whole: EpochMetrics) -> None:
        self._whole = whole
        self._indices: list[Indices] = []
        self._outputs: list[Mapping[str, Any]] = []

    def take(self, micro: MicroBatch, outputs: Any) -> None:
        """Adds the outputs of a micro-batch, filled up or not."""
        self._whole.check(outputs, len(micro.indices))
        # One row for every example, without those that fill a batch up by repeating its last example.
        rows = np.sort(np.unique(micro.indices, return_index=True)[1])
        if micro.examples > 0:
            self.add(micro.indices[rows], self._whole.real(outputs, rows, len(micro.indices)))

    def add(self, indices: Indices, outputs: Mapping[str, Any]) -> None:
        self._whole.update(outputs)
        self._indices.append(indices)
        self._outputs.append(self._whole.kept(outputs))

    def part(self) -> Part:
        names = self._outputs[0] if self._outputs else ()
        return {
            "indices": torch.from_numpy(np.concatenate([np.empty(0, np.int64), *self._indices])),
            "outputs": {name: _joined([each[name] for each in self._outputs]) for name in names},
            "states": {name: states_of(each) for name, each in self._whole.metrics.items()},
        }


def on_host(value: Any, runtime: Runtime) -> Any:
    """Returns the value with all tensors in host memory, copied at once."""
    tensors = [each for _, each in tensors_of(value)]
    fetched = iter(runtime.to_host(tensors))
    return map_tensors(lambda each: next(fetched), value)


def in_order(parts: Sequence[Part]) -> dict[str, Any]:
    """Returns the outputs of all ranks in the order of the dataset."""
    given = [part for part in parts if len(part["indices"])]
    order = torch.argsort(torch.cat([part["indices"] for part in given])).numpy()
    return {name: _chosen(_joined([part["outputs"][name] for part in given]), order) for name in given[0]["outputs"]}


def epoch_metrics_of(measure: Any) -> EpochMetrics | None:
    """Returns the epoch metrics of a measure function; only a task's has any."""
    found: EpochMetrics | None = getattr(measure, "epoch_metrics", None)
    return found


def require_other_names(values: Mapping[str, Any], means: Mapping[str, Any]) -> None:
    twice = [name for name in values if name in means]
    if twice:
        raise ConfigError(
            f"metric {twice[0]!r} is there twice, as a mean and by torchmetrics() or epoch_metrics(): give one of them "
            "another name"
        )


def _require_rows(task: str, name: str, value: Any, length: int) -> None:
    if not isinstance(value, (Tensor, list)):
        raise ConfigError(
            f"task: {task}.outputs()[{name!r}] is a {type(value).__name__}: return a tensor, or a list, with a row for "
            "every example"
        )
    rows = (value.shape[0] if value.dim() else 0) if isinstance(value, Tensor) else len(value)
    if rows != length:
        shape = f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"{rows} entries"
        raise ConfigError(
            f"task: {task}.outputs()[{name!r}] has {shape} for a batch of {length} examples: return a row for each"
        )


def _exact(tensor: Tensor) -> Tensor:
    """Returns values of half precision in float32, so that sums of many are right."""
    tensor = tensor.detach()
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _chosen(value: Any, rows: Indices) -> Any:
    if isinstance(value, Tensor):
        return value[torch.from_numpy(rows).to(value.device)]
    return [value[row] for row in rows.tolist()]


def _joined(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Tensor):
        if len({each.shape[1:] for each in values}) > 1:
            raise ConfigError(
                f"task: outputs() have rows of different shapes ({list(values[0].shape[1:])} and others), which cannot "
                "be put together: pad them to one length, or return a list with an entry for every example"
            )
        return torch.cat(list(values))
    return [each for value in values for each in value]


def _add(found: dict[str, Any], name: str, value: Any) -> None:
    value = plain(value, name)
    values = {f"{name}/{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
    for key, each in values.items():
        if key in found:
            raise ConfigError(
                f"metric {key!r} is there twice, by torchmetrics() and epoch_metrics(): give one of them another name"
            )
        found[key] = each
