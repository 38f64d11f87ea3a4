"""Values that people write in a config and that plain types cannot hold: intervals, durations, import paths."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
)
from pydantic_core import CoreSchema, core_schema

_SECONDS = {"s": 1.0, "sec": 1.0, "second": 1.0, "min": 60.0, "minute": 60.0, "h": 3600.0, "hour": 3600.0}


_MOST = 5e15  # steps, epochs or seconds of an interval: whole numbers up to here are exact
_LONGEST = 1e9  # seconds of a wait, which are thirty years


@dataclass(frozen=True)
class Interval:
    """How often something happens: every so many steps, epochs or seconds of training."""

    count: float
    unit: str  # "step", "epoch" or "second"

    PATTERN: ClassVar[str] = r"^\s*\d+(\.\d+)?\s*(steps?|epochs?|seconds?|minutes?|hours?|s|min|h)\s*$"

    @classmethod
    def parse(cls, value: Any) -> Interval:
        if isinstance(value, Interval):
            return value
        hint = 'write for example "50 steps", "1 epoch" or "10 minutes"'
        if not isinstance(value, str) or not re.match(cls.PATTERN, value):
            raise ValueError(f"not an interval; {hint}")
        number, unit = re.match(r"\s*([\d.]+)\s*([a-z]+)", value).groups()  # type: ignore[union-attr]
        count = float(number)
        singular = unit.removesuffix("s") or "s"
        if singular in _SECONDS:
            count, singular = count * _SECONDS[singular], "second"
        if count > _MOST:
            raise ValueError(f"an interval of more than {_MOST:.0e} {singular}s would never be over; {hint}")
        if count <= 0:
            raise ValueError(f"an interval must be longer than zero; {hint}")
        if singular != "second" and count != int(count):
            raise ValueError(f"{singular}s come in whole numbers; {hint}")
        return cls(count, singular)

    def __str__(self) -> str:
        count = int(self.count) if self.count == int(self.count) else self.count
        return f"{count} {self.unit}" + ("" if count == 1 else "s")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(cls.parse, serialization=core_schema.to_string_ser_schema())

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "string", "pattern": cls.PATTERN, "examples": ["50 steps", "1 epoch", "10 minutes"]}


def seconds_of(text: str) -> float | None:
    """What `5 minutes` comes to; None for what is no duration."""
    match = re.match(r"^\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*$", text)
    singular = match and (match[2].removesuffix("s") or "s")
    return float(match[1]) * _SECONDS[singular] if match and singular in _SECONDS else None


def _duration(value: Any) -> Any:
    if isinstance(value, str):
        seconds = seconds_of(value)
        if seconds is None:
            raise ValueError('not a duration; write seconds as a number, or "90 s", "5 minutes", "1 hour"')
        return seconds
    return value


Seconds = Annotated[
    float,
    BeforeValidator(_duration, json_schema_input_type=Annotated[float, Field(gt=0)] | str),
    Field(gt=0, le=_LONGEST, allow_inf_nan=False, examples=["90 s", "5 minutes", 60]),
]


_LONGEST_PATH = 4096


def import_path(text: str) -> str:
    if (
        len(text) > _LONGEST_PATH
        or "\0" in text
        or text.endswith(".py")
        or not re.match(r"^(.+\.py|[A-Za-z_][\w.]*)[:.][A-Za-z_]\w*$", text)
    ):
        raise ValueError('not an import path; write "package.module:Name" or "file.py:Name"')
    return text


ImportPath = Annotated[str, AfterValidator(import_path)]


def variable_name(text: str) -> str:
    """The name of an environment variable."""
    if not re.fullmatch(r"[A-Za-z_]\w*", text, re.ASCII):
        raise ValueError("not the name of an environment variable; write for example HF_TOKEN")
    return text


def host_name(text: str) -> str:
    """What ssh takes for a host: a name, an address or an alias, with a user before it or not."""
    # An argument of ssh: what begins with a dash would be an option, and nothing else belongs into a name.
    wanted = r"([\w.][\w.-]*@)?[\w.:\[\]][\w.:%\[\]-]*"
    if len(text) > 255 or not re.fullmatch(wanted, text, re.ASCII):
        raise ValueError("not the name of a host; write host or user@host, as for ssh")
    return text


HostName = Annotated[str, AfterValidator(host_name)]


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
