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

from lockstep.data.seeding import States, generators_kept
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
    for with_buffers in (True, False):
        modules = [each for each in found.values() if _has_buffers(each) is with_buffers]
        wrap_forward(modules, functools.partial(_recomputed, runtime, to_be_compiled, with_buffers))
    logger.info("recomputed in the backward pass: %d modules, from %s on", len(found), next(iter(found)))


def _has_buffers(module: nn.Module) -> bool:
    return next(module.buffers(), None) is not None


def _recomputed(runtime: Runtime, to_be_compiled: bool, with_buffers: bool, forward: Forward) -> Forward:
    # Compiled from outside, the passes become one program each, and the second leaves out what nobody needs. Where that
    # program cannot be made (a graph break), torch runs all that it recomputes as it is, unless it is compiled itself.
    inside = torch.compile(forward) if to_be_compiled else forward

    def kept(module: nn.Module, inputs: Any, keywords: dict[str, Any]) -> Any:
        return runtime.recomputed(_Pass(inside, module, with_buffers), inputs, keywords)

    if to_be_compiled:  # what is done with buffers and generators is for Python alone
        kept = torch.compiler.disable(kept, recursive=False)  # type: ignore[no-untyped-call]

    @functools.wraps(forward)
    def again(module: nn.Module, *inputs: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(module, *inputs, **keywords)
        if not with_buffers and torch.compiler.is_compiling():
            return runtime.recomputed(_called, inside, module, inputs, keywords)
        return kept(module, inputs, keywords)

    return again


def _called(forward: Forward, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Keywords come as one argument: torch looks among those for the devices whose generators it has to set back."""
    return forward(module, *inputs, **keywords)


class _Pass:
    """One forward pass of a module, and its repetitions.

    What a pass changes besides its output (the running statistics of BatchNorm, the vectors of a spectral norm) is
    changed by the first alone, and all others find it as the first one did; and they draw the same numbers from
    Python's and NumPy's generators. Those of torch are left to torch.
    """

    def __init__(self, forward: Forward, module: nn.Module, with_buffers: bool) -> None:
        self._forward, self._module, self._with_buffers = forward, module, with_buffers
        # Buffers that the first pass changed, and what they were before; None before it.
        self._changed: list[tuple[nn.Module, str, Tensor]] | None = None
        self._generators: States | None = None  # what they were, where the first pass drew from them

    def __call__(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if self._changed is None:
            return self._first(inputs, keywords)
        generators = generators_kept() if self._generators else contextlib.nullcontext()
        with self._as_it_was(self._changed), generators:
            if self._generators:
                self._generators.restore()
            return self._forward(self._module, *inputs, **keywords)

    def _first(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        before = [
            (owner, name, buffer, buffer._version, buffer.detach().clone())
            for owner in (self._module.modules() if self._with_buffers else ())
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        generators = States.now()
        output = self._forward(self._module, *inputs, **keywords)
        self._generators = generators if {"python", "numpy"} & set(generators.moved()) else None
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
