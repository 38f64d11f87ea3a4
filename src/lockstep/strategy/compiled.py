"""Models that torch.compile works on: as a whole, or block by block."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from pydantic import ValidationError
from torch import fx, nn

from lockstep.config.training import Compile
from lockstep.errors import ConfigError
from lockstep.strategy import graphs
from lockstep.strategy.blocks import BLOCKS, find_blocks
from lockstep.strategy.by_block import Backend, by_block
from lockstep.strategy.forward import Forward, wrap_forward
from lockstep.strategy.synced_norm import SyncedBatchNorm

logger = logging.getLogger(__name__)


def how_to_compile(wanted: Any) -> Compile | None:
    """What `train.compile` and `run.setup(compile=...)` say: True, False, "blocks", or a mapping."""
    if isinstance(wanted, Compile):
        return wanted
    if isinstance(wanted, bool):
        return Compile() if wanted else None
    try:
        return Compile(blocks=True) if wanted == BLOCKS else Compile.model_validate(wanted)
    except ValidationError as problems:
        raise ConfigError(
            f"run.setup: compile must be True, False, {BLOCKS!r}, or a mapping with mode, dynamic, blocks and cache, "
            f"got {wanted!r}: {problems.errors()[0]['msg']}"
        ) from None


def compile_whole(model: nn.Module, recomputed: bool, how: Compile) -> None:
    _leave_out_what_meets_others(model)
    if recomputed:
        _dont_cut_for_ddp()
    # The function: of an nn.Sequential, Module.compile() would compile nothing, and not say so.
    wrap_forward([model], _compiler(how))


def compile_blocks(model: nn.Module, pattern: str | None, how: Compile, apart: bool = False) -> None:
    """Compile each kind of block once, which takes as long as one block takes, however many there are.

    The rest of the model (embeddings, head, a loss that it computes) is compiled too, unless blocks stay `apart`: then
    hooks around a block run between the programs, and what is outside of blocks runs eagerly. A model without blocks is
    compiled as a whole.
    """
    import torch._dynamo.config as settings

    _leave_out_what_meets_others(model)
    blocks = find_blocks(model, pattern)
    if not blocks:
        logger.info("compile: %s has no stack of blocks that are alike: compiled as a whole", type(model).__name__)
        wrap_forward([model], _compiler(how))
        return
    _dont_cut_for_ddp()
    # Torch's limit is meant for one function that is compiled again and again. Blocks that are not quite alike (every
    # other one with another attention) have one forward function, and may need a program each, twice with evaluation.
    settings.recompile_limit = max(settings.recompile_limit, 2 * len(blocks) + 8)
    if apart or how.mode in graphs.RECORDED:
        # The function, not the module's call: hooks by which parameters and gradients are exchanged stay outside.
        wrap_forward(blocks.values(), _compiler(how))
    else:
        backend = by_block(blocks.values(), _inductor(how))
        wrap_forward([model], functools.partial(torch.compile, backend=backend, dynamic=how.dynamic))
    logger.info("compiled block by block: %d blocks, from %s on", len(blocks), next(iter(blocks)))


def _compiler(how: Compile) -> Callable[[Forward], Forward]:
    compiler = functools.partial(torch.compile, mode=None if how.mode == "default" else how.mode, dynamic=how.dynamic)
    return graphs.returns_copies(compiler) if how.mode in graphs.RECORDED else compiler


def _inductor(how: Compile) -> Backend:
    def compile(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx

        compiled: Any = compile_fx(graph, inputs, config_patches=list_mode_options(how.mode, how.dynamic))
        return compiled  # type: ignore[no-any-return]

    return compile


def _leave_out_what_meets_others(model: nn.Module) -> None:
    """Layers that exchange something with other ranks run as they are written."""
    synced = [each for each in model.modules() if isinstance(each, SyncedBatchNorm)]
    wrap_forward(synced, lambda forward: torch.compiler.disable(forward))  # type: ignore[no-untyped-call]


def _dont_cut_for_ddp() -> None:
    """Have torch compile a model under DDP in one piece.

    It cuts programs where a bucket of gradients is full, so that they can be exchanged before the backward pass ends.
    Blocks are such pieces already, and what is recomputed cannot be cut.
    """
    import torch._dynamo.config as settings

    settings.optimize_ddp = False
