"""Sweeps: the values of paths of a config, and which trials are pruned."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from lockstep.config.load import read, validate, with_values
from lockstep.config.schema import RunConfig, Section
from lockstep.errors import ConfigError

Range = tuple[float, float]


class Axis(Section):
    """The values of one path: a grid, or a distribution that is sampled."""

    grid: list[Any] | None = Field(None, min_length=1, description="every one of these")
    choice: list[Any] | None = Field(None, min_length=1, description="one of these")
    uniform: Range | None = Field(None, strict=False, description="a number between these two")
    loguniform: Range | None = Field(None, strict=False, description="the same, evenly over the orders of magnitude")
    randint: tuple[int, int] | None = Field(None, strict=False, description="a whole number: first, and one past last")

    @model_validator(mode="after")
    def _one_kind(self) -> Axis:
        given = self.model_fields_set
        if len(given) != 1:
            raise ValueError(f"give one of {', '.join(type(self).model_fields)}, got {sorted(given) or 'none'}")
        bounds = self.uniform or self.loguniform or self.randint
        if bounds is not None and (not all(map(math.isfinite, bounds)) or not bounds[0] < bounds[1]):
            raise ValueError(f"{self.kind}: the first number must be less than the second, got {list(bounds)}")
        if self.loguniform is not None and self.loguniform[0] <= 0:
            raise ValueError(f"loguniform: both numbers must be greater than 0, got {list(self.loguniform)}")
        return self

    @property
    def kind(self) -> str:
        (kind,) = self.model_fields_set
        return kind

    def values_of_range(self) -> tuple[Any, ...]:
        return tuple(self.uniform or self.loguniform or self.randint or ())

    @property
    def values(self) -> list[Any]:
        """The values, or the ends of the range."""
        if self.randint is not None:
            return [self.randint[0], self.randint[1] - 1]
        values: list[Any] = list(getattr(self, self.kind))
        return values


class Asha(Section):
    """Asynchronous successive halving: only the better trials continue at each rung."""

    type: Literal["asha"] = "asha"
    grace: int = Field(1, gt=0, description="epochs that every trial gets")
    reduction: int = Field(3, gt=1, description="one of so many goes on from a rung")
    most: int | None = Field(
        None, gt=0, description="epochs after which a trial is left alone; train.epochs if not given"
    )


class Sweep(Section):
    """What `lockstep train --sweep` reads."""

    metric: str = "val/loss"
    mode: Literal["min", "max"] = "min"
    samples: int = Field(
        1, gt=0, le=1_000_000, description="how often the space is drawn from; a grid is walked as often"
    )
    concurrency: int = Field(1, gt=0, le=100_000, description="trials at a time, each with all its workers")
    seed: int = Field(0, ge=0, lt=2**32, description="of what is drawn")
    space: dict[str, Axis] = Field(min_length=1)
    prune: Asha | None = None


def load_sweep(path: Path, config: RunConfig) -> Sweep:
    """Reads a sweep and validates the config with each of its values."""
    raw, places = read(path)
    sweep = validate(Sweep, raw, places, str(path))
    for name, axis in sweep.space.items():
        place = places.get(("space", name), str(path))
        if name.split(".")[0] in ("processes", "launch", "name"):
            raise ConfigError(f"{place}: space.{name}: all trials of a sweep run alike; set it in the config")
        for value in axis.values:
            try:
                with_values(config, {name: value})
            except ConfigError as error:
                raise ConfigError(f"{place}: space.{name}: {error}") from None
    return sweep
