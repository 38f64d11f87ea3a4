"""A LightningModule and its data as a Task."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lockstep.adapters.lightning.refused import called, kind_of, overrides, package_of, require_supported
from lockstep.adapters.lightning.sets import Sets
from lockstep.adapters.lightning.trainer import Trainer, alike
from lockstep.config.objects import construct, import_object
from lockstep.config.schema import RunConfig
from lockstep.data.source import makes_batches, taken
from lockstep.data.stream_reader import is_stream
from lockstep.engine.models import DEFAULT
from lockstep.engine.run import Run
from lockstep.errors import ConfigError
from lockstep.evaluation.means import Mean
from lockstep.tasks.callbacks import Callback
from lockstep.tasks.schedules import run_length
from lockstep.tasks.task import Task

logger = logging.getLogger(__name__)


class Module(Task):
    """Trains a LightningModule. In a config: `task: {type: lockstep.adapters.lightning:Module, module: my.py:LitModel,
    data: my.py:LitData}`; a mapping with `type` has arguments of the class beside it."""

    def __init__(self, module: Any, data: Any = None, callbacks: Sequence[Any] = ()) -> None:
        self._given = module, data, callbacks
        self._trainer: Trainer | None = None
        self.accumulates = 1  # batches of the DataLoader that a step adds up, as fit(accumulate_grad_batches=...) says
        self.clips: tuple[float | None, str | None] = None, None  # by value, or in configure_gradient_clipping
        self._loaders: dict[str, Any] = {}
        self.is_given = False  # by fit, which has made a config of ModelCheckpoint

    # The beginning

    def begin(self, run: Run, config: RunConfig) -> None:
        if self._trainer is not None:
            self._trainer._config = config
            return
        given, data, callbacks = self._given
        module, datamodule = _made(given, "task.module"), _made(data, "task.data")
        package_of(module)
        own = module.configure_callbacks()
        self._callbacks = [_made(each, f"task.callbacks[{index}]") for index, each in enumerate(callbacks)]
        self._callbacks += own if isinstance(own, (list, tuple)) else [own]
        self._callbacks = [
            each for each in self._callbacks if not (self.is_given and kind_of(each) == "ModelCheckpoint")
        ]
        require_supported(module, datamodule, self._callbacks)
        if overrides(module, "configure_gradient_clipping") and config.train.clip_norm is not None:
            raise ConfigError(
                f"train.clip_norm: {config.train.clip_norm:g}, but {type(module).__name__} clips in "
                "configure_gradient_clipping: remove one of them"
            )
        trainer = self._trainer = Trainer(module, datamodule, called(self._callbacks), run, config)
        if self.clips[0] is not None:
            trainer.gradient_clip_val, trainer.gradient_clip_algorithm = self.clips
        self.loads = _loads_data(datamodule, module)
        for each in (datamodule, module):
            if each is not None and overrides(each, "prepare_data"):
                run.agree(each.prepare_data, "prepare_data")
                place = run._engine.topology.place
                if place.host and not place.local_rank:  # once on every other host, too
                    each.prepare_data()
                run.barrier("the end of prepare_data")
        if datamodule is not None:
            datamodule.setup("fit")
        trainer.call("setup", "fit")
        self.whole_sets = Sets(trainer)

    @property
    def trainer(self) -> Trainer:
        if self._trainer is None:
            raise RuntimeError("a LightningModule is made on the ranks")
        return self._trainer

    # Model and optimizers

    def model(self) -> nn.Module | Mapping[str, nn.Module]:
        """The module; of several optimizers, each but the first has an entry without parameters."""
        trainer = self.trainer
        if trainer.train_dataloader is None:  # of which optimizers may want the length
            self.train_data()
        trainer.lightning_module.configure_model()
        optimizers = trainer.configure()
        strategy = trainer.run._engine.strategy
        manual = not trainer.lightning_module.automatic_optimization
        if manual and not (trainer.world_size == 1 or (strategy.has_replicas and not strategy.leaves)):
            raise ConfigError(f"strategy: {strategy.name} cannot be used with manual optimization: use ddp")
        if manual and trainer.accumulate_grad_batches > 1:
            raise ConfigError("train.accumulate: with manual optimization, the module has to accumulate: set it to 1")
        trainer._entry = DEFAULT if len(optimizers) == 1 else _entry(0)
        if len(optimizers) == 1:
            return trainer.lightning_module  # type: ignore[no-any-return]
        return {
            _entry(index): trainer.lightning_module if index == 0 else nn.Module() for index in range(len(optimizers))
        }

    def optimizer(self, model: Any) -> Any:
        made = self.trainer.optimizers
        return made[0] if len(made) == 1 else {_entry(index): each for index, each in enumerate(made)}

    def callbacks(self) -> Sequence[Callback]:
        return [] if self._trainer is None else [Hooks(self, self._trainer)]

    # Data

    def loader(self, name: str) -> Any:
        """Returns what `train_dataloader` and so on return, asked once: a loader belongs to its generator."""
        if name not in self._loaders:
            self._loaders[name] = getattr(self.loads, name)() if overrides(self.loads, name) else None
        return self._loaders[name]

    def train_data(self) -> Any:
        trainer = self.trainer
        loader = trainer.train_dataloader = self.loader("train_dataloader")
        if not isinstance(loader, (DataLoader, Dataset)):
            raise ConfigError(
                f"task.data: train_dataloader returned a {type(loader).__name__}: return one DataLoader; several "
                "become one by a dataset that has examples of each"
            )
        config, length = trainer._config, None
        if not is_stream(getattr(loader, "dataset", loader)):
            source = taken(loader, config.seed) if makes_batches(loader) else None
            length = len(loader) if source is None else source.order.length  # type: ignore[union-attr,arg-type]
            if source is not None and self.accumulates > 1:
                loader = self._several_batches(source)
        whole = run_length(config, length)
        if whole.steps_per_epoch is not None:
            trainer.num_training_batches = whole.steps_per_epoch * config.train.accumulate
        trainer.estimated_stepping_batches = float("inf") if whole.steps is None else whole.steps
        return loader

    def _several_batches(self, source: Any) -> Any:
        """Has a step take several batches of a DataLoader, in its order."""
        if source.drop_last and source.order.length % (source.batch_size * self.accumulates):
            raise ConfigError("accumulate_grad_batches: drop_last leaves out part of a step: set it to false")
        if source.collate is not None:
            vars(self)["collate"] = source.collate

        def order(epoch: int, seed: int, count: int) -> Any:
            import numpy as np

            return source.order.at(epoch, np.arange(source.order.length))

        vars(self).update(order=order, order_repeats=True)
        return source.dataset

    def val_data(self) -> Any:
        found, self.trainer.val_dataloaders = self._measured("val_dataloader", "validation_step")
        self.trainer.num_val_batches = _lengths(self.trainer.val_dataloaders)
        return found

    def test_data(self) -> Any:
        found, loaders = self._measured("test_dataloader", "test_step")
        self.trainer.num_test_batches = _lengths(loaders)
        return found

    def _measured(self, name: str, step: str) -> tuple[Any, Any]:
        """Returns the data of a set, or of several by number, and the loaders that it comes from."""
        made = self.loader(name)
        if made is None or not overrides(self.trainer.lightning_module, step):
            return None, None
        loaders = (
            list(made.values())
            if isinstance(made, Mapping)
            else list(made)
            if isinstance(made, (list, tuple))
            else [made]
        )
        if not loaders:
            return None, None
        sets = {str(index): self._examples(each) for index, each in enumerate(loaders)}
        return (sets["0"] if len(sets) == 1 else sets), made

    def _examples(self, loader: Any) -> Any:
        if not makes_batches(loader):
            return loader
        source = taken(loader, self.trainer._config.seed, False)
        if is_stream(source.dataset):
            return loader
        mine, trained = source.collate, vars(self).get("collate", vars(self).get("_collate_of_loader"))
        if mine == trained:
            return source.examples
        vars(self)["collate"] = _Collate(trained)
        return _Examples(source.examples, mine)

    def predict_data(self, input: str) -> Any:
        if input != "predict_dataloader":
            raise ConfigError(f"--input {input}: the data of a LightningModule is --input predict_dataloader")
        return self._examples(self.loader("predict_dataloader"))

    # Steps

    def training_step(self, run: Run, batch: Any) -> Mapping[str, Any]:
        return self.trainer.hooks.train(batch)  # type: ignore[no-any-return]

    def evaluate_step(self, model: Any, batch: Any) -> Any:
        return self.whole_sets.measure(self._transferred(batch)), {}

    def predict(self, model: Any, batch: Any) -> Mapping[str, Any]:
        trainer = self.trainer
        trainer.predicting = True
        found = trainer.call_step("predict_step", self._transferred(batch), 0)
        return found if isinstance(found, Mapping) else {"prediction": found}

    def _transferred(self, batch: Any) -> Any:
        return transferred(self.trainer, batch)


class Hooks(Callback):
    """Calls the hooks of training, and computes a batch."""

    def __init__(self, task: Module, trainer: Trainer) -> None:
        self._task, self._trainer = task, trainer
        self._micro = 0  # micro-batches of the current step so far
        self._epoch_of: set[str] = set()  # names that were logged in training_step with on_epoch
        self._by_step: set[str] = set()
        trainer.hooks = self

    def before_training(self, run: Run) -> None:
        trainer = self._trainer
        trainer.start()
        trainer.call("on_train_start")

    def train(self, batch: Any) -> dict[str, Any]:
        """Computes a micro-batch, and steps where it completes the batch. Returns what was logged."""
        trainer, run = self._trainer, self._trainer.run
        batch_idx = run.progress.batch * trainer.accumulate_grad_batches + self._micro
        if batch_idx == 0:
            trainer.call("on_train_epoch_start")
        batch, complete = transferred(trainer, batch), run.completes_batch
        if trainer.call("on_train_batch_start", batch, batch_idx) == -1:
            raise ConfigError("on_train_batch_start returned -1, to skip the rest of an epoch: that is not supported")
        automatic = trainer.lightning_module.automatic_optimization
        out = self._automatic(batch, batch_idx, complete) if automatic else self._manual(batch, batch_idx)
        self._micro = 0 if complete else self._micro + 1
        if complete:
            trainer.step_schedulers("step", False, batch_idx)
        shown = {**out, "loss": out["loss"] / trainer.accumulate_grad_batches} if automatic else out  # as in Lightning
        trainer.call("on_train_batch_end", shown, batch, batch_idx)
        return self._logged(out if automatic else {})

    def _manual(self, batch: Any, batch_idx: int) -> Any:
        return _detached(self._trainer.call_step("training_step", batch, batch_idx))

    def _automatic(self, batch: Any, batch_idx: int, complete: bool) -> Any:
        trainer, optimizer = self._trainer, self._trainer.optimizers[0]
        module, found = trainer.lightning_module, list[Any]()

        def closure() -> Tensor:
            returned = trainer.call_step("training_step", batch, batch_idx)
            loss = returned.get("loss") if isinstance(returned, Mapping) else returned
            if not isinstance(loss, Tensor):
                raise ConfigError(
                    f"{type(module).__name__}.training_step returned {'None' if returned is None else repr(returned)}: "
                    "return the loss, or a mapping with 'loss'; no batch can be skipped"
                )
            if not self._micro:
                trainer.call("on_before_zero_grad", optimizer)
                if overrides(module, "optimizer_zero_grad"):
                    module.optimizer_zero_grad(trainer.current_epoch, batch_idx, optimizer)
            trainer.strategy.backward(loss, optimizer)
            found.append(_detached(returned))
            return loss.detach()

        if complete:
            with trainer.within("optimizer_step"):
                wrapped = trainer.strategy._lightning_optimizers[0]
                module.optimizer_step(trainer.current_epoch, batch_idx, wrapped, closure)
        else:
            trainer.strategy.optimizer_step(optimizer, closure)
        if not found:
            raise ConfigError(
                f"{type(module).__name__}.optimizer_step did not call the closure, which computes the loss"
            )
        return found[0] if isinstance(found[0], Mapping) else {"loss": found[0]}

    def _logged(self, out: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {"loss": out["loss"]} if "loss" in out else {}
        trainer, whole = self._trainer, dict[str, str]()
        for name, logged in trainer.take().items():
            trainer.note(name, logged.value)
            (self._epoch_of if logged.on_epoch else self._by_step).add(name)
            short = short_name(name, "train")
            if whole.setdefault(short, name) != name:
                raise ConfigError(f"self.log: {name!r} and {whole[short]!r} are both train/{short}: rename one of them")
            size = logged.batch_size
            found[short] = logged.value if size is None else Mean(logged.value.double() * size, float(size))
        return found

    def after_validation(self, run: Run, metrics: dict[str, Any]) -> str | None:
        trainer = self._trainer
        for name in self._epoch_of:
            kind, _, last = f"train/{short_name(name, 'train')}".rpartition("/")
            value = metrics.get(f"{kind}/epoch_{last}")
            if value is not None:
                for each in (name, f"{name}_epoch"):
                    trainer.note(each, value)
        for name, value in self._task.whole_sets.names_of(metrics).items():
            trainer.note(name, value)
        if any(each.startswith("val/") for each in metrics):
            trainer.validating = True
            trainer.call("on_validation_end")
            trainer.validating = False
        return self._stop()

    def after_epoch(self, run: Run) -> str | None:
        trainer = self._trainer
        for name in sorted(self._by_step - self._epoch_of):  # of the last batch: the same on all ranks
            given = run.gather((float(trainer.callback_metrics[name]), True), f"the logged {name}")
            if run.world_size > 1:
                trainer.note(name, alike(name, given))
        last = int(trainer.num_training_batches) - 1 if trainer.num_training_batches != float("inf") else 0
        trainer.step_schedulers("epoch", False, last)
        trainer.call("on_train_epoch_end")
        logged = {name: trainer.agreed(name, each) for name, each in trainer.take().items()}
        for name, value in logged.items():
            trainer.note(name, value)
        if logged:
            run.log(**{f"train/{short_name(name, 'train')}": value for name, value in logged.items()})
        trainer.step_schedulers("epoch", True, last)
        return self._stop()

    def _stop(self) -> str | None:
        return "self.trainer.should_stop was set" if self._trainer.should_stop else None

    def after_step(self, run: Run) -> None:
        if self._trainer.should_stop:
            run.stop("self.trainer.should_stop was set")

    def after_training(self, run: Run, metrics: dict[str, Any]) -> None:
        for hook in ("on_train_end", "on_fit_end"):
            self._trainer.call(hook)
        if self._trainer.datamodule is not None:
            self._trainer.datamodule.teardown("fit")
        self._trainer.call("teardown", "fit")

    def after_exception(self, run: Run, error: Exception) -> None:
        self._trainer.call("on_exception", error)

    def state_dict(self) -> dict[str, Any]:
        names = {"epoch_of": sorted(self._epoch_of), "by_step": sorted(self._by_step)}
        return {**self._trainer.state_dict(), "names": names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trainer.load_state_dict(state)
        self._epoch_of, self._by_step = set(state["names"]["epoch_of"]), set(state["names"]["by_step"])


def short_name(name: str, kind: str) -> str:
    """Returns what a logged value is called in Lockstep, after the kind of data: `val_loss` is val/loss."""
    starts = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test",)}[kind]
    found = next((name[len(each) + 1 :] for each in starts if name.startswith((f"{each}_", f"{each}/"))), name)
    return found or name


def transferred(trainer: Trainer, batch: Any) -> Any:
    """Calls on_after_batch_transfer of the module and of its data."""
    for each in (trainer.lightning_module, trainer.datamodule):
        if each is not None and overrides(each, "on_after_batch_transfer"):
            with trainer.within("on_after_batch_transfer"):
                batch = each.on_after_batch_transfer(batch, 0)
    return batch


def _made(given: Any, path: str) -> Any:
    """Makes an object that a config names; an object is used as it is."""
    if isinstance(given, str):
        given = {"type": given}
    if not isinstance(given, Mapping):
        return given
    if "type" not in given:
        raise ConfigError(f"{path}: has no type: name the class, such as {{type: my.py:LitModel}}")
    arguments = copy.deepcopy(dict(given))
    return construct(import_object(arguments.pop("type"), path), arguments, path)


def _loads_data(datamodule: Any, module: Any) -> Any:
    """Returns what has train_dataloader: the data, or the module itself."""
    found = module if datamodule is None else datamodule
    if not overrides(found, "train_dataloader"):
        raise ConfigError(
            f"task.data: {type(found).__name__} does not define train_dataloader: name a LightningDataModule"
        )
    return found


def _entry(index: int) -> str:
    return "module" if index == 0 else f"optimizer {index + 1}"


def _lengths(loaders: Any) -> list[int]:
    several = loaders if isinstance(loaders, (list, tuple)) else [] if loaders is None else [loaders]
    return [len(each) for each in several if hasattr(each, "__len__")]


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    return {name: _detached(each) for name, each in value.items()} if isinstance(value, Mapping) else value


class _Examples(Dataset[Any]):
    """Examples that bring their collate_fn, where it is not that of the training data."""

    def __init__(self, dataset: Any, collate: Any) -> None:
        self._dataset, self._collate = dataset, collate

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return _Example(self._dataset[index], self._collate)


class _Example:
    def __init__(self, example: Any, collate: Any) -> None:
        self.example, self.collate = example, collate


class _Collate:
    def __init__(self, otherwise: Any) -> None:
        self._otherwise = otherwise

    def __call__(self, examples: list[Any]) -> Any:
        collate = self._otherwise
        if isinstance(examples[0], _Example):
            collate, examples = examples[0].collate, [each.example for each in examples]
        return (collate or torch.utils.data.default_collate)(examples)
