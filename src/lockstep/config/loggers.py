"""The `log` section: built-in and custom loggers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from lockstep.config.secrets import secrets_in
from lockstep.config.values import ImportPath, Interval, OpenSection, PathOrUrl, Seconds, Section


class LoggerSection(OpenSection):
    """Settings of one logger. They are written into the run's folder, so secrets are refused."""

    @model_validator(mode="before")
    @classmethod
    def _no_secrets(cls, given: Any) -> Any:
        found = next(secrets_in(given), None)
        if found is not None:
            raise ValueError(
                f"{found}: keys and passwords do not belong into a config, which is written into the run's folder: "
                "put it into the environment, where the logger's own package looks for it (such as WANDB_API_KEY)"
            )
        return given


class Wandb(LoggerSection):
    """Weights & Biases. Other keys are arguments of wandb.init: entity, name, group, tags, notes, ..."""

    project: str | None = Field(None, min_length=1)
    mode: Literal["online", "offline"] | None = Field(None, description="defaults to WANDB_MODE, then to online")


class Mlflow(LoggerSection):
    """MLflow tracking."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tracking_uri: PathOrUrl | None = Field(
        None, min_length=1, description="the URL of a server, or a folder; defaults to MLFLOW_TRACKING_URI"
    )
    experiment: str = Field("lockstep", min_length=1)
    name: str | None = Field(None, min_length=1, description="the MLflow run's name; defaults to the run folder's")
    tags: dict[str, str] = Field({}, description="tags of the MLflow run")


class OwnLogger(LoggerSection):
    """A class with start, log and finish; every other key is an argument of its constructor."""

    type: ImportPath


def _switch(kind: Any) -> BeforeValidator:
    """Let `true` stand for a logger without settings, and `false` for none."""
    return BeforeValidator(
        lambda value: {} if value is True else None if value is False else value,
        json_schema_input_type=kind | bool | None,
    )


def _with_type(value: Any) -> Any:
    """A key without a `type` is a misspelt setting, not a custom logger."""
    if isinstance(value, OwnLogger) or (isinstance(value, Mapping) and "type" in value):
        return value
    raise PydanticCustomError("extra_forbidden", "unknown key")


class Log(Section):
    """Where metrics and samples are logged. Other keys are custom loggers, each with a `type`."""

    model_config = ConfigDict(extra="allow", frozen=True)
    __pydantic_extra__: dict[str, Annotated[OwnLogger, BeforeValidator(_with_type)]]

    every: Interval = Interval(10, "step")
    jsonl: bool = True
    tensorboard: bool = False
    gradient_norm: bool | None = Field(
        None, description="log the norm of all gradients before clipping; null: only if they are clipped"
    )
    wandb: Annotated[Wandb | None, _switch(Wandb)] = None
    mlflow: Annotated[Mlflow | None, _switch(Mlflow)] = None
    timeout: Seconds = Field(30.0, description="how long the end of a run waits for a logger")

    @model_validator(mode="after")
    def _names(self) -> Log:
        wrong = next((name for name in self.own if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII)), None)
        if wrong is not None:
            raise ValueError(f"the name of a logger is made of letters, digits and _; got {wrong!r}")
        return self

    @property
    def own(self) -> dict[str, OwnLogger]:
        return dict(self.__pydantic_extra__ or {})

    @property
    def has_loggers(self) -> bool:
        return bool(self.tensorboard or self.wandb or self.mlflow or self.own)
