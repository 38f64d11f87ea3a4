"""Numbers about a run: collected without waiting for the device, and summed exactly over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from lockstep.errors import ConfigError

# name -> (weighted sum, weight)
Sums = dict[str, list[float]]


class Meter:
    """Values of this rank since the last reading, kept where they were computed until somebody reads them."""

    def __init__(self) -> None:
        self._values: dict[str, list[tuple[int, int, Any]]] = {}

    def add(self, step: int, examples: int, values: Mapping[str, Any]) -> None:
        """Note values that are means over so many examples."""
        for name, value in values.items():
            kept = value.detach() if isinstance(value, torch.Tensor) else value
            if isinstance(kept, torch.Tensor) and kept.numel() != 1:
                raise ConfigError(
                    f"{name!r}: only single numbers can be logged, got shape {list(kept.shape)}; log a mean"
                )
            self._values.setdefault(name, []).append((step, examples, kept))

    def read(self, leave_out_bad: bool = False) -> tuple[Sums, tuple[int, float] | None]:
        """Weighted sums, with one wait for the device per name, and the first step whose loss is not finite.

        With `leave_out_bad`, values that are not finite are left out of the sums, and nothing is called bad.
        """
        values, self._values = self._values, {}
        sums: Sums = {}
        first_bad: tuple[int, float] | None = None
        for name, entries in values.items():
            found = numbers([value for _, _, value in entries])
            counted = [(number, n) for number, (_, n, _) in zip(found, entries, strict=True) if n]
            if leave_out_bad:
                counted = [(number, n) for number, n in counted if math.isfinite(number)]
            sums[name] = [math.fsum(number * n for number, n in counted), float(sum(n for _, n in counted))]
            if name == "loss" and not leave_out_bad:
                bad = [(step, number) for number, (step, _, _) in zip(found, entries, strict=True)
                       if not math.isfinite(number)]  # fmt: skip
                first_bad = bad[0] if bad else None
        return sums, first_bad


class Totals:
    """Sums over all ranks since some boundary."""

    def __init__(self) -> None:
        self.sums: Sums = {}

    def add(self, sums: Mapping[str, Iterable[float]]) -> None:
        for name, (total, weight) in sums.items():
            have = self.sums.setdefault(name, [0.0, 0.0])
            have[0] += total
            have[1] += weight

    def means(self) -> dict[str, float]:
        return {name: total / weight for name, (total, weight) in self.sums.items() if weight}

    def take(self) -> dict[str, float]:
        """The means, starting anew."""
        means, self.sums = self.means(), {}
        return means


def numbers(values: list[Any]) -> list[float]:
    """Single values as numbers, with one wait for the device where it can be."""
    tensors = [each for each in values if isinstance(each, torch.Tensor)]
    # Putting them together on an XLA device would be one more program to compile, for every number of values.
    if len(tensors) < len(values) or any(each.device.type == "xla" for each in tensors):
        return [float(value) for value in values]
    return [float(number) for number in torch.stack([v.reshape(()) for v in tensors]).double().cpu().tolist()]
