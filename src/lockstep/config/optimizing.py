"""What trains the weights, by name: optimizers and their groups, schedules of the rate, averages, compiling."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from lockstep.config.section import Component, Section, as_mapping
from lockstep.config.values import ImportPath, Interval

EVERY_STEP = Interval(1, "step")
EVERY_EPOCH = Interval(1, "epoch")

Shape = Literal["constant", "linear", "cosine", "polynomial"]
SHAPES: tuple[Shape, ...] = get_args(Shape)


def _listed(value: Any) -> Any:
    """One pattern stands for a list of it."""
    return [value] if isinstance(value, str) else value


def _some(patterns: tuple[str, ...]) -> tuple[str, ...]:
    if not patterns or not all(patterns):
        raise ValueError("give at least one pattern of parameter names, such as encoder.*")
    return patterns


# Over the names of parameters, matched as file names are.
Patterns = Annotated[
    tuple[str, ...],
    Field(strict=False),
    AfterValidator(_some),
    BeforeValidator(_listed, json_schema_input_type=str | tuple[str, ...]),
]


def of_torch(package: str) -> BeforeValidator:
    """Torch's own by their bare names: AdamW is torch.optim.AdamW."""
    return BeforeValidator(
        lambda value: (
            f"{package}.{value}" if isinstance(value, str) and re.fullmatch(r"[A-Z]\w*", value, re.ASCII) else value
        )
    )


class ParameterGroup(Section):
    """Parameters by their names, with arguments of the optimizer that are their own."""

    model_config = ConfigDict(extra="allow", frozen=True)

    match: Patterns

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Optimizer(Component):
    """An optimizer; every further key is an argument of its constructor."""

    type: Annotated[ImportPath, of_torch("torch.optim")]
    groups: Annotated[tuple[ParameterGroup, ...], Field(strict=False)] | None = Field(
        None, description="parameters with arguments of their own; the first that matches counts"
    )


class Scheduler(Component):
    """A learning-rate scheduler of torch's kind, stepped every so often; `monitor` feeds those that watch a metric."""

    type: Annotated[ImportPath, of_torch("torch.optim.lr_scheduler")]
    every: Interval = EVERY_EPOCH
    monitor: str | None = None


def _warmup(value: Any) -> Any:
    if isinstance(value, str) and re.fullmatch(r"\d+ steps?", value):
        value = int(value.split()[0])
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?\s*%", value) and float(value.rstrip("% ")) <= 100:
        return value
    raise ValueError('must be a number of steps, 500, or a share of the run, "5%"')


class Schedule(Section):
    """A schedule by its name: a function of the step and of how many steps the run has, stepped every step."""

    type: Shape
    warmup: Annotated[int | str, BeforeValidator(_warmup)] = Field(
        0, description='steps in which the rate rises to its full height, or a share of the run: "5%"'
    )
    final: float = Field(0.0, ge=0, le=1, description="what is left of the rate at the end, as a fraction of it")
    power: float = Field(1.0, gt=0, description="of a polynomial")

    @model_validator(mode="after")
    def _fits_its_shape(self) -> Schedule:
        if self.type == "constant" and self.final:
            raise ValueError(f"a constant schedule stays where it is, so it has no final: {self.final:g}")
        if self.type != "polynomial" and self.power != 1:
            raise ValueError(f"power: {self.power:g} is for type: polynomial, but the type is {self.type}")
        return self

    def needs_total(self) -> bool:
        """Whether it can only be known by whoever knows how long the run is."""
        return self.type != "constant" or isinstance(self.warmup, str)


def _kind(value: Any) -> str:
    if isinstance(value, Section):
        return "(schedule)" if isinstance(value, Schedule) else "(scheduler)"
    name = value.get("type") if isinstance(value, dict) else None
    # What is one lower-case word is no import path: it is one of the names, or meant to be.
    return "(schedule)" if isinstance(name, str) and re.fullmatch(r"[a-z_]\w*", name) else "(scheduler)"


# In brackets: no key is written like that.
AnyScheduler = Annotated[
    Annotated[Schedule, Tag("(schedule)")] | Annotated[Scheduler, Tag("(scheduler)")], Discriminator(_kind)
]


def _in_steps(interval: Interval) -> Interval:
    if interval.unit != "step":
        raise ValueError('averages are taken every so many steps: write for example "10 steps"')
    return interval


class Ema(Section):
    """An exponential moving average of the weights, kept beside them."""

    decay: float = Field(gt=0, lt=1, description="what is left of the average in every update")
    every: Annotated[Interval, AfterValidator(_in_steps)] = EVERY_STEP
    warmup: bool = Field(True, description="update n decays by (1 + n) / (10 + n) at most: first values fade sooner")
    measured: bool = Field(True, alias="validate", description="measure the averaged weights, too, as val/ema/...")


AnyEma = Annotated[Ema, as_mapping(Ema, "decay", float)]


class Compile(Section):
    """How torch.compile works on the model."""

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    dynamic: bool | None = Field(None, description="null: torch finds out; true: for all shapes; false: one by one")
    blocks: bool = Field(False, description="each kind of block once, instead of the whole model")
    cache: str | None = Field(
        None, min_length=1, description="a folder for compiled code; lockstep/compiled in the user's cache if not given"
    )


def _compile(value: Any) -> Any:
    if isinstance(value, (bool, dict, Compile)) or value == "blocks":
        return value
    raise ValueError("must be true, false, blocks, or a mapping with mode, dynamic, blocks and cache")


AnyCompile = Annotated[
    Annotated[bool | Literal["blocks"], Tag("(short)")] | Annotated[Compile, Tag("(mapping)")],
    Discriminator(lambda value: "(mapping)" if isinstance(value, (dict, Compile)) else "(short)"),
    BeforeValidator(_compile),
]
