"""A LightningModule and its data as a Task."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lockstep.adapters.lightning.hooks import Hooks, Monitored
from lockstep.adapters.lightning.refused import called, kind_of, overrides, package_of, require_supported
from lockstep.adapters.lightning.sets import Sets
from lockstep.adapters.lightning.trainer import Trainer, nothing, transferred
from lockstep.config.objects import construct, import_object
from lockstep.config.schema import RunConfig
from lockstep.data.order import Sequential, Shuffled
from lockstep.data.source import makes_batches, taken
from lockstep.data.stream_reader import is_stream
from lockstep.engine.models import DEFAULT
from lockstep.engine.run import Run
from lockstep.errors import ConfigError
from lockstep.runtime.base import generator_states, set_generator_states
from lockstep.tasks.callbacks import Callback
from lockstep.tasks.schedules import RunLength
from lockstep.tasks.task import Task

logger = logging.getLogger(__name__)

# For what Lightning sets up the data that it asks for. That of validation is often made for "fit" alone.
_STAGES = {"train_dataloader": ["fit"], "val_dataloader": ["fit", "validate"], "test_dataloader": ["test"],
           "predict_dataloader": ["predict"]}  # fmt: skip
_PLAIN = {"sequential": lambda count, seed: Sequential(count), "shuffled": Shuffled}


class Module(Task):
    """Trains a LightningModule. In a config: `task: {type: lockstep.adapters.lightning:Module, module: my.py:LitModel,
    data: my.py:LitData}`; a mapping with `type` has arguments of the class beside it."""

    def __init__(self, module: Any, data: Any = None, callbacks: Sequence[Any] = ()) -> None:
        self._given = module, data, callbacks
        self._trainer: Trainer | None = None
        self.accumulates = 1  # batches of the DataLoader that a step adds up, as fit(accumulate_grad_batches=...) says
        self._loaders: dict[str, Any] = {}
        self._drawn_from: Any = None  # the states of random numbers at the first setup
        self.asked: Mapping[str, Any] = {}  # arguments of Lightning's Trainer that it shows as they were given
        self.is_given = False  # by fit, which has made a config of ModelCheckpoint
        self.monitor: tuple[str, str] | None = None  # name and mode of the metric that it compares
        self.monitored: Monitored | None = None
        self._predicted = 0  # batches on this rank

    # The beginning

    def begin(self, run: Run, config: RunConfig) -> None:
        if self._trainer is not None:
            self._trainer.config = config
            return
        given, data, callbacks = self._given
        module, datamodule = _made(given, "task.module"), _made(data, "task.data")
        package_of(module)
        own = module.configure_callbacks()
        every = [_made(each, f"task.callbacks[{index}]") for index, each in enumerate(callbacks)]
        every += own if isinstance(own, (list, tuple)) else [own]
        every = [each for each in every if not (self.is_given and kind_of(each) == "ModelCheckpoint")]
        require_supported(module, datamodule, every)
        if overrides(module, "configure_gradient_clipping") and config.train.clip_norm is not None:
            raise ConfigError(
                f"train.clip_norm: {config.train.clip_norm:g}, but {type(module).__name__} clips in "
                "configure_gradient_clipping: remove one of them"
            )
        trainer = self._trainer = Trainer(module, datamodule, called(every), run, config)
        vars(trainer).update(self.asked)
        trainer.loads, trainer.loader = _loads_data(datamodule, module), self.loader
        for each in (datamodule, module):
            if each is not None and overrides(each, "prepare_data"):
                with run.working("prepare_data", run._engine.settings.timeouts.collective):
                    run.agree(each.prepare_data, "prepare_data")
                    place = run._engine.topology.place
                    if place.host and not place.local_rank:  # once on every other host, too
                        each.prepare_data()
                run.barrier("the end of prepare_data")
        self.module_metrics = Sets(trainer)
        if self.monitor is not None:
            self.monitored = Monitored(*self.monitor, trainer, self.module_metrics)

    @property
    def trainer(self) -> Trainer:
        if self._trainer is None:
            raise ConfigError(
                "task: a LightningModule is made by the ranks of a run, so it can neither be planned nor exported as a "
                "program: write a Task with its model and loss; lockstep export --to safetensors has its weights"
            )
        return self._trainer

    # Model and optimizers

    def model(self) -> nn.Module | Mapping[str, nn.Module]:
        """The module; of several optimizers, each but the first has an entry without parameters."""
        trainer = self.trainer
        length: RunLength = vars(self)["_length"]
        if length.steps is not None:
            trainer.estimated_stepping_batches = min(length.steps, self.asked.get("max_steps", length.steps))
        if length.per_epoch is not None:
            trainer.num_training_batches = length.per_epoch * trainer.accumulate_grad_batches
        trainer.lightning_module.configure_model()
        optimizers = trainer.configure()
        strategy = trainer.run._engine.strategy
        manual = not trainer.lightning_module.automatic_optimization
        steps_in_turns = trainer.world_size == 1 or (strategy.has_replicas and not strategy.leaves)
        if manual and (strategy.keeps_slices or not steps_in_turns):
            raise ConfigError(f"strategy: {strategy.name} cannot be used with manual optimization: use ddp")
        if manual and trainer.accumulate_grad_batches > 1:
            raise ConfigError("train.accumulate: with manual optimization, the module has to accumulate: set it to 1")
        trainer.entry = DEFAULT if len(optimizers) == 1 else _entry(0)
        if len(optimizers) == 1:
            return trainer.lightning_module  # type: ignore[no-any-return]
        return {
            _entry(index): trainer.lightning_module if index == 0 else nn.Module() for index in range(len(optimizers))
        }

    def optimizer(self, model: Any) -> Any:
        made = self.trainer.optimizers
        return made[0] if len(made) == 1 else {_entry(index): each for index, each in enumerate(made)}

    def after_setup(self, run: Run) -> None:
        self.trainer.start()

    def after_loop(self, run: Run) -> None:
        self.trainer.hooks.leave_epoch(run)

    def callbacks(self) -> Sequence[Callback]:
        return [] if self._trainer is None else [Hooks(self._trainer, self.module_metrics, self.monitored)]

    # Data

    def loader(self, name: str) -> Any:
        """Returns what `train_dataloader` and so on return, asked once: a loader belongs to its generator."""
        loads = self.trainer.loads
        if name not in self._loaders:
            there = overrides(loads, name)
            for stage in _STAGES[name] if there else ():
                self._set_up(stage)
            self._loaders[name] = getattr(loads, name)() if there else None
        return self._loaders[name]

    def _set_up(self, stage: str) -> None:
        """Calls setup before the first data of a stage. Each stage draws the same random numbers: what one leaves out
        of a random_split, no other has."""
        trainer, runtime = self.trainer, self.trainer.run._engine.runtime
        if stage in trainer.stages or (stage == "validate" and "train_dataloader" in self._loaders):
            return
        now = generator_states(runtime)
        self._drawn_from = self._drawn_from or now
        set_generator_states(runtime, self._drawn_from)
        getattr(trainer.datamodule, "setup", nothing)(stage)
        trainer.call("setup", stage)
        if trainer.stages:
            set_generator_states(runtime, now)
        trainer.stages.append(stage)

    def train_data(self) -> Any:
        loader: Any = self.loader("train_dataloader")
        _require_one(loader, "train_dataloader")
        if self.accumulates > 1 and makes_batches(loader) and not is_stream(loader.dataset):
            return self._several_batches(taken(loader, self.trainer.config.seed))
        return loader

    def _several_batches(self, source: Any) -> Any:
        """Has a step take several batches of a DataLoader, in its order."""
        if source.drop_last and source.order.length % (source.batch_size * self.accumulates):
            raise ConfigError("accumulate_grad_batches: drop_last leaves out part of a step: set it to false")
        if source.collate is not None:
            vars(self)["collate"] = source.collate

        def order(epoch: int, seed: int, count: int) -> Any:
            of: Any = source.order
            if count != of.count:  # of a part of the data
                if of.name not in _PLAIN:
                    raise ConfigError("train.limit, data.split: the DataLoader's sampler knows nothing of parts")
                of = _PLAIN[of.name](count, seed)
            return of.at(epoch, np.arange(of.length))

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
        made = self.loader(name) if overrides(self.trainer.lightning_module, step) else None
        if made is None:
            return None, None
        sets = {str(index): self._examples(each, name) for index, each in enumerate(several(made))}
        return (None if not sets else sets["0"] if len(sets) == 1 else sets), made

    def _examples(self, loader: Any, name: str) -> Any:
        _require_one(loader, name)
        if not makes_batches(loader):
            return loader
        source = taken(loader, self.trainer.config.seed, False)
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
        return self._examples(self.loader(input), input)

    # Steps

    def training_step(self, run: Run, batch: Any) -> Mapping[str, Any]:
        return self.trainer.hooks.train(batch)  # type: ignore[no-any-return]

    def evaluate_step(self, model: Any, batch: Any) -> Any:
        return self.module_metrics.measure(batch), {}

    def predict(self, model: Any, batch: Any) -> Mapping[str, Any]:
        trainer = self.trainer
        trainer.predicting = True
        found = trainer.call_step("predict_step", transferred(trainer, batch), self._predicted)
        self._predicted += 1
        return found if isinstance(found, Mapping) else {"prediction": found}


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


def _require_one(loader: Any, name: str) -> None:
    """Refuses what is no DataLoader of batches, and no dataset either."""
    has_several = isinstance(loader, (list, tuple)) and any(isinstance(each, DataLoader) for each in loader)
    is_data = hasattr(loader, "__getitem__") or isinstance(loader, (DataLoader, Dataset))
    if isinstance(loader, Mapping) or has_several or not is_data:
        raise ConfigError(
            f"task.data: {name} returned a {type(loader).__name__}: return one DataLoader; several become one by a "
            "dataset that has examples of each"
        )
    if isinstance(loader, DataLoader) and not makes_batches(loader):
        raise ConfigError(
            f"task.data: {name} returned a DataLoader with batch_size=None, whose batches cannot be divided over "
            "ranks: use a dataset of examples, and a batch_size"
        )


def _entry(index: int) -> str:
    return "module" if index == 0 else f"optimizer {index + 1}"


def several(loaders: Any) -> list[Any]:
    if isinstance(loaders, Mapping):
        return list(loaders.values())
    return list(loaders) if isinstance(loaders, (list, tuple)) else [] if loaders is None else [loaders]


def _lengths(loaders: Any) -> list[int | float]:
    return [float("inf") if is_stream(getattr(each, "dataset", each)) else len(each) for each in several(loaders)]


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
