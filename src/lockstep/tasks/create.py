"""Creates tasks; refuses a class that lacks methods, or has them under names that Lockstep does not call."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Collection

from lockstep.config.objects import construct, import_object
from lockstep.config.schema import Component
from lockstep.errors import ConfigError
from lockstep.tasks.task import Task, has_loss, has_training_step

logger = logging.getLogger(__name__)


def create_task(component: Component) -> Task:
    """Import the task's class and make one, saying precisely what is wrong with it where something is."""
    task: Task = construct(task_class(component), component.arguments, "task")
    return task


def task_class(component: Component) -> type[Task]:
    """The class that a config names, with everything that can be known of it without making one."""
    cls = import_object(component.type, "task")
    if not (inspect.isclass(cls) and issubclass(cls, Task)):
        raise ConfigError(f"task: {component.type} is not a class derived from lockstep.Task")
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if not has_loss(cls) and not has_training_step(cls):
        missing.insert(0, "loss")
    if missing:
        lacking = ", ".join(f"{name}{inspect.signature(getattr(cls, name))}" for name in missing)
        has = [(name, near) for name in missing if (near := instead_of(name, cls, Task))]
        hint = "".join(f"; it has {near}, whose name here is {name}" for name, near in has)
        raise ConfigError(f"task: {cls.__name__} in {component.type} does not define {lacking}{hint}")
    check_names(cls, Task)
    replaced = [name for name in ("metrics", "outputs") if getattr(cls, name) is not getattr(Task, name)]
    if cls.evaluate_step is not Task.evaluate_step and replaced:
        raise ConfigError(
            f"task: {cls.__name__} defines evaluate_step and {replaced[0]}, but evaluate_step replaces {replaced[0]}: "
            "return its values from evaluate_step, and remove it"
        )
    return cls


# What other frameworks, and people, call it. Each counts only where the task does not define the one of ours: a `loss`
# that calls `self.loss_fn` is nobody's mistake.
ALIASES = {
    "build_model": "model",
    "configure_model": "model",
    "create_model": "model",
    "get_model": "model",
    "make_model": "model",
    "train_dataloader": "train_data",
    "train_dataset": "train_data",
    "training_data": "train_data",
    "training_dataset": "train_data",
    "eval_data": "val_data",
    "eval_dataset": "val_data",
    "val_dataloader": "val_data",
    "val_dataset": "val_data",
    "valid_data": "val_data",
    "validation_data": "val_data",
    "validation_dataset": "val_data",
    "test_dataloader": "test_data",
    "test_dataset": "test_data",
    "testing_data": "test_data",
    "calculate_loss": "loss",
    "compute_loss": "loss",
    "criterion": "loss",
    "get_loss": "loss",
    "loss_fn": "loss",
    "loss_function": "loss",
    "compute_metrics": "metrics",
    "get_metrics": "metrics",
    "test_step": "evaluate_step",
    "val_loss": "metrics",
    "val_step": "evaluate_step",
    "validation_step": "evaluate_step",
    "configure_optimizer": "optimizer",
    "configure_optimizers": "optimizer",
    "create_optimizer": "optimizer",
    "get_optimizer": "optimizer",
    "make_optimizer": "optimizer",
    "configure_scheduler": "scheduler",
    "create_scheduler": "scheduler",
    "get_scheduler": "scheduler",
    "lr_scheduler": "scheduler",
    "make_scheduler": "scheduler",
    "collate_batch": "collate",
    "collate_fn": "collate",
    "collator": "collate",
    "data_collator": "collate",
    "shard_rule": "shard_rules",
    "sharding_rules": "shard_rules",
    "early_stop": "should_stop",
    "train_step": "training_step",
}


# A task may have these without there being a method of the base class to override.
WITHOUT_BASE = ("collate", "training_step")


# How similar a name has to be before somebody is asked whether they meant ours.
_SIMILAR = 0.8


def check_names(cls: type, base: type) -> None:
    """Refuse a method that goes by a well-known other name; warn of one that is spelled almost like ours."""
    own = methods(cls, base)
    ours = names(base)
    absent = ours - own
    if "training_step" in own:
        absent -= {"loss"}  # a task that does its own backwards need not have one
    if own & {"evaluate_step", "metrics"}:
        absent -= {"evaluate_step", "metrics"}  # one is enough
    wrong = {name: ALIASES[name] for name in sorted(own - ours) if ALIASES.get(name) in absent}
    if wrong:
        raise ConfigError(
            "\n".join(
                f"task: {cls.__name__} defines {name}, which Lockstep does not call: its name here is {right}"
                for name, right in wrong.items()
            )
        )
    for name in sorted(own - ours):
        similar = difflib.get_close_matches(name, sorted(absent), n=1, cutoff=_SIMILAR)
        if similar:
            logger.warning(
                "task: %s defines %s, which Lockstep does not call; did you mean %s?", cls.__name__, name, similar[0]
            )


def instead_of(name: str, cls: type, base: type) -> str | None:
    """The method that a task which lacks one of ours probably has in its place."""
    own = sorted(methods(cls, base))
    alias = next((each for each in own if ALIASES.get(each) == name), None)
    return alias or next(iter(difflib.get_close_matches(name, own, n=1, cutoff=_SIMILAR)), None)


def names(base: type) -> set[str]:
    """What Lockstep calls."""
    return {*_public(base), *WITHOUT_BASE}


def methods(cls: type, base: type) -> set[str]:
    """The public methods that a task defines, in its own class or in another that is not ours."""
    return {name for each in cls.__mro__ if each not in base.__mro__ for name in _public(each)}


def _public(cls: type) -> Collection[str]:
    return [name for name in vars(cls) if not name.startswith("_") and callable(getattr(cls, name, None))]
