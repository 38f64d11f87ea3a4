"""Recomputes activations in the backward pass, instead of keeping them until then."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # all that keep running statistics; their kernels change no version

from lockstep.runtime.base import Runtime
from lockstep.strategy.blocks import BLOCKS, Forward, find_blocks, wrap_forward

logger = logging.getLogger(__name__)


def checkpoint_activations(
    model: nn.Module, which: str, blocks: str | None, runtime: Runtime, to_be_compiled: bool = False
) -> None:
    """Lets the blocks of a model (or the modules of a pattern) keep only their inputs for the backward pass.

    Every number stays the same, bit for bit: dropout draws what it drew, and running statistics move once. `blocks` is
    the pattern of strategy.blocks. With `to_be_compiled`, torch.compile is to be put around it.
    """
    found = (
        find_blocks(model, blocks) if which == BLOCKS else find_blocks(model, which, "train.activation_checkpointing")
    )
    if not found:
        logger.warning(
            "train.activation_checkpointing: blocks: %s has no stack of blocks that are alike, so that nothing "
            "is recomputed; name "
            "modules by a pattern (strategy.blocks, or train.activation_checkpointing itself)",
            type(model).__name__,
        )
        return
    for with_buffers, recomputed in ((True, _recomputed_with_buffers), (False, _recomputed)):
        modules = [each for each in found.values() if _has_buffers(each) is with_buffers]
        wrap_forward(modules, functools.partial(recomputed, runtime, to_be_compiled))
    logger.info("recomputed in the backward pass: %d modules, from %s on", len(found), next(iter(found)))


def _has_buffers(module: nn.Module) -> bool:
    return next(module.buffers(), None) is not None


def _recomputed(runtime: Runtime, to_be_compiled: bool, forward: Forward) -> Forward:
    # Compiled from outside, the passes become one program each, and the second leaves out what nobody needs. Where that
    # program cannot be made (a graph break), torch runs all that it recomputes as it is, unless it is compiled itself.
    inside = torch.compile(forward) if to_be_compiled else forward

    @functools.wraps(forward)
    def again(module: nn.Module, *inputs: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(module, *inputs, **keywords)
        return runtime.recomputed(_called, inside, module, inputs, keywords)

    return again


def _recomputed_with_buffers(runtime: Runtime, to_be_compiled: bool, forward: Forward) -> Forward:
    inside = torch.compile(forward) if to_be_compiled else forward

    @functools.wraps(forward)
    def again(module: nn.Module, *inputs: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return inside(module, *inputs, **keywords)
        return runtime.recomputed(_Pass(inside, module), inputs, keywords)

    if to_be_compiled:  # what is done with buffers is for Python alone
        again = torch.compiler.disable(again, recursive=False)  # type: ignore[no-untyped-call]
    return again


def _called(forward: Forward, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Keywords come as one argument: torch looks among those for the devices whose generators it has to set back."""
    return forward(module, *inputs, **keywords)


class _Pass:
    """One forward pass of a module, and its repetitions.

    What a pass changes besides its output (the running statistics of BatchNorm, the vectors of a spectral norm) is
    changed by the first alone, and all others find it as the first one did.
    """

    def __init__(self, forward: Forward, module: nn.Module) -> None:
        self._forward, self._module = forward, module
        # Buffers that the first pass changed, and what they were before; None before it.
        self._changed: list[tuple[nn.Module, str, Tensor]] | None = None

    def __call__(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if self._changed is None:
            return self._first(inputs, keywords)
        with self._as_it_was(self._changed):
            return self._forward(self._module, *inputs, **keywords)

    def _first(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        before = [
            (owner, name, buffer, buffer._version, buffer.detach().clone())
            for owner in self._module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        output = self._forward(self._module, *inputs, **keywords)
        self._changed = [
            (owner, name, value)
            for owner, name, buffer, version, value in before
            if isinstance(owner, _NormBase) or owner._buffers.get(name) is not buffer or buffer._version != version
        ]
        return output

    @staticmethod
    @contextlib.contextmanager
    def _as_it_was(changed: list[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
        now = [owner._buffers.get(name) for owner, name, _ in changed]
        for owner, name, value in changed:
            owner._buffers[name] = value.clone()
        try:
            yield
        finally:
            for (owner, name, _), buffer in zip(changed, now, strict=True):
                owner._buffers[name] = buffer
