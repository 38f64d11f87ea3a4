"""CUDA graphs, which compile modes like reduce-overhead record: what runs again writes over what it returned before.

Torch has to be told where one pass over a model ends and the next begins; and whatever outlives its pass (a loss that
is logged later, values of an evaluation that are read at its end) has to be a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from lockstep.strategy.forward import Forward

RECORDED = ("reduce-overhead", "max-autotune")

_in_use = False


def returns_copies(compile: Callable[[Forward], Forward]) -> Callable[[Forward], Forward]:
    """The same compiler, for a model whose outputs are the caller's to keep."""
    global _in_use
    _in_use = True

    def compiled(forward: Forward) -> Forward:
        recorded = compile(forward)

        def copied(*inputs: Any, **keywords: Any) -> Any:
            return tree_map_only(torch.Tensor, torch.Tensor.clone, recorded(*inputs, **keywords))

        return copied

    return compiled


def next_pass() -> None:
    """A batch is at hand: what the models returned for the one before may be written over."""
    if _in_use:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
