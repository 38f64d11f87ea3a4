"""`fit(module, data)`: trains a LightningModule from a program, as `Trainer(...).fit(module, data)` would."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import lockstep
from lockstep.adapters.lightning.refused import kind_of, overrides, package_of
from lockstep.adapters.lightning.task import Module, several
from lockstep.adapters.lightning.trainer import short_name
from lockstep.checkpoint import reader
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.config.load import load_python, with_values
from lockstep.config.schema import Reproducible, RunConfig, RunSettings
from lockstep.data.source import makes_batches, taken
from lockstep.data.stream_reader import is_stream
from lockstep.engine.run import Run
from lockstep.errors import ConfigError
from lockstep.strategy.slices import is_spread
from lockstep.tasks import trainer

_CALLER = "lightning.fit"
_PRECISIONS = {
    "32": "float32", "32-true": "float32", "bf16": "bf16", "bf16-mixed": "bf16", "16": "fp16", "16-mixed": "fp16",
    None: "float32",
}  # fmt: skip


class _Caller:
    """Says whether this process called fit. A rank in another process gets a pickled one."""

    def __init__(self, is_here: bool = True) -> None:
        self.is_here = is_here

    def __reduce__(self) -> Any:
        return _Caller, (False,)


class Loaders:
    """DataLoaders in the form of a LightningDataModule."""

    def __init__(self, train: Any, val: Any, test: Any) -> None:
        self._train, self._val, self._test = train, val, test

    def train_dataloader(self) -> Any:
        return self._train

    def val_dataloader(self) -> Any:
        return self._val

    def test_dataloader(self) -> Any:
        return self._test


def fit(
    module: Any,
    data: Any = None,
    val_dataloaders: Any = None,
    test_dataloaders: Any = None,
    *,
    max_epochs: int | None = None,
    max_steps: int = -1,
    callbacks: Any = (),
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str = "norm",
    accumulate_grad_batches: int = 1,
    check_val_every_n_epoch: int | None = 1,
    val_check_interval: int | float | None = None,
    precision: Any = None,
    processes: int | str = "auto",
    out: str | Path = "runs",
    folder: str | Path | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Trains a LightningModule on a LightningDataModule or on DataLoaders. Returns status, metrics, best and folder.

    The arguments before `processes` are those of Lightning's Trainer; further settings are those of the config, such as
    `seed=1`, `strategy="fsdp"` or `log={"wandb": {}}`. The batch size of a loader is that of all processes together.
    """
    given = [callbacks] if not isinstance(callbacks, (list, tuple)) else list(callbacks)
    own = module.configure_callbacks()
    every = [*given, *(own if isinstance(own, (list, tuple)) else [own])]
    package_of(module)
    kept = [each for each in every if kind_of(each) == "ModelCheckpoint"]
    named = "metric" in settings.get("checkpoint", {}).get("keep", {})  # which then counts
    epochs = None if max_epochs in (None, -1) else max_epochs
    steps = None if max_steps == -1 else max_steps
    if epochs is None and steps is None:
        raise ConfigError(f"{_CALLER}: how long? Give max_epochs or max_steps")
    unknown = [name for name in settings if name not in RunConfig.model_fields and name != "validate"]
    if unknown:
        raise ConfigError(
            f"{_CALLER}: {unknown[0]} is not supported. There are max_epochs, max_steps, callbacks, gradient_clip_val, "
            "gradient_clip_algorithm, accumulate_grad_batches, check_val_every_n_epoch, val_check_interval, precision, "
            f"processes, out, folder, and of the config {', '.join(RunConfig.model_fields)}"
        )
    if precision not in _PRECISIONS and str(precision) not in _PRECISIONS:
        raise ConfigError(f"{_CALLER}: precision={precision!r}: use {', '.join(map(str, _PRECISIONS))}")
    if gradient_clip_algorithm not in ("norm", "value"):
        raise ConfigError(f"{_CALLER}: gradient_clip_algorithm={gradient_clip_algorithm!r}: use norm or value")
    clips_itself = gradient_clip_algorithm == "value" or overrides(module, "configure_gradient_clipping")
    if gradient_clip_val is not None and not module.automatic_optimization:
        raise ConfigError(
            f"{_CALLER}: gradient_clip_val={gradient_clip_val} with manual optimization: call self.clip_gradients in "
            "training_step"
        )
    train = {
        "epochs": epochs, "steps": steps if epochs is None else None, "accumulate": accumulate_grad_batches,
        "clip_norm": None if clips_itself else gradient_clip_val,
        "precision": _PRECISIONS.get(precision, _PRECISIONS.get(str(precision))),
        **settings.pop("train", {}),
    }  # fmt: skip
    config = load_python(
        {
            "task": {"type": "lockstep.adapters.lightning:Module"}, "processes": processes, "train": train,
            "validate": {"every": f"{check_val_every_n_epoch or 1} epochs", **settings.pop("validate", {})},
            "checkpoint": _merged(_checkpoint(kept), settings.pop("checkpoint", {})), **settings,
        }, {}, _CALLER,
    )  # fmt: skip
    plain = config.plain()
    launched = {name: plain[name] for name in RunSettings.model_fields if name not in ("train", "processes")}
    launched["train"] = {name: plain["train"][name] for name in Reproducible.model_fields}
    launched["checkpoint"] = {name: each for name, each in plain["checkpoint"].items() if name != "every"}
    is_data = data is not None and not hasattr(data, "train_dataloader")
    if is_data or val_dataloaders is not None or test_dataloaders is not None:
        data = Loaders(data, val_dataloaders, test_dataloaders)
    interval = 1.0 if val_check_interval is None else val_check_interval
    asked: dict[str, Any] = {"val_check_interval": interval, "check_val_every_n_epoch": check_val_every_n_epoch}
    asked |= {} if steps is None else {"max_steps": steps}
    if clips_itself and gradient_clip_val is not None:
        asked |= {"gradient_clip_val": gradient_clip_val, "gradient_clip_algorithm": gradient_clip_algorithm}
    monitor = next(((each.monitor, each.mode) for each in kept if each.monitor is not None and not named), None)
    main = functools.partial(_train, module, data, given, config, asked, monitor, _Caller())
    main.__name__ = type(module).__name__.lower()  # type: ignore[attr-defined]
    outcome: dict[str, Any] = lockstep.launch(main, processes, out=out, folder=folder, **launched)[0]
    saved = Path(outcome["folder"]) / "checkpoints"
    if not outcome.pop("is_here") and saved.is_dir():
        _load(module, saved, outcome["step"])
    for each in kept:
        best = outcome["best"] if each.monitor is not None else {"step": outcome["step"]}
        if best is not None and each.save_top_k:
            each.best_model_path = str(saved / f"step-{best['step']:08d}")
            each.best_model_score = torch.tensor(best["value"]) if "value" in best else None
    return outcome


def _train(
    module: Any, data: Any, callbacks: Sequence[Any], config: RunConfig, asked: Mapping[str, Any],
    monitor: tuple[str, str] | None, caller: _Caller, run: Run,
) -> dict[str, Any]:  # fmt: skip
    """Trains on one rank."""
    splits = caller.is_here and run._engine.strategy.keeps_slices
    trained = copy.deepcopy(module) if splits else module  # placing a module changes its class and its parameters
    task = Module(trained, data, callbacks)
    task.accumulates, task.asked, task.monitor, task.is_given = config.train.accumulate, asked, monitor, True
    task.begin(run, config)
    loader = task.loader("train_dataloader")
    sizes: dict[str, Any] = {}
    if makes_batches(loader):
        size = taken(loader, config.seed).batch_size
        sizes = {"train.batch_size": size * config.train.accumulate, "data.drop_last": bool(loader.drop_last)}
    if is_stream(getattr(loader, "dataset", loader)):
        sizes["data.shuffle"] = False
    if isinstance(asked["val_check_interval"], int) or asked["val_check_interval"] != 1.0:
        sizes["validate.every"] = _every(loader, with_values(config, sizes), **asked)
    first: Any = next(iter(several(task.loader("val_dataloader"))), None)
    if makes_batches(first):
        sizes["validate.batch_size"] = taken(first, config.seed, False).batch_size
    found = trainer.fit(run, with_values(config, sizes), task)
    vars(trained).pop("log", None)  # Lightning's own again: a module that knows the run cannot be pickled
    if splits:
        weights = trained.state_dict().items()
        _give(module, {name: each.full_tensor().cpu() if is_spread(each) else each for name, each in weights})
    rest = {"folder": str(run.folder), "world_size": run.world_size, "step": run.progress.step}
    return {**found, **rest, "is_here": caller.is_here}


def _load(module: Any, saved: Path, step: int) -> None:
    """Gives the module of this process what the ranks have trained."""
    loaded = reader.read(CheckpointStorage(saved), step)
    try:
        several = len(loaded.state["models"]) > 1
        weights = {name.removeprefix("module.") if several else name: each for name, each in loaded.model.items()}
        _give(module, weights)
    finally:
        loaded.close()


def _give(module: Any, weights: Mapping[str, Any]) -> None:
    module.configure_model()  # which makes layers of a large one
    module.load_state_dict(weights)


def _every(
    loader: Any, config: RunConfig, val_check_interval: int | float, check_val_every_n_epoch: int | None, **asked: Any
) -> str:
    """Returns when to validate. Lightning counts batches: of each epoch, or of all without check_val_every_n_epoch."""
    limits, batches = config.train, 0  # of a stream nobody knows
    if not is_stream(getattr(loader, "dataset", loader)):
        source: Any = taken(loader, config.seed) if makes_batches(loader) else None
        examples = len(loader) if source is None else source.order.length
        examples = min(each for each in (examples, limits.limit, limits.overfit) if each is not None)
        whole, rest = divmod(examples, limits.batch_size // limits.accumulate)
        batches = whole + bool(rest and not config.data.drop_last)
    given, epochs, accumulate = val_check_interval, check_val_every_n_epoch, limits.accumulate
    count = given if isinstance(given, int) else max(1, int(batches * given))
    wrong = (
        "give a number of batches, as an int" if isinstance(given, float) and not (batches and epochs)
        else f"with check_val_every_n_epoch={epochs}: use 1 or None" if epochs not in (1, None)
        else f"is no whole number of steps with accumulate_grad_batches={accumulate}" if count % accumulate
        else f"an epoch has {batches} batches, and each begins to count anew: use a part of that, or "
        "check_val_every_n_epoch=None" if epochs and batches % count
        else f"the last step of an epoch has fewer than {accumulate} batches" if batches % accumulate
        else None
    )  # fmt: skip
    if wrong is not None:
        raise ConfigError(f"{_CALLER}: val_check_interval={given}: {wrong}")
    return f"{count // accumulate} steps"


def _checkpoint(found: Sequence[Any]) -> dict[str, Any]:
    """Returns the settings that a ModelCheckpoint stands for."""
    if not found:
        return {}
    if len(found) > 1:
        raise ConfigError("callbacks: several ModelCheckpoint are not supported: keep one")
    (each,) = found
    wrong = {
        "dirpath": each.dirpath is not None, "filename": each.filename is not None,
        "save_weights_only": each.save_weights_only, "train_time_interval": each._train_time_interval is not None,
        "save_top_k=-1": each.save_top_k == -1, "save_on_exception": getattr(each, "save_on_exception", False),
    }  # fmt: skip
    for name in (name for name, is_given in wrong.items() if is_given):
        raise ConfigError(
            f"callbacks: ModelCheckpoint({name}) is not supported: checkpoints are whole, and in the run's folder"
        )
    steps, epochs = each._every_n_train_steps, each._every_n_epochs
    keep: dict[str, Any] = {"best": 0}
    if each.monitor is not None and each.save_top_k > 0:
        kind = "train" if each.monitor.startswith("train") else "val"
        shown = f"{kind}/{'epoch_' * (kind == 'train')}{short_name(each.monitor, kind)}"  # as far as can be told yet
        keep = {"best": each.save_top_k, "mode": each.mode, "metric": shown}
    return {"every": f"{steps} steps" if steps else f"{epochs or 1} epochs", "keep": keep}


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {**one, **other, **({"keep": {**one.get("keep", {}), **other.get("keep", {})}} if one or other else {})}
