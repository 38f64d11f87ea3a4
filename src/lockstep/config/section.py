"""What all sections of a config have in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

from lockstep.config.values import ImportPath


class Section(BaseModel):
    """A part of the config: unknown keys are refused, values never change after validation."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        arbitrary_types_allowed=True,
        strict=True,
        ser_json_inf_nan="constants",  # an argument that is infinite must not become null on its way to the ranks
    )


def as_mapping(kind: Any, key: str = "type", bare: type = str) -> BeforeValidator:
    """Let a bare value stand for a mapping with one key alone: `strategy: ddp`, `task: pkg.module:Class`."""

    def mapped(value: Any) -> Any:
        fits = isinstance(value, (int, float) if bare is float else bare) and not isinstance(value, bool)
        return {key: value} if fits else value

    return BeforeValidator(mapped, json_schema_input_type=kind | bare)


class Component(Section):
    """Something made from an import path; every further key is an argument of its constructor."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: ImportPath

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})
