"""What of Lightning is not supported: refused by name, before the first step."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from typing import Any

from lockstep.errors import ConfigError

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")

# Methods of a LightningModule that would change what Lockstep does itself, and what to do in their place.
_METHODS = {
    "backward": "Lockstep weighs the loss for the global batch: train.precision scales it",
    "configure_sharded_model": "set strategy: fsdp, and make layers in configure_model",
    "transfer_batch_to_device": "Lockstep moves batches: change them in on_after_batch_transfer",
    "on_before_batch_transfer": "do it in the dataset, the collate_fn or on_after_batch_transfer",
    "on_validation_model_eval": "Lockstep puts the module in evaluation mode",
    "on_validation_model_train": "Lockstep puts every submodule back in its mode",
    "on_test_model_eval": "Lockstep puts the module in evaluation mode",
    "on_test_model_train": "Lockstep puts every submodule back in its mode",
}
# Callbacks of Lightning that are called as under its Trainer; those below are replaced by parts of Lockstep.
_CALLED = {"EarlyStopping", "LambdaCallback"}
_SHOWN_ANYWAY = {
    "ProgressBar", "TQDMProgressBar", "RichProgressBar", "ModelSummary", "RichModelSummary", "LearningRateMonitor",
    "DeviceStatsMonitor", "ThroughputMonitor",
}  # fmt: skip
_INSTEAD = {
    "GradientAccumulationScheduler": "set train.accumulate",
    "StochasticWeightAveraging": "set train.ema",
    "WeightAveraging": "set train.ema",
    "LearningRateFinder": "set the learning rate",
    "BatchSizeFinder": "`lockstep plan` computes how large a batch may be",
    "OnExceptionCheckpoint": "a run that fails resumes from its newest checkpoint",
    "BasePredictionWriter": "`lockstep predict` writes predictions",
    "ModelCheckpoint": "set checkpoint in the config: checkpoint: {keep: {best: 1, metric: val/loss}}",
    "EMAWeightAveraging": "set train.ema, whose averages are measured as val/ema/...",
}


def package_of(module: Any) -> str:
    """Returns the package that a module or a callback derives from: lightning.pytorch or pytorch_lightning."""
    names = [f"{cls.__module__}." for cls in type(module).__mro__]
    for package in _PACKAGES:
        if any(name.startswith(f"{package}.") for name in names):
            return package
    raise ConfigError(
        f"task.module: {type(module).__name__} is no LightningModule: derive it from lightning.LightningModule"
    )


def of_lightning(package: str, name: str) -> Any:
    """Returns a module of Lightning by its name in the package."""
    return importlib.import_module(f"{package}.{name}")


def overrides(module: Any, name: str) -> bool:
    """Returns whether a class overrides a method of Lightning's base class."""
    return any(name in vars(cls) for cls in type(module).__mro__ if not cls.__module__.startswith(_PACKAGES))


def require_supported(module: Any, datamodule: Any, callbacks: Iterable[Any]) -> None:
    """Refuses a module whose methods, or callbacks that, Lockstep cannot call as Lightning does."""
    name = type(module).__name__
    for each in (module, datamodule):
        for method, instead in _METHODS.items():
            if each is not None and overrides(each, method):
                raise ConfigError(f"task.module: {type(each).__name__}.{method} is not supported: {instead}")
    if not overrides(module, "training_step"):
        raise ConfigError(f"task.module: {name} does not define training_step")
    if not overrides(module, "configure_optimizers"):
        raise ConfigError(f"task.module: {name} does not define configure_optimizers: there is nothing to train with")
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise ConfigError(
            f"task.module: {name}.training_step(dataloader_iter) fetches batches itself, which cannot be resumed: "
            "use training_step(batch, batch_idx)"
        )
    for callback in callbacks:
        if (kind := kind_of(callback)) in _INSTEAD or kind not in {None, *_CALLED, *_SHOWN_ANYWAY}:
            instead = _INSTEAD.get(str(kind), f"called are {', '.join(sorted(_CALLED))} and your own")
            raise ConfigError(f"callbacks: {type(callback).__name__} is not supported: {instead}")


def called(callbacks: Iterable[Any]) -> list[Any]:
    """Returns the callbacks whose hooks are called; Lockstep shows rates, progress and speed itself."""
    return [each for each in callbacks if kind_of(each) not in _SHOWN_ANYWAY]


def kind_of(callback: Any) -> str | None:
    """Returns the name of Lightning's class that a callback is or derives from; None for the user's own."""
    found = [cls.__name__ for cls in type(callback).__mro__ if cls.__module__.startswith(_PACKAGES)]
    return next((each for each in found if each not in ("Callback", "Checkpoint")), None)


class NotSupported(ConfigError, AttributeError):
    """A member of Lightning's Trainer that Lockstep does not have."""


class Added(dict[str, Any]):
    """What on_save_checkpoint adds to a checkpoint."""

    _SAVED_ANYWAY = ("state_dict", "optimizer_states", "lr_schedulers", "callbacks", "loops", "hyper_parameters")

    def __missing__(self, name: str) -> Any:
        if name not in self._SAVED_ANYWAY:
            raise KeyError(name)
        raise ConfigError(
            f"on_save_checkpoint, on_load_checkpoint: checkpoint[{name!r}]: Lockstep saves weights, optimizers and "
            "callbacks itself: keep your own values under other names"
        )

    def check(self) -> None:
        for name in filter(self.__contains__, self._SAVED_ANYWAY):
            self.__missing__(name)
