"""What trains the weights, by name: optimizers and their groups, schedules of the rate, averages, compiling."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from lockstep.config.values import Component, ImportPath, Interval, Section, as_mapping

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


class Split(Section):
    """Fractions of the task's train_data that become training, validation and test data."""

    train: float = Field(gt=0, le=1)
    val: float = Field(0.0, ge=0, lt=1)
    test: float = Field(0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _sums_to_one(self) -> Split:
        total = self.train + self.val + self.test
        if not math.isclose(total, 1.0, abs_tol=1e-6):
            raise ValueError(
                f"the fractions must sum to one, but train {self.train:g} + val {self.val:g} + test {self.test:g} "
                f"= {total:g}"
            )
        return self


class Ordering(Section):
    """In which order an epoch visits its examples."""

    type: Literal["shuffled", "sequential", "weighted", "buckets", "own"]
    replacement: bool = Field(True, description="weighted: whether an example that was drawn may be drawn again")
    count: int | None = Field(None, gt=0, description="weighted: examples in an epoch; as many as there are")
    weights: str | None = Field(
        None, description="weighted: a file of numpy's (.npy), in place of the task's weights()"
    )
    window: int | None = Field(None, gt=0, description="buckets: batches that are sorted by length together; 100")
    lengths: str | None = Field(None, description="buckets: a file of numpy's (.npy), in place of the task's lengths()")

    @model_validator(mode="after")
    def _of_the_type(self) -> Ordering:
        for type_, names in (("weighted", ("count", "weights")), ("buckets", ("window", "lengths"))):
            given = [name for name in names if getattr(self, name) is not None]
            if given and self.type != type_:
                raise ValueError(f"{given[0]} is for type: {type_}, but the type is {self.type}")
        if not self.replacement and self.type != "weighted":
            raise ValueError(f"replacement is for type: weighted, but the type is {self.type}")
        return self


class Data(Section):
    workers: int = Field(0, ge=0)
    pin_memory: bool | None = Field(None, description="page-locked host memory; where not given, with CUDA")
    prefetch: int | None = Field(None, gt=0, le=10_000, description="batches that every worker fetches ahead")
    drop_last: bool = False
    shuffle: bool = Field(True, description="false is short for order: sequential")
    shuffle_buffer: int | None = Field(
        None, gt=1, description="for streams: shuffle the examples of each shard in blocks of so many"
    )
    order: Annotated[Ordering, as_mapping(Ordering)] | None = Field(
        None, description="where not given: the task's own, if it has one, else shuffled"
    )
    split: Split | None = None

    @model_validator(mode="before")
    @classmethod
    def _order_and_shuffle(cls, given: Any) -> Any:
        """Both are kept so that they say the same, also in the config that a run writes down."""
        if not isinstance(given, dict) or given.get("order") is None:
            return given
        order, shuffle = given["order"], given.get("shuffle")
        asked = order.get("type") if isinstance(order, dict) else getattr(order, "type", order)
        if asked == "sequential" and shuffle is None:
            return {**given, "shuffle": False}
        if isinstance(shuffle, bool) and shuffle == (asked == "sequential"):
            raise ValueError(
                f"shuffle: {str(shuffle).lower()} and order: {asked} contradict each other: leave shuffle out"
            )
        return given

    @model_validator(mode="after")
    def _prefetch_needs_workers(self) -> Data:
        if self.prefetch is not None and self.workers == 0:
            raise ValueError(f"prefetch: {self.prefetch} needs workers to do it; set data.workers to 1 or more")
        return self
