"""Creates tasks; refuses a class that lacks methods, or has them under names that Lockstep does not call."""

from __future__ import annotations

import inspect
from collections.abc import Collection

from lockstep.config.objects import construct, import_object
from lockstep.config.schema import Component
from lockstep.errors import ConfigError
from lockstep.tasks.task import Task, defines


def create_task(component: Component) -> Task:
    """Imports the task's class and makes one."""
    task: Task = construct(task_class(component), component.arguments, "task")
    return task


def task_class(component: Component) -> type[Task]:
    """Returns the class that a config names, checked as far as possible without making one."""
    cls = import_object(component.type, "task")
    if not (inspect.isclass(cls) and issubclass(cls, Task)):
        raise ConfigError(f"task: {component.type} is not a class derived from lockstep.Task")
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if not defines(cls, "loss") and not defines(cls, "training_step"):
        missing.insert(0, "loss")
    if missing:
        lacking = ", ".join(f"{name}{inspect.signature(getattr(cls, name))}" for name in missing)
        own = methods(cls, Task)
        has = [(name, near) for name in missing for near in sorted(own) if ALIASES.get(near) == name]
        hint = "".join(f"; it has {near}, whose name here is {name}" for name, near in has)
        raise ConfigError(f"task: {cls.__name__} in {component.type} does not define {lacking}{hint}")
    check_names(cls, Task)
    replaced = [name for name in ("metrics", "outputs") if defines(cls, name)]
    if defines(cls, "evaluate_step") and replaced:
        raise ConfigError(
            f"task: {cls.__name__} defines evaluate_step and {replaced[0]}, but evaluate_step replaces {replaced[0]}: "
            "return its values from evaluate_step, and remove it"
        )
    return cls


# What other frameworks, and people, call our methods. Each counts only where the task does not define ours: a `loss`
# that calls `self.loss_fn` is nobody's mistake.
_OTHER_NAMES = {
    "model": "build_model configure_model create_model get_model make_model",
    "train_data": "train_dataloader train_dataset training_data training_dataset",
    "val_data": "eval_data eval_dataset val_dataloader val_dataset valid_data validation_data validation_dataset",
    "test_data": "test_dataloader test_dataset testing_data",
    "loss": "calculate_loss compute_loss criterion get_loss loss_fn loss_function",
    "metrics": "compute_metrics get_metrics val_loss",
    "evaluate_step": "test_step val_step validation_step",
    "optimizer": "configure_optimizer configure_optimizers create_optimizer get_optimizer make_optimizer",
    "scheduler": "configure_scheduler create_scheduler get_scheduler lr_scheduler make_scheduler",
    "collate": "collate_batch collate_fn collator data_collator",
    "shard_rules": "shard_rule sharding_rules",
    "should_stop": "early_stop",
    "training_step": "train_step",
}
ALIASES = {other: name for name, others in _OTHER_NAMES.items() for other in others.split()}
# A task may have these without there being a method of the base class to override.
WITHOUT_BASE = ("collate", "training_step")


def check_names(cls: type, base: type) -> None:
    """Refuses a method that has a well-known other name."""
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


def names(base: type) -> set[str]:
    return {*_public(base), *WITHOUT_BASE}


def methods(cls: type, base: type) -> set[str]:
    return {name for each in cls.__mro__ if each not in base.__mro__ for name in _public(each)}


def _public(cls: type) -> Collection[str]:
    return [name for name in vars(cls) if not name.startswith("_") and callable(getattr(cls, name, None))]
