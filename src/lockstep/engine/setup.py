"""Makes a model ready for training: compiled, with its initial weights, placed on the devices."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from torch import nn
from torch.optim import Optimizer

from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.config.schema import Precision, RunSettings
from lockstep.config.strategy import ShardRule
from lockstep.config.training import Compile, Ema
from lockstep.distributed.group import Group
from lockstep.engine import weights
from lockstep.engine.compile_guard import be_patient_while_compiling
from lockstep.engine.loop_checks import check_hooks
from lockstep.engine.stepper import refuse_half_weights
from lockstep.errors import ConfigError
from lockstep.runtime.base import Runtime
from lockstep.shown import described
from lockstep.strategy.activation_checkpointing import checkpoint_activations
from lockstep.strategy.base import Strategy
from lockstep.strategy.compiled import compile_blocks, compile_whole, keep_compiled_code
from lockstep.strategy.float8 import use_float8
from lockstep.strategy.optimizer_step import use_fused_step
from lockstep.strategy.placing import Parallelize, has_no_memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SetupOptions:
    """What `run.setup` is asked for."""

    precision: str
    clip_norm: float | None
    compile: Compile | None
    activation_checkpointing: str | None
    skips_nan: bool
    ema: Ema | None
    shard: Mapping[str, ShardRule]
    parallelize: Parallelize | None
    init_weights: Callable[[nn.Module], object] | None
    init_from: weights.Given | None


class ModelSetup:
    """Makes the models that `run.setup` is given ready for training, on all ranks together."""

    def __init__(
        self, group: Group, runtime: Runtime, strategy: Strategy, settings: RunSettings, storage: CheckpointStorage
    ) -> None:
        self._group, self._runtime, self._strategy = group, runtime, strategy
        self._settings, self._storage = settings, storage
        self.compiles = False  # whether torch compiles any of the models

    def place(
        self, model: nn.Module, optimizer: Optimizer | None, options: SetupOptions
    ) -> tuple[nn.Module, weights.Frozen | None]:
        """Returns what to call in training, and the frozen weights that checkpoints leave out, if any."""
        activity, precision = self._group.activity, options.precision
        _check(model, optimizer, options)
        if self._strategy.keeps_slices:  # which makes new parameters
            check_hooks(dict(model.named_parameters()), self._strategy, are_lost=True)
        self._strategy.check_precision(precision)
        self._runtime.use_precision(precision)
        self._strategy.split_by(options.shard, options.parallelize)
        self._strategy.convert(model)
        if precision == "fp8":
            use_float8(model, self._settings.strategy.blocks, self._runtime.device)
        self._work_on_blocks(model, options.compile, options.activation_checkpointing)
        activity.enter("placing the model", waits=self._group.world_size > 1)
        self._strategy.fill(model, self._settings.seed, options.init_weights)
        left_out = weights.are_left_out(model, self._settings.checkpoint.save)
        begun = self._initial_weights(options.init_from, left_out)
        is_loaded = begun is not None and begun.before_placing(model)
        frozen = self._frozen(model) if left_out else None
        placed = self._strategy.place(model)
        if begun is not None and not is_loaded:
            begun.after_placing(model)
        if optimizer is not None:
            self._strategy.place_optimizer(optimizer)
            if self._runtime.fuses_optimizers:
                use_fused_step(optimizer, model, self._runtime.device)
        activity.enter("getting ready")
        return placed, frozen

    def _work_on_blocks(self, model: nn.Module, compile: Compile | None, activation_checkpointing: str | None) -> None:
        """Works on blocks before the model is placed, so that the strategy's hooks stay outside of them."""
        split, recomputed = self._strategy.split_sequences, activation_checkpointing is not None
        if split is not None:  # outside of what is compiled
            self._compile(model, compile, recomputed=False)
            split(model)
        if activation_checkpointing is not None:
            by_torch = compile is not None and not self._runtime.compiles_everything and split is None
            pattern = self._settings.strategy.blocks
            checkpoint_activations(model, activation_checkpointing, pattern, self._runtime, by_torch)
        if split is None:
            self._compile(model, compile, recomputed)

    def _compile(self, model: nn.Module, compile: Compile | None, recomputed: bool) -> None:
        if compile is not None and self._runtime.compiles_everything:
            logger.info("compile: everything is compiled on this device; nothing more to do")
        elif compile is not None:
            self.compiles = True
            be_patient_while_compiling(self._group.activity)
            keep_compiled_code(compile.cache)
            # Where blocks are gathered and freed one by one, a program cannot span several.
            apart = self._strategy.keeps_slices
            if compile.blocks or apart:
                compile_blocks(model, self._settings.strategy.blocks, compile, apart or recomputed)
            else:
                compile_whole(model, recomputed, compile)

    def _initial_weights(self, init_from: weights.Given | None, frozen_too: bool) -> weights.Pretrained | None:
        """Returns what `init_from` names; in a run that resumes, only where checkpoints leave frozen weights out."""
        if init_from is None:
            return None
        goes_on = self._group.agree(lambda: bool(self._storage.steps()), "whether the run goes on")
        if goes_on and not frozen_too:
            if self._group.rank == 0:
                logger.info("init_from: %s is what this run began with; it has checkpoints, and resumes from them",
                            weights.as_settings(init_from).path)  # fmt: skip
            return None
        return weights.Pretrained(init_from, self._group, self._strategy)

    def _frozen(self, model: nn.Module) -> weights.Frozen | None:
        names = weights.names_of(model)

        def digest() -> str | None:
            if self._settings.checkpoint.save == "auto" and has_no_memory(model):
                return None  # no rank has it whole, so that there is no digest: it is saved
            return weights.digest_of(model, names, self._group.activity)

        found = self._group.agree(digest, "the digest of the frozen weights")
        return None if found is None else weights.Frozen(frozenset(names), found)


def skips_nan(on_nan: str) -> bool:
    if on_nan not in ("stop", "skip"):
        raise ConfigError(f"run.setup: on_nan must be stop or skip, got {on_nan!r}")
    return on_nan == "skip"


def _check(model: Any, optimizer: Any, options: SetupOptions) -> None:
    clip_norm: Any
    precision, clip_norm, recomputed = options.precision, options.clip_norm, options.activation_checkpointing
    if not isinstance(model, nn.Module):
        several = isinstance(model, (list, tuple, Mapping))
        remedy = "Call it for each model, with a name" if several else "Call run.setup(model, optimizer)"
        raise ConfigError(f"run.setup: the model must be a torch.nn.Module, got {described(model)}. {remedy}")
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise ConfigError(f"run.setup: the optimizer must be a torch.optim.Optimizer, got {described(optimizer)}")
    if optimizer is not None and not any(
        each.requires_grad for group in optimizer.param_groups for each in group["params"]
    ):
        raise ConfigError("the model has no parameter that requires a gradient, so there is nothing to train")
    if precision not in get_args(Precision):
        raise ConfigError(f"run.setup: precision must be one of {', '.join(get_args(Precision))}, got {precision!r}")
    if clip_norm is not None and not (isinstance(clip_norm, (int, float)) and clip_norm > 0):
        raise ConfigError(f"run.setup: clip_norm must be a number above 0, got {clip_norm!r}")
    if recomputed is not None and not isinstance(recomputed, str):
        raise ConfigError(f"run.setup: activation_checkpointing must be blocks or a pattern, got {recomputed!r}")
    if precision == "fp16":
        refuse_half_weights({str(each.dtype) for each in model.parameters()})
