"""A second backward pass through the graph of the first (create_graph=True: a gradient penalty) under fully_shard.

Torch frees the gathered parameters of a block as soon as its backward pass is over, but the graph that this pass made
refers to them. From the first pass on that makes a graph, all blocks stay gathered until an optimizer steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lockstep.runtime.moving import map_tensors
from lockstep.strategy.block_tracker import param_groups


class SecondBackward:
    def __init__(self, model: nn.Module) -> None:
        assert isinstance(model, FSDPModule)
        self._model: FSDPModule = model
        self._units = [each for each in model.modules() if isinstance(each, FSDPModule)]
        self.is_possible = False  # whether a backward pass of this step has made a graph
        model.register_forward_hook(self._watch)

    def computed(self) -> None:
        """Reduces gradients that came after torch had reduced those of their block: it occurs in both graphs."""
        if not self.is_possible:
            return
        for unit in self._units:
            for group in param_groups(unit._get_fsdp_state()):
                group.post_backward()
                group.finalize_backward()

    def release(self) -> None:
        """Parameters have changed, or are about to: what was gathered of them is freed."""
        if self.is_possible:
            self.is_possible = False
            self._model.set_reshard_after_backward(True)
            for unit in self._units:
                unit.reshard()

    def _watch(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            map_tensors(self._follow, output)

    def _follow(self, tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            tensor.register_hook(self._goes_back)  # type: ignore[no-untyped-call]
        return tensor

    def _goes_back(self, gradient: Tensor) -> None:
        if torch.is_grad_enabled() and not self.is_possible:  # only while a graph of the backward pass is made
            self.is_possible = True
            self._model.set_reshard_after_backward(False)
