"""The `pod:` section: hosts that a run is brought to, and what is on them."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from lockstep.config.section import Section
from lockstep.config.values import variable_name


class Pod(Section):
    """How Lockstep runs on the hosts of `launch: ssh`, or of a Cloud TPU pod."""

    python: str = Field(
        "python3", min_length=1, description="the interpreter there, such as that of a virtual environment"
    )
    directory: str = Field(
        ".lockstep", min_length=1, description="where code and runs are on every host; relative to the home folder"
    )
    env: tuple[Annotated[str, AfterValidator(variable_name)], ...] = Field(
        (), strict=False, description="names of variables of this machine that ranks get; no other is passed on"
    )
