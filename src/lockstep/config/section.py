"""What every part of a config is made from."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


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
