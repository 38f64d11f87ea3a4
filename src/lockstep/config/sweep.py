"""Sweeps: the values of paths of a config, and which trials are pruned."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, model_validator

from lockstep.config.load import read, validate, with_values
from lockstep.config.schema import RunConfig, Section
from lockstep.config.yaml_text import parse_nodes, parse_yaml
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
        given = self._given
        if len(given) != 1:
            raise ValueError(f"give one of {', '.join(type(self).model_fields)}, got {given or 'none'}")
        bounds = self.uniform or self.loguniform or self.randint
        if bounds is not None and (not all(map(math.isfinite, bounds)) or not bounds[0] < bounds[1]):
            raise ValueError(f"{self.kind}: the first number must be less than the second, got {list(bounds)}")
        if self.loguniform is not None and self.loguniform[0] <= 0:
            raise ValueError(f"loguniform: both numbers must be greater than 0, got {list(self.loguniform)}")
        return self

    @property
    def _given(self) -> list[str]:
        return [name for name in type(self).model_fields if getattr(self, name) is not None]

    @property
    def kind(self) -> str:
        (kind,) = self._given
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

    def draw(self, generator: random.Random) -> Any:
        """Returns a value of a distribution."""
        if self.choice is not None:
            return generator.choice(self.choice)
        if self.loguniform is not None:
            return math.exp(generator.uniform(*map(math.log, self.loguniform)))
        return generator.randrange(*self.randint) if self.randint else generator.uniform(*(self.uniform or (0, 0)))


# A bare list is a grid.
AnyAxis = Annotated[Axis, BeforeValidator(lambda value: {"grid": value} if isinstance(value, list) else value)]


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
    concurrency: int | None = Field(
        None, gt=0, le=100_000, description="trials at a time; null: as many as there is room for, and 1 on Ray"
    )
    seed: int = Field(0, ge=0, lt=2**32, description="of what is drawn")
    space: dict[str, AnyAxis] = Field(min_length=1)
    prune: Asha | None = None

    def points(self) -> list[dict[str, Any]]:
        """Returns the values of every trial: the grid, as often as there are samples."""
        generator = random.Random(self.seed)
        grids = {name: axis.grid for name, axis in self.space.items() if axis.grid is not None}
        return [
            {name: chosen[name] if name in chosen else axis.draw(generator) for name, axis in self.space.items()}
            for _ in range(self.samples)
            for chosen in (dict(zip(grids, values, strict=True)) for values in itertools.product(*grids.values()))
        ]


def grids_in(overrides: Iterable[str]) -> tuple[tuple[str, ...], dict[str, list[Any]]]:
    """Parts overrides from those with several values: `optimizer.lr=1e-3,1e-2`."""
    plain, grids = [], {}
    for override in overrides:
        name, _, text = override.partition("=")
        values = _several(text)
        if values is None:
            plain.append(override)
        else:
            grids[name] = values
    return tuple(plain), grids


def _several(text: str) -> list[Any] | None:
    """Returns values between commas; None for one value: quoted, a list, a mapping, a text of ", " between words."""
    if "," not in text:
        return None
    try:
        if not isinstance(parse_yaml(text), str) or text[0] in "\"'":
            return None
    except yaml.YAMLError:
        pass  # such as [1],[2]
    try:
        places: list[tuple[int, int]] = []
        values = parse_nodes(listed := f"[{text}]", lambda node: places.extend(_places(node)))
    except yaml.YAMLError:
        return None
    between = {listed[end:begin] for (_, end), (begin, _) in itertools.pairwise(places)}
    several = between == {","} or not any(isinstance(each, str) for each in values)
    return values if len(values) > 1 and several else None


def _places(node: yaml.Node) -> list[tuple[int, int]]:
    return [(each.start_mark.index, each.end_mark.index) for each in node.value]


def load_sweep(path: Path | None, config: RunConfig, grids: Mapping[str, list[Any]] | None = None) -> Sweep:
    """Reads a sweep, adds the grids of `--set`, and validates the config with each of its values.

    Without a file, trials are compared by what the best checkpoint of a run is chosen by.
    """
    keep = config.checkpoint.keep
    raw, places = read(path) if path is not None else ({"metric": keep.metric, "mode": keep.mode, "space": {}}, {})
    if grids and isinstance(raw.get("space"), dict):
        raw["space"] = {**raw["space"], **grids}
        places.update({("space", name): f"--set {name}" for name in grids})
    sweep = validate(Sweep, raw, places, str(path or "--set"))
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
