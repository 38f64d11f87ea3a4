"""The paths of config values, for people who know the last word of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from pydantic import BaseModel

from lockstep.config.schema import RunConfig

# Arguments of optimizers, which are torch's to name.
_OF_OPTIMIZERS = {"lr": "lr", "learning_rate": "lr", "weight_decay": "weight_decay", "momentum": "momentum"}
_MOST = 3


def paths_called(name: str) -> list[str]:
    """Returns the paths that end with a name, those of `train` first: `epochs` is `train.epochs`."""
    name = name.replace("-", "_")
    if name in _OF_OPTIMIZERS:
        return [f"optimizer.{_OF_OPTIMIZERS[name]}"]
    found = [path for path in _paths(RunConfig, "") if path.rpartition(".")[2] == name]
    return sorted(found, key=lambda path: (not path.startswith("train."), path.count("."), path))[:_MOST]


def _paths(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        yield path
        for each in (field.annotation, *get_args(field.annotation)):
            if isinstance(each, type) and issubclass(each, BaseModel) and each is not model:
                yield from _paths(each, f"{path}.")
