"""The parts of a run that a config or a task asks for: models with their optimizers and schedulers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.config.schema import EVERY_EPOCH, Component, InitFrom, RunConfig
from lockstep.config.values import Interval
from lockstep.errors import ConfigError
from lockstep.train.models import DEFAULT
from lockstep.train.run import Run
from lockstep.train.task import Task, construct, has_init_weights, import_object


def set_up(run: Run, task: Task, config: RunConfig) -> tuple[dict[str, Any], Interval]:
    """Every model of the task with its optimizer and scheduler; the schedulers, and how often they are stepped."""
    limits = config.train
    made = run.build(task.model)
    models = dict(made) if isinstance(made, Mapping) else {DEFAULT: made}
    optimizers = _per_model(models, _optimizers(task, made, models, config), "optimizer")
    schedulers, every = _schedulers(task, made, optimizers, config)
    for name, model in models.items():
        run.setup(
            model,
            optimizers.get(name),
            schedulers.get(name),
            name=name,
            precision=limits.precision,
            clip_norm=limits.clip_norm,
            compile=limits.compile,
            recompute=limits.recompute,
            on_nan=limits.on_nan,
            shard=task.shard_rules(),
            init_weights=task.init_weights if has_init_weights(task) else None,
            init_from=_weights_of(name, models, config),
        )
    return schedulers, every


def _weights_of(name: str, models: Mapping[str, nn.Module], config: RunConfig) -> InitFrom | None:
    """What a model begins with; of several, each has its weights under its own name, as they are saved."""
    given = config.init_from
    if given is None or len(models) == 1:
        return given
    return given.model_copy(update={"map": {"": None, f"{name}.": "", **given.map}})


def _optimizers(task: Task, made: Any, models: Mapping[str, nn.Module], config: RunConfig) -> Any:
    """One optimizer, or one for every model: of the config, else of the task, else AdamW."""
    if config.optimizer is None:
        own = task.optimizer(made)
        return own if own is not None else {name: torch.optim.AdamW(each.parameters()) for name, each in models.items()}
    return {
        name: _made(config.optimizer, "optimizer", Optimizer, [p for p in each.parameters() if p.requires_grad])
        for name, each in models.items()
    }


def _schedulers(
    task: Task, made: Any, optimizers: Mapping[str, Optimizer], config: RunConfig
) -> tuple[dict[str, Any], Interval]:
    given: Any = dict(optimizers) if isinstance(made, Mapping) else next(iter(optimizers.values()))
    if config.scheduler is None:
        return _per_model(optimizers, task.scheduler(given), "scheduler"), EVERY_EPOCH
    scheduler = config.scheduler
    return {name: _made(scheduler, "scheduler", object, each) for name, each in optimizers.items()}, scheduler.every


def _per_model(models: Mapping[str, Any], given: Any, what: str) -> dict[str, Any]:
    """What a task returned for its models, by the name of the model."""
    if not isinstance(given, Mapping):
        if given is not None and len(models) > 1:
            raise ConfigError(
                f"task: model() returned {len(models)} models ({', '.join(models)}), but {what}() one "
                f"{type(given).__name__}: return a mapping with one for each of them"
            )
        return {} if given is None else {next(iter(models)): given}
    unknown = [name for name in given if name not in models]
    if unknown:
        raise ConfigError(f"task: {what}() names {unknown[0]!r}, but the models are {', '.join(models)}")
    return dict(given)


def _made(component: Component, path: str, kind: type, *positional: Any) -> Any:
    made = construct(import_object(component.type, path), component.arguments, path, *positional)
    if not isinstance(made, kind):
        raise ConfigError(f"{path}: {component.type} makes a {type(made).__name__}, not a {kind.__name__}")
    return made
