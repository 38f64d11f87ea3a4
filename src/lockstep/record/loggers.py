"""The loggers that a config names: whether each can be used at all, known before training, and their making."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep.config.schema import Log, RunSettings
from lockstep.config.secrets import redacted
from lockstep.errors import ConfigError
from lockstep.record.logger import About, Logger, check_methods
from lockstep.record.logger_queue import LoggerQueue

Find = Callable[[str, str], Any]  # an import path, and the YAML path that it is at -> what it stands for
Construct = Callable[[Any, dict[str, Any], str], Any]

# By the name in the config: the package to import, and the extra of ours that brings it.
PACKAGES = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow"),
    "trackio": ("trackio", "trackio"),
}


def check(settings: Log, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse what cannot work here: a package that is not installed, a service without a key. Nothing is imported."""
    for name, (package, extra) in PACKAGES.items():
        if getattr(settings, name) and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"log.{name}: needs {package}: pip install 'lockstep-train[{extra}]', or leave log.{name} out"
            )
    # Adaptors are imported where a config names them.
    if settings.wandb is not None:
        from lockstep.record.to_wandb import WandbLogger

        WandbLogger.check(settings.wandb, environment)
    if settings.mlflow is not None:
        from lockstep.record.to_mlflow import MlflowLogger

        MlflowLogger.check(settings.mlflow, environment)


def create(folder: Path, settings: RunSettings, find: Find, construct: Construct) -> list[LoggerQueue]:
    """An outbox for each, not started yet; everything that can be known to be wrong is raised here."""
    log = settings.log
    check(log)
    made: dict[str, Logger] = {}
    if log.tensorboard:
        from lockstep.record.to_tensorboard import TensorBoardLogger

        made["tensorboard"] = TensorBoardLogger()
    if log.wandb is not None:
        from lockstep.record.to_wandb import WandbLogger

        made["wandb"] = WandbLogger(log.wandb)
    if log.mlflow is not None:
        from lockstep.record.to_mlflow import MlflowLogger

        made["mlflow"] = MlflowLogger(log.mlflow)
    if log.trackio is not None:
        from lockstep.record.to_trackio import TrackioLogger

        made["trackio"] = TrackioLogger(log.trackio)
    for name, own in log.own.items():
        cls = find(own.type, f"log.{name}")
        check_methods(cls, f"log.{name}", own.type)
        made[name] = construct(cls, own.arguments, f"log.{name}")
    config = redacted(settings.model_dump(mode="json", by_alias=True)) if made else {}
    about = About(folder.name, "", folder, config, 0, log.timeout)
    return [LoggerQueue(name, each, about) for name, each in made.items()]
