"""Sections about training: optimizers and parameter groups, schedules, EMA, torch.compile, data."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from lockstep.config.values import Component, ImportPath, Interval, OpenSection, Section, as_mapping, require

EVERY_STEP = Interval(1, "step")
EVERY_EPOCH = Interval(1, "epoch")

Shape = Literal["constant", "linear", "cosine", "polynomial"]


# Patterns of parameter names, matched like file names.
Patterns = Annotated[
    tuple[str, ...],
    Field(strict=False),
    require(lambda given: given and all(given), "give at least one pattern of parameter names, such as encoder.*"),
    BeforeValidator(
        lambda value: [value] if isinstance(value, str) else value, json_schema_input_type=str | tuple[str, ...]
    ),
]


def of_torch(package: str) -> BeforeValidator:
    """Let a bare name stand for a class of torch: AdamW is torch.optim.AdamW."""
    return BeforeValidator(
        lambda value: (
            f"{package}.{value}" if isinstance(value, str) and re.fullmatch(r"[A-Z]\w*", value, re.ASCII) else value
        )
    )


class ParameterGroup(OpenSection):
    """Parameters by name, with their own arguments of the optimizer."""

    match: Patterns


class OtherOptimizer(Component):
    """The optimizer of what is no matrix; every other key is an argument of its constructor."""

    type: Annotated[ImportPath, of_torch("torch.optim")] = "torch.optim.AdamW"
    match: Patterns | None = Field(
        None, description="its parameters, besides vectors; by default embeddings, and all outside of repeated blocks"
    )


class Optimizer(Component):
    """An optimizer; every other key is an argument of its constructor."""

    type: Annotated[ImportPath, of_torch("torch.optim")]
    others: Annotated[OtherOptimizer, as_mapping(OtherOptimizer)] | None = Field(
        None, description="a second optimizer, for what is no matrix: with Muon"
    )
    groups: Annotated[tuple[ParameterGroup, ...], Field(strict=False)] | None = Field(
        None, description="parameters with their own arguments; the first match counts"
    )


class Scheduler(Component):
    """A torch learning-rate scheduler; `monitor` names the metric for schedulers like ReduceLROnPlateau."""

    type: Annotated[ImportPath, of_torch("torch.optim.lr_scheduler")]
    every: Interval = EVERY_EPOCH
    monitor: str | None = None


def _whole(value: Any) -> Any:
    """Lets 1e9 stand for a whole number: YAML reads it as a float, `--set` may give it as text."""
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?(e\+?\d{1,2})?", value):
        value = float(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


Tokens = Annotated[int, BeforeValidator(_whole, json_schema_input_type=int | float), Field(gt=0)]


class Stage(Section):
    """A size, and how long it lasts; the last stage is for the rest of the run."""

    size: int = Field(gt=0)
    steps: int | None = Field(None, gt=0)
    tokens: Tokens | None = None


class Ramp(Section):
    """A size that rises from `start` to `end` in equal parts of so many steps or tokens."""

    start: int = Field(gt=0)
    end: int | None = Field(None, gt=0)
    by: int | None = Field(None, gt=0, description="how much it rises at a time; null: by its start")
    steps: int | None = Field(None, gt=0)
    tokens: Tokens | None = None


AnyRamp = Annotated[
    Annotated[Ramp, Tag("(ramp)")] | Annotated[tuple[Stage, ...], Field(strict=False, min_length=2), Tag("(stages)")],
    Discriminator(lambda value: "(stages)" if isinstance(value, (list, tuple)) else "(ramp)"),
]
_MOST_PARTS = 10_000  # of a ramp


@dataclass(frozen=True)
class Sizes:
    """A size as a function of how many steps are done, or how many tokens."""

    by_tokens: bool
    until: tuple[int, ...]  # where each size but the last ends
    sizes: tuple[int, ...]

    def at(self, steps: int, tokens: int) -> int:
        return self.sizes[bisect_right(self.until, tokens if self.by_tokens else steps)]

    @classmethod
    def of(cls, ramp: Ramp | tuple[Stage, ...], name: str, end: int | None = None) -> Sizes:
        """Returns the sizes of a ramp to `end`; without one, the ramp itself says where it ends."""
        lasting, rest_of_run = ((ramp,), None) if isinstance(ramp, Ramp) else (ramp[:-1], ramp[-1])
        steps, tokens = ([getattr(each, unit) for each in lasting] for unit in ("steps", "tokens"))
        by_tokens = not any(steps)
        lengths = tokens if by_tokens else steps
        if (
            not all(lengths)
            or (any(steps) and any(tokens))
            or (rest_of_run and (rest_of_run.steps or rest_of_run.tokens))
        ):
            raise ValueError(
                f"{name}: give its steps or its tokens; of stages, all but the last have steps, or all have tokens"
            )
        if isinstance(ramp, Ramp):
            last, by = ramp.end or end or 0, ramp.by or ramp.start
            parts, rest = divmod(last - ramp.start, by)
            if rest or not 0 < parts <= min(lengths[0], _MOST_PARTS):
                raise ValueError(
                    f"{name}: {ramp.start} cannot rise to {last or 'no end'} by {by} at a time, in {lengths[0]} "
                    f"{'tokens' if by_tokens else 'steps'}: the rise must be a multiple of `by`, and not be too fast"
                )
            lengths = [lengths[0] * (part + 1) // parts - lengths[0] * part // parts for part in range(parts)]
            sizes = tuple(range(ramp.start, last + 1, by))
        else:
            sizes = tuple(each.size for each in ramp)
        if end is not None and not sizes[-1] == end == max(sizes):
            raise ValueError(f"{name}: it ends at {sizes[-1]}, but batch_size is {end}, at which it must end")
        return cls(by_tokens, tuple(accumulate(lengths)), sizes)


def _warmup(value: Any) -> Any:
    if isinstance(value, str) and re.fullmatch(r"\d+ steps?", value):
        value = int(value.split()[0])
    if isinstance(value, str) and (match := re.fullmatch(r"([\d.e+]+) tokens", value)):
        count = _whole(match[1])
        if isinstance(count, int) and count > 0:
            return f"{count} tokens"
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?\s*%", value) and float(value.rstrip("% ")) <= 100:
        return value
    raise ValueError('must be a number of steps, 500, of tokens, "1e8 tokens", or a fraction of the run, "5%"')


class Schedule(Section):
    """A schedule by name: a function of the step and the number of steps, applied every step."""

    type: Shape
    warmup: Annotated[int | str, BeforeValidator(_warmup)] = Field(
        0, description='steps in which the learning rate rises to its maximum, "1e8 tokens", or a part of the run: "5%"'
    )
    final: float = Field(0.0, ge=0, le=1, description="the learning rate at the end, as a fraction of the maximum")
    power: float = Field(1.0, gt=0, description="the exponent of a polynomial schedule")

    @model_validator(mode="after")
    def _fits_its_shape(self) -> Schedule:
        if self.type == "constant" and self.final:
            raise ValueError(f"a constant schedule stays where it is, so it has no final: {self.final:g}")
        if self.type != "polynomial" and self.power != 1:
            raise ValueError(f"power: {self.power:g} is for type: polynomial, but the type is {self.type}")
        return self

    def needs_total(self) -> bool:
        """Whether the schedule depends on the length of the run."""
        return self.type != "constant" or (isinstance(self.warmup, str) and not self.warms_up_by_tokens)

    @property
    def warms_up_by_tokens(self) -> bool:
        return isinstance(self.warmup, str) and self.warmup.endswith(" tokens")


def _kind(value: Any) -> str:
    if isinstance(value, Section):
        return "(schedule)" if isinstance(value, Schedule) else "(scheduler)"
    name = value.get("type") if isinstance(value, dict) else None
    # A single lower-case word cannot be an import path.
    return "(schedule)" if isinstance(name, str) and re.fullmatch(r"[a-z_]\w*", name) else "(scheduler)"


# Tags are in parentheses so that no key can be mistaken for one.
AnyScheduler = Annotated[
    Annotated[Schedule, Tag("(schedule)")] | Annotated[Scheduler, Tag("(scheduler)")], Discriminator(_kind)
]


_IN_STEPS = require(
    lambda interval: interval.unit == "step", 'averages are taken every so many steps: write for example "10 steps"'
)


class Ema(Section):
    """An exponential moving average of the weights."""

    decay: float = Field(gt=0, lt=1, description="the factor of the old average in each update")
    every: Annotated[Interval, _IN_STEPS] = EVERY_STEP
    warmup: bool = Field(True, description="limit the decay of update n to (1 + n) / (10 + n)")
    measured: bool = Field(True, alias="validate", description="also validate the averaged weights, as val/ema/...")


AnyEma = Annotated[Ema, as_mapping(Ema, "decay", float)]


class Compile(Section):
    """Options of torch.compile."""

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    dynamic: bool | None = Field(None, description="true: one program for all shapes; false: one each; null: automatic")
    blocks: bool = Field(False, description="compile each kind of block once instead of the whole model")
    cache: str | None = Field(
        None, min_length=1, description="a folder for compiled code; defaults to lockstep/compiled in the user's cache"
    )


AnyCompile = Annotated[
    Annotated[bool | Literal["blocks"], Tag("(short)")] | Annotated[Compile, Tag("(mapping)")],
    Discriminator(lambda value: "(mapping)" if isinstance(value, (dict, Compile)) else "(short)"),
    require(
        lambda value: isinstance(value, (bool, dict, Compile)) or value == "blocks",
        "must be true, false, blocks, or a mapping with mode, dynamic, blocks and cache",
        BeforeValidator,
    ),
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
    """The order of examples in an epoch."""

    type: Literal["shuffled", "sequential", "weighted", "buckets", "own"]
    replacement: bool = Field(True, description="weighted: draw with replacement")
    count: int | None = Field(None, gt=0, description="weighted: examples per epoch; null: the size of the dataset")
    weights: str | None = Field(
        None, description="weighted: a NumPy file (.npy) to use instead of the task's weights()"
    )
    window: int | None = Field(None, gt=0, description="buckets: batches that are sorted by length together; null: 100")
    lengths: str | None = Field(None, description="buckets: a NumPy file (.npy) to use instead of the task's lengths()")

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
    workers: int = Field(0, ge=0, le=1024)
    pin_memory: bool | None = Field(None, description="use page-locked host memory; null: with CUDA")
    prefetch: int | None = Field(None, gt=0, le=10_000, description="batches that each worker fetches in advance")
    persistent_workers: bool = Field(False, description="keep workers from pass to pass, with the dataset of the first")
    drop_last: bool = False
    shuffle: bool = Field(True, description="false means order: sequential")
    shuffle_buffer: int | None = Field(
        None, gt=1, description="streams: shuffle the examples of each shard in blocks of this size"
    )
    order: Annotated[Ordering, as_mapping(Ordering)] | None = Field(
        None, description="defaults to the task's order, then to shuffled"
    )
    split: Split | None = None

    @model_validator(mode="before")
    @classmethod
    def _order_and_shuffle(cls, given: Any) -> Any:
        """Keeps `order` and `shuffle` consistent, also in the resolved config."""
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
