"""What a host is told: who takes part, what to train, in which folder. It travels as JSON and is validated there."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from lockstep.config.load import from_plain
from lockstep.config.schema import RunConfig, Section
from lockstep.config.values import variable_name


class Host(Section):
    """One of the hosts of a pod."""

    name: str
    address: str = Field(description="where the others reach it")
    processes: int = Field(gt=0, description="how many it would start by itself: one per device")


class Order(Section):
    """A job: the first host leads it, and has rank 0 and the run's folder."""

    pod: str
    job: str
    index: int = Field(ge=0, description="which of the hosts this one is")
    hosts: tuple[Host, ...] = Field(strict=False)
    nodes: int = Field(gt=0, description="how many of them train; the others are spares")
    port: int = Field(gt=0, lt=65536, description="of the store, on the first host")
    secret: str = Field(repr=False)
    config: dict[str, Any]
    folder: str = Field(description="the run's, on every host")
    shared: bool = Field(False, description="that folder was named as one that all hosts see")
    url: str | None = Field(None, description="of the run's folder in object storage, which that folder stands for")
    env: dict[str, str] = Field({}, repr=False)

    @property
    def head(self) -> Host:
        return self.hosts[0]

    @property
    def here(self) -> Host:
        return self.hosts[self.index]

    def run_config(self) -> RunConfig:
        return from_plain(self.config, "the order")


class Share(Section):
    """The ranks of one host: so many, from a first one on."""

    host: int
    first: int
    count: int

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.count)


def shares(order: Order, chosen: list[int]) -> list[Share]:
    """Which ranks the chosen hosts have: `processes` spread evenly over them, or what each has devices for."""
    total = order.config.get("processes", "auto")
    found, first = [], 0
    for slot, index in enumerate(chosen):
        if total == "auto":
            count = order.hosts[index].processes
        else:
            count = int(total) // len(chosen) + (slot < int(total) % len(chosen))
        found.append(Share(host=index, first=first, count=count))
        first += count
    return found


def checked_env(env: dict[str, str]) -> dict[str, str]:
    return {variable_name(name): value for name, value in env.items()}
