"""Several optimizers of one model, stepped as one: Muon for matrices, AdamW for everything else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch.optim import Optimizer


class CombinedOptimizer(Optimizer):
    """Steps optimizers that each have some of the parameters. Their groups come in the order of the optimizers.

    It shares groups and state with them: a scheduler, a checkpoint or a strategy changes both.
    """

    _is_made = False

    def __init__(self, *optimizers: Optimizer) -> None:
        self.parts = optimizers
        groups = [group for each in optimizers for group in each.param_groups]
        super().__init__([dict(group) for group in groups], {})  # refuses a parameter that is in two of them
        self.param_groups = groups
        self.state = defaultdict(dict)
        for each in optimizers:
            self.state.update(each.state)
            each.state = self.state
        self._is_made = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        groups = iter(self.param_groups)
        for each in self.parts:
            mine = list(islice(groups, len(each.param_groups)))
            each.__setstate__({"state": self.state, "param_groups": mine})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all of them, in order."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for each in self.parts:
            each.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: add groups to an optimizer before it is combined."""
        if self._is_made:
            raise NotImplementedError("add the group to one of the optimizers, before they are combined")
        super().add_param_group(param_group)


def parts_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    return optimizer.parts if isinstance(optimizer, CombinedOptimizer) else (optimizer,)
