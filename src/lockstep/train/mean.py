"""A mean that is given as a sum and what it is a sum over."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lockstep.errors import ConfigError


@dataclass(frozen=True)
class Mean:
    """A loss or a metric as a total and a count: of tokens, pixels, pairs, whatever a batch has more or fewer of.

    Gradients and values are then those of the mean over the whole global batch (or dataset): totals are added up over
    micro-batches and ranks, and so are counts, and only then the one is divided by the other.
    """

    total: Tensor
    count: Tensor | float

    def __post_init__(self) -> None:
        for name, value in (("total", self.total), ("count", self.count)):
            if isinstance(value, Tensor) and value.dim() != 0:
                raise ConfigError(
                    f"lockstep.Mean: the {name} must be a single number, got shape {list(value.shape)}: add it up first"
                )
        if not isinstance(self.total, Tensor):
            raise ConfigError(f"lockstep.Mean: the total must be a tensor, got {type(self.total).__name__}")
