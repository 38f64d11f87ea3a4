"""How a model that `run.setup` is given becomes one that trains: worked on by blocks, its first weights, placed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.config.optimizing import Compile
from lockstep.config.schema import Precision, RunSettings
from lockstep.distributed.group import Group
from lockstep.engine import weights
from lockstep.engine.compile_guard import be_patient_while_compiling
from lockstep.engine.stepper import refuse_half_weights
from lockstep.errors import ConfigError
from lockstep.runtime.base import Runtime
from lockstep.strategy.activation_checkpointing import checkpoint_activations
from lockstep.strategy.base import Strategy
from lockstep.strategy.compile_cache import keep_compiled_code
from lockstep.strategy.compiled import compile_blocks, compile_whole
from lockstep.strategy.float8 import use_float8
from lockstep.strategy.fused import use_fused_step
from lockstep.strategy.initial import has_no_memory

logger = logging.getLogger(__name__)

InitWeights = Callable[[nn.Module], object]


@dataclass(frozen=True)
class Prepared:
    """A model on the device."""

    model: nn.Module  # what to call in training
    frozen: weights.Frozen | None  # where its frozen weights are left out of checkpoints


class Preparation:
    """The same for every model of a run, on all ranks together."""

    def __init__(
        self, group: Group, runtime: Runtime, strategy: Strategy, settings: RunSettings, storage: CheckpointStorage
    ) -> None:
        self._group, self._runtime, self._strategy = group, runtime, strategy
        self._settings, self._storage = settings, storage
        self.compiles = False  # whether torch compiles any of the models

    def of(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        compile: Compile | None,
        activation_checkpointing: str | None,
        init_weights: InitWeights | None,
        init_from: weights.Given | None,
        precision: str = "float32",
    ) -> Prepared:
        activity = self._group.activity
        self._strategy.convert(model)
        if precision == "fp8":
            use_float8(model, self._settings.strategy.blocks, self._runtime.device)
        self._work_on_blocks(model, compile, activation_checkpointing)
        activity.enter("placing the model", waits=self._group.world_size > 1)
        self._strategy.fill(model, self._settings.seed, init_weights)
        left_out = weights.are_left_out(model, self._settings.checkpoint.save)
        begun = self._weights_to_begin_with(init_from, left_out)
        is_loaded = begun is not None and begun.before_placing(model)
        kept = self._frozen(model) if left_out else None
        placed = self._strategy.place(model)
        if begun is not None and not is_loaded:
            begun.after_placing(model)
        if optimizer is not None:
            self._strategy.place_optimizer(optimizer)
            if self._runtime.fuses_optimizers:
                use_fused_step(optimizer, model, self._runtime.device)
        activity.enter("getting ready")
        return Prepared(placed, kept)

    def _work_on_blocks(self, model: nn.Module, compile: Compile | None, activation_checkpointing: str | None) -> None:
        """What is done per block, before the model is placed: hooks of the strategy then stay outside of it."""
        pattern = self._settings.strategy.blocks
        if activation_checkpointing is not None:
            by_torch = compile is not None and not self._runtime.compiles_everything
            checkpoint_activations(model, activation_checkpointing, pattern, self._runtime, by_torch)
        if compile is not None and self._runtime.compiles_everything:
            logger.info("compile: everything is compiled on this device; nothing more to do")
        elif compile is not None:
            self.compiles = True
            be_patient_while_compiling(self._group.activity)
            keep_compiled_code(compile.cache)
            # Where blocks are put together and taken apart, a program cannot go on from one to the next.
            apart = self._strategy.keeps_slices
            if compile.blocks or apart:
                compile_blocks(model, pattern, compile, apart or activation_checkpointing is not None)
            else:
                compile_whole(model, activation_checkpointing is not None, compile)

    def _weights_to_begin_with(self, init_from: weights.Given | None, frozen_too: bool) -> weights.Pretrained | None:
        """What `init_from` names, unless the run goes on: then from its checkpoint, and from there at most what is
        frozen and not in it."""
        if init_from is None:
            return None
        goes_on = self._group.agree(lambda: bool(self._storage.steps()), "whether the run goes on")
        if goes_on and not frozen_too:
            if self._group.rank == 0:
                logger.info("init_from: %s is what this run began with; it has checkpoints, and goes on from them",
                            weights.as_settings(init_from).path)  # fmt: skip
            return None
        return weights.Pretrained(init_from, self._group, self._strategy)

    def _frozen(self, model: nn.Module) -> weights.Frozen | None:
        names = weights.names_of(model)

        def digest() -> str | None:
            if self._settings.checkpoint.save == "auto" and has_no_memory(model):
                return None  # a teacher that is never whole anywhere to be known again by: it is saved
            return weights.digest_of(model, names, self._group.activity)

        found = self._group.agree(digest, "the digest of the frozen weights")
        return None if found is None else weights.Frozen(frozenset(names), found)


def check_model(model: nn.Module, optimizer: Optimizer | None, precision: str) -> None:
    """Refuse what cannot be trained."""
    if optimizer is not None and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("the model has no parameter that requires a gradient, so there is nothing to train")
    if precision not in get_args(Precision):
        raise ConfigError(f"run.setup: precision must be one of {', '.join(get_args(Precision))}, got {precision!r}")
    if precision == "fp16":
        refuse_half_weights({str(each.dtype) for each in model.parameters()})


class Devices:
    """The devices of one rank, and of all the others."""

    def __init__(self, group: Group, runtime: Runtime, strategy: Strategy) -> None:
        self._group, self._runtime, self._strategy = group, runtime, strategy

    @property
    def addressable(self) -> int:
        """Devices that this process drives."""
        return self._runtime.addressable_device_count()

    @property
    def everywhere(self) -> int:
        """Devices of all processes together. Where each is a world of its own, they are added up."""
        known, world_size = self._runtime.global_device_count(), self._group.world_size
        apart = known is None or (self._runtime.world_size() is None and world_size > 1)
        return self.addressable * world_size if apart else int(known or 1)

    @property
    def meshes(self) -> Mapping[str, Any]:
        return self._strategy.meshes

    def broadcast_parameters(self, model: nn.Module) -> None:
        if self._group.world_size == 1:
            return
        with self._group.activity.within("broadcasting the parameters", waits=True), torch.no_grad():
            self._runtime.broadcast([*model.parameters(), *model.buffers()])
