"""Sets up the models of a task with their optimizers and schedulers, and the order of its data."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from lockstep.config.objects import construct, import_object
from lockstep.config.schema import Component, InitFrom, RunConfig
from lockstep.config.training import EVERY_STEP, Ordering, OtherOptimizer
from lockstep.config.training import Optimizer as OptimizerSettings
from lockstep.config.training import Schedule as NamedSettings
from lockstep.data.batches import Ramps
from lockstep.data.order import Buckets, Order, Sequential, make_order, of_every_example
from lockstep.data.stream_reader import is_stream
from lockstep.engine.models import DEFAULT, MATCH
from lockstep.engine.run import Run
from lockstep.errors import ConfigError
from lockstep.shown import described
from lockstep.strategy.combined import CombinedOptimizer
from lockstep.tasks.parameters import OTHERS, freeze, matrices_and_others, parameter_groups
from lockstep.tasks.schedules import NamedSchedule, RunLength, Schedule, as_schedule, counts_tokens
from lockstep.tasks.task import Task, defines

logger = logging.getLogger(__name__)


def set_up(run: Run, task: Task, config: RunConfig, length: RunLength) -> dict[str, Schedule]:
    """Sets up every model of the task. Returns the schedulers by model, with when they are stepped."""
    limits = config.train
    vars(task)["_length"] = length  # which optimizers of an adapter may ask for
    made = run._engine.strategy.build(task.model)
    models = dict(made) if isinstance(made, Mapping) else {DEFAULT: made}
    for each in models.values():
        if not isinstance(each, nn.Module):
            raise ConfigError(
                f"task: {type(task).__name__}.model() must return a torch.nn.Module, or a mapping of several by name, "
                f"got {described(each)}"
            )
    if defines(task, "parallelize") and not config.strategy.has_mesh:
        logger.info("task.parallelize is for strategy: fsdp, hsdp and tensor; here every process has the whole model")
    if limits.freeze:
        freeze(models, limits.freeze)
    optimizers = _per_model(models, _optimizers(task, made, models, config), "optimizer")
    schedules = _schedules(task, made, optimizers, config, length)
    for name, model in models.items():
        run.setup(
            model,
            optimizers.get(name),
            schedules[name].scheduler if name in schedules else None,
            name=name,
            precision=limits.precision,
            clip_norm=limits.clip_norm,
            compile=limits.compile,
            activation_checkpointing=limits.activation_checkpointing,
            on_nan=limits.on_nan,
            ema=limits.ema,
            shard=task.shard_rules(),
            parallelize=task.parallelize if defines(task, "parallelize") else None,
            init_weights=task.init_weights if defines(task, "init_weights") else None,
            init_from=_weights_of(name, models, config),
        )
    return schedules


def _weights_of(name: str, models: Mapping[str, nn.Module], config: RunConfig) -> InitFrom | None:
    """Returns `init_from` for a model; of several, each has its weights under its name, as in a checkpoint."""
    given = config.init_from
    if given is None or len(models) == 1:
        return given
    return given.model_copy(update={"map": {"": None, f"{name}.": "", **given.map}})


def _optimizers(task: Task, made: Any, models: Mapping[str, nn.Module], config: RunConfig) -> Any:
    """Makes one optimizer, or one for every model: of the config, else of the task, else AdamW."""
    trained = [name for name, each in models.items() if any(p.requires_grad for p in each.parameters())]
    if not trained:
        raise ConfigError("the model has no parameter that requires a gradient, so there is nothing to train")
    if config.optimizer is None:
        own = task.optimizer(made)
        return own if own is not None else {name: torch.optim.AdamW(models[name].parameters()) for name in trained}
    given: Mapping[str, list[Any]]
    if config.optimizer.others is not None:
        return _combined(models, trained, config.optimizer, config.optimizer.others)
    if config.optimizer.groups:
        given = parameter_groups(models, config.optimizer.groups)
    else:
        given = {name: [p for p in each.parameters() if p.requires_grad] for name, each in models.items()}
    return {name: _made(config.optimizer, "optimizer", Optimizer, given[name]) for name in trained}


def _combined(
    models: Mapping[str, nn.Module], trained: list[str], first: OptimizerSettings, second: OtherOptimizer
) -> dict[str, Optimizer]:
    given = matrices_and_others({name: models[name] for name in trained}, second.match)
    made: dict[str, Optimizer] = {}
    for name, (matrices, others) in given.items():
        made[name] = _made(first, "optimizer", Optimizer, matrices)
        if others:
            group = [{"params": others, MATCH: OTHERS}]
            made[name] = CombinedOptimizer(made[name], _made(second, OTHERS, Optimizer, group))
    return made


def _schedules(
    task: Task, made: Any, optimizers: Mapping[str, Optimizer], config: RunConfig, length: RunLength
) -> dict[str, Schedule]:
    given: Any = dict(optimizers) if isinstance(made, Mapping) else next(iter(optimizers.values()))
    if config.scheduler is None:
        own = _per_model(optimizers, length.of_task(task, given), "scheduler")
        return {name: as_schedule(each) for name, each in own.items()}
    scheduler = config.scheduler
    if isinstance(scheduler, NamedSettings):
        tokens = counts_tokens(scheduler, config.train.tokens)
        total = config.train.tokens if tokens else length.steps
        return {name: Schedule(NamedSchedule(each, scheduler, total, tokens), EVERY_STEP) for name, each in
                optimizers.items()}  # fmt: skip
    component = Component.model_validate({"type": scheduler.type, **length.arguments(scheduler)})
    return {
        name: Schedule(_made(component, "scheduler", object, each), scheduler.every, scheduler.monitor)
        for name, each in optimizers.items()
    }


def _per_model(models: Mapping[str, Any], given: Any, what: str) -> dict[str, Any]:
    """Returns what a task returned for its models, by the name of the model."""
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


def order_of(task: Task, config: RunConfig, dataset: Dataset[Any]) -> Order | None:
    """Returns the config's order; without one, the task's, if it has one, else shuffled. None for a stream."""
    asked = config.data.order
    if is_stream(dataset):
        if asked is not None:
            raise ConfigError(
                f"data.order: {asked.type}: train_data() is a stream ({type(dataset).__name__}), which comes in the "
                "order that it has: remove it (data.shuffle and data.shuffle_buffer are for streams)"
            )
        return None
    if config.train.overfit is not None:
        return Sequential(len(dataset))  # type: ignore[arg-type]
    order: Order | None = vars(task).get("_order_of_loader")
    if asked is None and order is not None:
        if order.count == len(dataset):  # type: ignore[arg-type]
            return order
        if order.name not in ("sequential", "shuffled"):
            raise ConfigError(
                "data.split, train.limit: train_data() returns a DataLoader with its own sampler, which knows nothing "
                "of parts: return its dataset, and set data.order"
            )
        asked = Ordering(type=order.name)  # type: ignore[arg-type]
    if asked is None:
        own = defines(task, "order")
        if defines(task, "weights"):
            logger.warning(
                "task: %s defines weights, but examples are not drawn by them: set data.order to weighted",
                type(task).__name__,
            )
        asked = Ordering(type="sequential" if not config.data.shuffle else "own" if own else "shuffled")
    needs = {"weighted": "weights", "buckets": "lengths"}.get(asked.type)
    values = {needs: value_of(task, needs)} if needs and defines(task, needs) else {}
    if asked.type == "own" and defines(task, "order"):
        values = {"order": task.order, "repeats": getattr(task, "order_repeats", False)}
    said_by = f"task: {type(task).__name__}.order"
    return make_order(asked, dataset, config.train.batch_size, config.seed, values, said_by)


def ramps_of(task: Task, config: RunConfig, dataset: Dataset[Any], order: Order | None) -> Ramps:
    """Returns the config's ramps, with the tokens of the training data if the task counts them."""
    limits, schedule, name = config.train, config.scheduler, type(task).__name__
    batch, sequence, counts = limits.batch_sizes, limits.sequence_lengths, defines(task, "tokens_per_example")
    ramps = {"train.batch_ramp": batch, "train.sequence_ramp": sequence}
    asked = [path for path, each in ramps.items() if each is not None]
    by_tokens = [path for path, each in ramps.items() if each is not None and each.by_tokens]
    by_tokens += ["train.tokens"] if limits.tokens is not None else []
    by_tokens += ["scheduler.warmup"] if isinstance(schedule, NamedSettings) and schedule.warms_up_by_tokens else []
    wrong = (
        f"{asked[0]}: train_data() is a stream ({type(dataset).__name__}), of which ranks read different parts: ramps "
        "are for data with __len__ and __getitem__" if asked and order is None
        else f"train.batch_ramp: data.order: buckets puts {limits.batch_size} examples of similar length together, and "
        "smaller batches would cut through them: choose another order, or leave the ramp out"
        if batch is not None and isinstance(order, Buckets)
        else f"train.sequence_ramp: {name} does not define cut(self, batch, length), which cuts batches"
        if sequence is not None and not defines(task, "cut")
        else f"{by_tokens[0]}: tokens are counted by {name}.tokens_per_example(self), which is not defined: return how "
        "many every example has, or a list with one number for each" if by_tokens and not counts
        else None
    )  # fmt: skip
    if wrong is not None:
        raise ConfigError(wrong)
    tokens: Any = value_of(task, "tokens_per_example") if counts else None
    if counts and order is not None and not isinstance(tokens, int):
        tokens = np.asarray(of_every_example("tokens_per_example", None, {"tokens_per_example": tokens}, dataset))
    if counts and (
        np.asarray(tokens).dtype.kind not in "iu"
        or np.shape(tokens) not in ([()] if order is None else [(), (order.count,)])
        or np.min(tokens) < 0
        or np.max(tokens) < 1
    ):
        raise ConfigError(
            f"task: {name}.tokens_per_example() must return a whole number above 0, or (not for a stream) one for each "
            f"example of train_data(); got {tokens!r}"
        )
    return Ramps(batch, sequence, tokens)


def value_of(task: Task, name: str) -> Any:
    found = getattr(task, name)
    return found() if callable(found) else found
