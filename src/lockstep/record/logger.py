"""The interface of a logger: three methods, called in this order, by one thread, on rank 0. A fourth takes samples.

    start(about)          begin, or resume: `about.kept` is what it returned the last time
    log(step, values)     numbers by name
    finish(status)        completed, stopped early, preempted, interrupted or failed
    log_sample(sample)    may be left out: an image, a text, a table

It may raise, and it may be slow: the run does not wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from lockstep.errors import ConfigError

METHODS = {"start": ("about",), "log": ("step", "values"), "finish": ("status",)}

Kind = Literal["image", "text", "table"]


@dataclass(frozen=True)
class About:
    """The run, as a logger gets it at its start."""

    name: str  # of the run: that of its folder
    id: str  # the same after every restart, and no other run's
    folder: Path
    config: dict[str, Any]  # as config.yaml has it, without keys and passwords
    step: int  # 0, or that of the checkpoint that the run resumes from
    timeout: float  # seconds that `finish` may take
    kept: dict[str, Any] = field(default_factory=dict)  # what `start` returned before a restart


@dataclass(frozen=True)
class Sample:
    """An image, a text or a table, as it is kept in the run's folder."""

    step: int
    name: str
    kind: Kind
    value: Any  # an array [height, width, channels] of uint8; a str; a Table
    file: Path  # a PNG; a text; JSON


@dataclass(frozen=True)
class Table:
    columns: list[str]
    rows: list[list[Any]]


class Logger(Protocol):
    def start(self, about: About) -> Mapping[str, Any] | None:
        """Connects. Plain data that is returned is kept in the run's folder and is in `about.kept` after a restart; a
        `url` in it is shown."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Gets every number of a name once, also where an interrupted run computes a step a second time.

        With a class attribute `takes_back = True`, `start` drops the steps after `about.step` instead. With
        `delay = 30.0`, what it was given less than so many seconds before a kill is sent again.
        """

    def finish(self, status: str) -> None: ...


def check_methods(cls: Any, path: str, where: str) -> None:
    """Raises ConfigError if a class lacks a method of a logger."""
    missing = [name for name in METHODS if not callable(getattr(cls, name, None))]
    if missing:
        signature = f"{missing[0]}({', '.join(('self', *METHODS[missing[0]]))})"
        raise ConfigError(f"{path}: {where} does not define {signature}")
