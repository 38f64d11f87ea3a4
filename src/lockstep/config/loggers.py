"""The loggers of a config's `log` section: those that have a name, and those of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from lockstep.config.secrets import secrets_in
from lockstep.config.values import ImportPath, Section


class LoggerSection(Section):
    """Settings of one logger. Keys and passwords are none: this is written into the run's folder."""

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

    @property
    def arguments(self) -> dict[str, Any]:
        """Further keys: what the package's own function takes."""
        return dict(self.model_extra or {})


class Wandb(LoggerSection):
    """Weights & Biases. Further keys are arguments of wandb.init: entity, name, group, tags, notes, ..."""

    model_config = ConfigDict(extra="allow", frozen=True)

    project: str | None = Field(None, min_length=1)
    mode: Literal["online", "offline"] | None = Field(None, description="WANDB_MODE where not given, else online")


class Mlflow(LoggerSection):
    """MLflow's tracking."""

    tracking_uri: str | None = Field(
        None, min_length=1, description="a server's URL, or a folder; MLFLOW_TRACKING_URI where not given"
    )
    experiment: str = Field("lockstep", min_length=1)
    name: str | None = Field(
        None, min_length=1, description="of the run there; that of the run's folder where not given"
    )
    tags: dict[str, str] = Field({}, description="of the run there")


class Trackio(LoggerSection):
    """Trackio. Further keys are arguments of trackio.init: space_id, group, ..."""

    model_config = ConfigDict(extra="allow", frozen=True)

    project: str = Field("lockstep", min_length=1)


class OwnLogger(LoggerSection):
    """A class with start, log and finish; every further key is an argument of its constructor."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: ImportPath


def switch(kind: Any) -> BeforeValidator:
    """Let `true` stand for a logger without settings, and `false` for none."""
    return BeforeValidator(
        lambda value: {} if value is True else None if value is False else value,
        json_schema_input_type=kind | bool | None,
    )


def _with_type(value: Any) -> Any:
    """What has no `type` is no logger of one's own, but a misspelt key."""
    if isinstance(value, OwnLogger) or (isinstance(value, Mapping) and "type" in value):
        return value
    raise PydanticCustomError("extra_forbidden", "unknown key")


Own = Annotated[OwnLogger, BeforeValidator(_with_type)]
