"""A mean that is not taken yet, so that it can be taken over more than one process has."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Mean:
    """A loss or metric as a sum and what it is a sum over."""

    total: Tensor
    count: Tensor | int | float
