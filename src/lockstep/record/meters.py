"""Collects metrics of a rank without waiting for the device, and sums them exactly over ranks."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lockstep.errors import ConfigError
from lockstep.runtime.base import Runtime
from lockstep.shown import brief

# name -> (weighted sum, weight)
Sums = dict[str, list[float]]
# The same of one rank, each number in parts that add up to it without rounding.
Parts = dict[str, list[list[float]]]


class Bad(NamedTuple):
    """The first loss that is not finite."""

    step: int
    value: float


class Entry(NamedTuple):
    """One value: a mean over `count` examples, or a total over `count`."""

    name: str
    step: int
    value: Any
    count: Any
    is_total: bool


@dataclass(frozen=True)
class Reading:
    """Numbers on their way to the host: whether they have arrived, and how to wait for them."""

    arrived: Callable[[], bool]
    read: Callable[[], Found]


@dataclass(frozen=True)
class Found:
    """The sums of everything noted, and the first loss that is not finite."""

    parts: Parts
    bad: Bad | None


class Meter:
    """Values of this rank since the last reading, kept on their device until they are read."""

    def __init__(self, runtime: Runtime | None = None) -> None:
        self._runtime = runtime
        self._entries: list[Entry] = []
        self._losses: list[tuple[int, Any]] = []
        # The tensor that was noted last, its version and its copy.
        self._last: tuple[Any, int, Any] = (lambda: None, 0, None)

    def add(self, step: int, examples: int, values: Mapping[str, Any]) -> None:
        """Notes values that are means over so many examples."""
        for name, value in values.items():
            self._entries.append(Entry(name, step, self._kept(name, value), examples, False))

    def add_total(self, step: int, name: str, total: Any, count: Any) -> None:
        """Notes a sum, and what it is a sum over."""
        self._entries.append(Entry(name, step, self._kept(name, total), self._kept(name, count), True))

    def add_loss(self, step: int, loss: torch.Tensor) -> None:
        """Notes a loss that gradients were computed of, which has to be finite."""
        self._losses.append((step, self._kept("loss", loss)))

    def read(self, leave_out_bad: bool = False) -> Found:
        """Returns the sums, with one wait for the device if possible, and the first loss that is not finite.

        `leave_out_bad` leaves values that are not finite out of the sums and reports none.
        """
        return self.begin_reading(leave_out_bad).read()

    def begin_reading(self, leave_out_bad: bool = False) -> Reading:
        """Starts to copy everything noted so far to the host; the reading waits for it."""
        entries, losses = self._entries, self._losses
        self._entries, self._losses = [], []
        wanted = [each.value for each in entries] + [each.count for each in entries] + [loss for _, loss in losses]
        coming = Numbers(wanted, self._runtime)

        def finish() -> Found:
            numbers = coming.read()
            values, counts = numbers[: len(entries)], numbers[len(entries) : 2 * len(entries)]
            found = list(zip((step for step, _ in losses), numbers[2 * len(entries) :], strict=True))
            bad = [] if leave_out_bad else [Bad(*each) for each in found if not math.isfinite(each[1])]
            return Found(_summed(entries, values, counts, leave_out_bad), bad[0] if bad else None)

        return Reading(coming.arrived, finish)

    def _kept(self, name: str, value: Any) -> Any:
        """Copies a value, which the loop may write to later. A loss that is logged and trained on is copied once."""
        if not isinstance(value, torch.Tensor):
            return number(value, f"run.log({name}=...)")
        if value.is_cpu and type(value) is torch.Tensor and value.numel() == 1 and not value.is_complex():
            return value.item()
        version = -1 if value.is_inference() else value._version
        if self._last[0]() is value and self._last[1] == version >= 0:
            return self._last[2]
        if value.numel() != 1:
            raise ConfigError(f"{name!r}: only single numbers can be logged, got shape {list(value.shape)}; log a mean")
        kept = value.detach().clone()
        self._last = (weakref.ref(value), version, kept)
        return kept


def number(value: Any, name: str) -> float:
    """Returns a value as a number, or refuses it by name."""
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        if not isinstance(value, (str, bytes)):  # float() would take digits
            return float(value)
    raise ConfigError(f"{name}: needs a single number, got {brief(repr(value), 60)}")


class Totals:
    """Sums over all ranks since some boundary, unrounded until a mean is taken: a checkpoint changes no bit of it."""

    def __init__(self) -> None:
        self.sums: Parts = {}

    def add(self, ranks: Iterable[Parts]) -> None:
        for parts in ranks:
            for name, added in parts.items():
                have = self.sums.get(name, [[], []])
                self.sums[name] = [parts_of([*old, *new]) for old, new in zip(have, added, strict=True)]

    def means(self) -> dict[str, float]:
        return {name: total / weight for name, (total, weight) in added_up([self.sums]).items() if weight}

    def take(self) -> dict[str, float]:
        """Returns the means and resets the sums."""
        means, self.sums = self.means(), {}
        return means


def parts_of(values: Iterable[float]) -> list[float]:
    """Returns few numbers that have exactly the same sum: how values fall on ranks then changes no bit of it."""
    parts: list[float] = []
    coming = iter(values)
    for value in coming:
        if not math.isfinite(value):
            return [sum([*parts, value, *coming])]
        kept = 0
        for part in parts:
            larger, smaller = (value, part) if abs(value) >= abs(part) else (part, value)
            value = larger + smaller
            if (rest := smaller - (value - larger)) != 0:
                parts[kept] = rest
                kept += 1
        parts[kept:] = [value]
    return parts


def added_up(ranks: Iterable[Parts]) -> Sums:
    """Returns the sums over all ranks, each rounded once."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for parts in ranks:
        for name, (total, weight) in parts.items():
            have = found.setdefault(name, ([], []))
            have[0].extend(total)
            have[1].extend(weight)
    return {name: [sum_of(total), sum_of(weight)] for name, (total, weight) in found.items()}


def sum_of(values: list[float]) -> float:
    """Returns the sum, rounded once; what is not finite stays so, without an error."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


class Numbers:
    """Single values as numbers, with one wait for the device if possible; where it can, copies are under way."""

    def __init__(self, values: list[Any], runtime: Runtime | None = None) -> None:
        self._values = values
        self._tensors = list({id(each): each for each in values if isinstance(each, torch.Tensor)}.values())
        self._coming = runtime.copy_to_host(self._tensors) if runtime is not None and self._tensors else None

    def arrived(self) -> bool:
        return self._coming is None or self._coming.arrived()

    def read(self) -> list[float]:
        found = self._coming.read() if self._coming is not None else _read_now(self._tensors)
        known = dict(zip(map(id, self._tensors), found, strict=True))
        return [known[id(each)] if isinstance(each, torch.Tensor) else float(each) for each in self._values]


def _read_now(tensors: list[torch.Tensor]) -> list[float]:
    kinds = {(each.device, each.dtype) for each in tensors}
    # Stacking them on an XLA device would compile one more program for every number of values.
    if len(kinds) != 1 or any(each.device.type == "xla" for each in tensors):
        return [float(each) for each in tensors]
    return [float(each) for each in torch.stack([each.reshape(()) for each in tensors]).double().cpu().tolist()]


def _summed(entries: list[Entry], values: list[float], counts: list[float], leave_out_bad: bool) -> Parts:
    found: dict[str, list[tuple[float, float]]] = {}
    for entry, value, count in zip(entries, values, counts, strict=True):
        kept = found.setdefault(entry.name, [])
        if count and not (leave_out_bad and not math.isfinite(value)):
            kept.append((value if entry.is_total else value * count, count))
    return {
        name: [parts_of(total for total, _ in kept), parts_of(count for _, count in kept)]
        for name, kept in found.items()
    }
