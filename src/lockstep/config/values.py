"""The base of all sections, and values of their own types: intervals, durations, import paths, host names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from lockstep.config.plain import in_home
from lockstep.shown import described

_SECONDS = {"s": 1.0, "sec": 1.0, "second": 1.0, "min": 60.0, "minute": 60.0, "h": 3600.0, "hour": 3600.0}


_MOST = 5e15  # of an interval: integers up to here are exact as floats
_LONGEST = 1e9  # seconds


@dataclass(frozen=True)
class Interval:
    """How often something happens: every `count` steps, epochs or seconds of training."""

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


def _duration(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    match = re.match(r"^\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*$", value)
    singular = match and (match[2].removesuffix("s") or "s")
    if match is None or singular not in _SECONDS:
        raise ValueError('not a duration; write seconds as a number, or "90 s", "5 minutes", "1 hour"')
    return float(match[1]) * _SECONDS[singular]


Seconds = Annotated[
    float,
    BeforeValidator(_duration, json_schema_input_type=Annotated[float, Field(gt=0)] | str),
    Field(gt=0, le=_LONGEST, allow_inf_nan=False, examples=["90 s", "5 minutes", 60]),
]


def require(condition: Callable[[Any], Any], message: str, kind: Any = AfterValidator) -> Any:
    """Returns a validator that refuses values for which the condition is false."""

    def check(value: Any) -> Any:
        if not condition(value):
            raise ValueError(message)
        return value

    return kind(check)


def matching(pattern: str, message: str, longest: int = 1024) -> Any:
    return require(lambda text: len(text) <= longest and re.fullmatch(pattern, text, re.ASCII), message)


_LONGEST_PATH = 4096


def import_path(text: str) -> str:
    if (
        len(text) > _LONGEST_PATH
        or "\0" in text
        or text.endswith(".py")
        or not re.match(r"^(.+\.py|[A-Za-z_][\w.]*)[:.][A-Za-z_]\w*$", text)
    ):
        raise ValueError('not an import path; write "package.module:Name" or "file.py:Name"')
    return in_home(text)


ImportPath = Annotated[str, AfterValidator(import_path)]
PathOrUrl = Annotated[str, AfterValidator(in_home)]  # a path or a URL


def variable_name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*", text, re.ASCII):
        raise ValueError("not the name of an environment variable; write for example HF_TOKEN")
    return text


# It becomes an argument of ssh, so it must not start with a dash.
_HOST = r"([\w.][\w.-]*@)?[\w.:\[\]][\w.:%\[\]-]*"
HostName = Annotated[str, matching(_HOST, "not the name of a host; write host or user@host, as for ssh", longest=255)]


class Section(BaseModel):
    """A part of the config: unknown keys are refused, and values are frozen."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        arbitrary_types_allowed=True,
        strict=True,
        ser_json_inf_nan="constants",  # ranks must not receive null for an infinite argument
    )


def as_mapping(kind: Any, key: str = "type", bare: type = str) -> BeforeValidator:
    """Let a bare value stand for a mapping with one key: `strategy: ddp`, `task: pkg.module:Class`."""

    def mapped(value: Any) -> Any:
        fits = isinstance(value, (int, float) if bare is float else bare) and not isinstance(value, bool)
        return {key: value} if fits else value

    return BeforeValidator(mapped, json_schema_input_type=kind | bare)


class OpenSection(Section):
    """A section whose other keys are arguments of what it describes."""

    model_config = ConfigDict(extra="allow", frozen=True)

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _arguments_are_plain(self) -> Self:
        _require_plain(self.arguments, "")
        return self


def _require_plain(value: Any, at: str) -> None:
    """Refuses what config.yaml would not give to a rank as it is."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{at}: the keys of a mapping are text, got {key!r}: quote it")
            _require_plain(each, f"{at}.{key}" if at else key)
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            _require_plain(each, f"{at}[{index}]")
    elif not (value is None or isinstance(value, (str, bool, int, float, Path))):
        raise ValueError(f"{at}: must be plain data (text, numbers, lists, mappings), got {described(value)}")


class Component(OpenSection):
    """An object by its import path; every other key is an argument of its constructor."""

    type: ImportPath
