"""Task: what to train, written by the user."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.evaluation.means import Mean

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.engine.run import Run
    from lockstep.tasks.callbacks import Callback


class Task(abc.ABC):
    """A model, its data and its loss. Every method runs on every rank; arguments of __init__ come from the config."""

    def begin(self, run: Run, config: RunConfig) -> None:  # noqa: B027
        """Called first, before the data and the model are asked for: all ranks are there, nothing is restored yet."""

    @abc.abstractmethod
    def model(self) -> nn.Module | Mapping[str, nn.Module]:
        """The module to train, or several by name. Made after seeding, so that all ranks make the same."""

    @abc.abstractmethod
    def train_data(self) -> Dataset[Any]:
        """A map-style dataset, or a stream: an IterableDataset, a Hugging Face streaming dataset, lockstep.TarShards,
        or anything else that can be iterated over again. docs/data.md"""

    def loss(self, model: nn.Module, batch: Any) -> Tensor | Mean | tuple[Tensor | Mean, Mapping[str, Any]]:
        """A scalar: the mean over the batch; or lockstep.Mean(total, count), where it is a mean over tokens. With a
        mapping beside it, `loss, {"name": value}`, these values are logged as means over the global batch too. Every
        task has one, except those that define training_step."""
        raise NotImplementedError

    def training_step(self, run: Run, batch: Any) -> Mapping[str, Any] | None:
        """One training step in place of loss, backward and step: for several models, optimizers or losses. Calls
        run.backward and run.step for each optimizer; what is returned is logged."""
        raise NotImplementedError

    def evaluate_step(
        self, model: Any, batch: Any
    ) -> Mapping[str, Tensor | Mean] | tuple[Mapping[str, Tensor | Mean], Mapping[str, Any]]:
        """Everything that is measured of a validation or test batch, from one forward pass: `loss` (as `loss`, or one
        value per example) and metrics by name, as in `metrics`. With `torchmetrics` or `epoch_metrics`, return
        `metrics, outputs`. It replaces `metrics` and `outputs`, which each cost another forward pass."""
        raise NotImplementedError

    def metrics(self, model: Any, batch: Any) -> Mapping[str, Tensor | Mean]:
        """One value per example, shape [B], so that a mean over a whole set counts every example exactly once; or
        lockstep.Mean(total, count), for a mean over something else."""
        return {}

    def outputs(self, model: Any, batch: Any) -> Mapping[str, Any]:
        """What `torchmetrics` and `epoch_metrics` are computed from, by name: tensors or lists with a row for every
        example of the batch, such as {"preds": model(inputs), "target": labels}."""
        raise NotImplementedError

    def torchmetrics(self) -> Mapping[str, Any]:
        """torchmetrics' Metric objects by name, made once; each is updated with those of the `outputs` that its own
        update has an argument for."""
        return {}

    def update_metrics(self, metrics: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        """Updates what `torchmetrics` returned, where the names of the outputs do not say all."""
        for each in metrics.values():
            each.update(**each._filter_kwargs(**outputs))

    def epoch_metrics(self, outputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Metrics of a whole set, such as {"auc": roc_auc_score(...)}: given the outputs of all its examples, each
        exactly once and in the order of the dataset, in host memory. Called on rank 0."""
        return {}

    def val_data(self) -> Dataset[Any] | Mapping[str, Dataset[Any]] | None:
        """A map-style dataset, or several by name: their metrics are then `val/NAME/loss` and so on."""
        return None

    def test_data(self) -> Dataset[Any] | Mapping[str, Dataset[Any]] | None:
        """The same, measured once, at the end."""
        return None

    def order(self, epoch: int, seed: int, count: int) -> Sequence[int]:
        """The order of an epoch's examples, where `data.order` is `own` or not given: the same on all ranks. Every
        index of range(count) once; with `order_repeats = True` in the class, any of them any number of times."""
        raise NotImplementedError

    def weights(self) -> Sequence[float]:
        """For `data.order: weighted`: how often each example of train_data() is drawn, in proportion."""
        raise NotImplementedError

    def lengths(self) -> Sequence[float]:
        """For `data.order: buckets`: how long each example of train_data() is."""
        raise NotImplementedError

    def tokens_per_example(self) -> int | Sequence[int]:
        """How many tokens every example of train_data() has, or each of them: `run.progress.tokens` counts them."""
        raise NotImplementedError

    def cut(self, batch: Any, length: int) -> Any:
        """For `train.sequence_ramp`: a training batch with its sequences cut to a length."""
        raise NotImplementedError

    def optimizer(self, model: Any) -> Any:
        """Used where the config names no optimizer; given several models, one for each, by the same names."""
        return None

    def scheduler(self, optimizer: Any) -> Any:
        """Used where the config names no scheduler; one for each optimizer. Defined as scheduler(self, optimizer,
        total_steps), it is given the number of steps. It is stepped every epoch, or as lockstep.Schedule says."""
        return None

    def shard_rules(self) -> dict[str, Any]:
        """For SPMD: parameter-name pattern -> mesh axis (or None) for every dimension; `strategy.shard` comes first."""
        return {}

    def parallelize(self, model: nn.Module, mesh: Any) -> nn.Module | None:
        """Splits a model over a DeviceMesh, in place of Lockstep: fully_shard, parallelize_module. docs/sharding.md"""
        raise NotImplementedError

    def init_weights(self, module: nn.Module) -> None:
        """Gives values to a module of a model that was made on the meta device; by default `reset_parameters` does."""
        raise NotImplementedError

    def should_stop(self, metrics: dict[str, float]) -> str | None:
        """A reason to end training on all ranks, or None; asked on rank 0, after every validation."""
        return None

    def callbacks(self) -> Sequence[Callback]:
        """What else is to happen between steps; see lockstep.Callback. Those of the config come after them."""
        return ()

    def predict(self, model: Any, batch: Any) -> Mapping[str, Any]:
        """For `lockstep predict`: columns by name, each a tensor or a list with one value per example of the batch."""
        raise NotImplementedError

    def predict_data(self, input: str) -> Dataset[Any]:
        """For `lockstep predict --input FILE`: the map-style dataset that a file stands for."""
        raise NotImplementedError

    def example_inputs(self) -> Any:
        """For `lockstep export`: the model's arguments, a tuple or a mapping by name; by default of the first batch."""
        raise NotImplementedError

    # A task may define collate(examples) to build batches in its own way.


def defines(task: Task | type[Task], name: str) -> bool:
    """Returns whether a task overrides a method of the base class, as an attribute of its own or of its class."""
    cls = task if inspect.isclass(task) else type(task)
    return (cls is not task and name in vars(task)) or getattr(cls, name) is not getattr(Task, name)
