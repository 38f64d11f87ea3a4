"""The interface of a strategy: a way of spreading a model and its batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.config.strategy import ShardRule
from lockstep.data.batches import MicroBatch
from lockstep.runtime.base import Runtime
from lockstep.strategy.parameters import (
    Modules,
    Parameters,
    all_finite,
    give_new_parameters,
    gradients_of,
    move_state,
    multiply_gradients,
    named_parameters,
    to_device,
    values_of,
)
from lockstep.strategy.placing import Initialise, Parallelize, initialise


class Strategy:
    """Places models, and owns what depends on that: gradients, state, and what ranks compare. Nothing outside of a
    strategy may assume that a rank has whole tensors. As it is here, it is that of one device."""

    name = "single"
    # Whether placing gives every rank what rank 0's model has; where not, each must have the same before.
    places_rank_0: ClassVar[bool] = True
    # Whether there is something to do in reduce_gradients, since the backward pass exchanges nothing.
    reduces_in_step: ClassVar[bool] = False
    # Whether reading the state off the devices takes all ranks: where tensors are spread over hosts.
    gathers_state: ClassVar[bool] = False
    # Whether state dicts have DTensors, of which every rank saves and reads its own parts (slices.py).
    keeps_slices: ClassVar[bool] = False

    def __init__(self, runtime: Runtime, world_size: int = 1) -> None:
        self.runtime, self.world_size = runtime, world_size
        self.dp_size = world_size  # the number of slices that a global batch is divided into
        self.dp_rank = 0  # the slice that this rank computes; ranks with the same one draw the same random numbers
        self.is_dp_leader = True  # others that compute the same slice are not counted again
        self.micro_batches = 1  # devices of this process that take a micro-batch each, one after the other
        self.batch_multiple = 1  # examples of a micro-batch are a multiple of this, to be spread over devices evenly
        self.measures_together = False  # whether an evaluation takes all ranks: then none may leave it alone
        self.has_replicas = False  # whether parameters must be equal on all ranks between two steps
        self.split_sequences: Callable[[nn.Module], None] | None = None  # has blocks compute a part of every sequence
        self.leaves: int | None = None  # with train.exact: how many a global batch is divided into
        self._replicas_averaged = 1  # the number of ranks over which reduced gradients were averaged
        self.used = 0  # a digest of which parameters got gradients, where ranks have to agree in that
        self._replaced: list[tuple[nn.Parameter, nn.Parameter]] = []  # an optimizer may have the ones before

    # Where things are

    @property
    def place_of_generators(self) -> tuple[int, ...]:
        """What the random numbers of a rank depend on beside the seed: dropout draws others for each slice."""
        return () if self.leaves else (self.dp_rank,)

    @property
    def meshes(self) -> Mapping[str, Any]:
        """The device meshes, by name."""
        return {}

    def split_by(self, rules: Mapping[str, ShardRule], parallelize: Parallelize | None) -> None:
        """Adds the task's sharding rules, after those of the config; and its own function that splits models."""

    def check_precision(self, precision: str) -> None:
        """Refuses a precision that does not go with how the model is split."""

    def build(self, make: Callable[[], Any]) -> Any:
        """Makes a model, or several; on the meta device, where this rank gets its part of it from another."""
        return make()

    def convert(self, model: nn.Module) -> None:
        """Exchanges layers for others that the strategy needs, before anything else is done with a model."""

    def use_comm_hook(self, hook: Any) -> None:
        """Sets a user's function that exchanges gradients."""

    def fill(self, model: nn.Module, seed: int, init_weights: Initialise | None) -> None:
        """Gives values to a model that was made on the meta device, before it is placed."""
        self._replaced += initialise(model, seed, init_weights)

    def place(self, model: nn.Module) -> nn.Module:
        """Returns the module to train with; its parameters are on the device and equal on all ranks."""
        return to_device(model, self.runtime.device)

    def place_optimizer(self, optimizer: Optimizer) -> None:
        """Moves state that an optimizer made before its model was placed (Adagrad) to where the parameters are now."""
        give_new_parameters(optimizer, self._replaced)
        move_state(optimizer)

    def compute_on_bare_module(self, model: nn.Module) -> None:
        """Exchanges gradients although the loop calls the bare module in training, and not what `place` returned."""

    def copies_of(self, model: nn.Module) -> list[nn.Module]:
        """Returns every replica that this process has of a placed model."""
        return [model]

    def move(self, batch: Any, number: int = 0) -> Any:
        """Moves a batch to the device that works on it; `number` is that of the micro-batch in its global batch."""
        return self.runtime.move(batch)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Concatenates the tensors of all dp ranks along the first dimension, with gradients."""
        return tensor

    # Gradients

    def explain(self, error: RuntimeError) -> Exception | None:
        """Returns what an error of the backward pass means to the user, where that depends on the strategy."""
        return None

    def sync_gradients(self, wanted: bool) -> None:
        """Sets whether the next forward and backward pass exchanges gradients."""

    def begin_micro_batch(self, step: int, source: str, micro: MicroBatch, begins_step: bool) -> None:
        """The loop is about to compute a micro-batch."""

    def before_backward(self) -> None:
        """A backward pass begins."""

    def reshard(self) -> None:
        """Frees what is gathered of parameters for a backward pass that may not come."""

    def computed(self, last: bool) -> None:
        """The gradients of a micro-batch are computed; with `last`, those of the whole batch."""
        if not last:  # what follows is a program of its own, the same for every micro-batch
            self.runtime.end_of_program()

    def compare_used(self, digests: Sequence[int]) -> None:
        """Takes the digests of all ranks, and refuses ranks that have used different parameters."""

    def reduce_gradients(self, parameters: Parameters, counts: int = 0) -> int:
        """Reduces gradients over ranks, where the backward pass has not done so. Of losses that were given as sums,
        this rank has so many counts; returns how many the rank with the most of them has."""
        return counts

    def divide_gradients(self, parameters: Parameters, counts: Sequence[Tensor | float]) -> None:
        """Turns gradients of a sum into those of the mean over all that was counted, on all ranks."""
        total = self.total_count(counts)
        multiply_gradients(parameters, torch.where(total > 0, self._replicas_averaged / total, torch.zeros_like(total)))

    def total_count(self, counts: Sequence[Tensor | float]) -> Tensor:
        """Returns the sum of the counts of all ranks."""
        dtype, device = self.runtime.count_dtype, self.runtime.device
        found = [torch.as_tensor(each, dtype=dtype, device=device).detach().reshape(()) for each in counts]
        return torch.stack(found).sum()

    def mean_over_ranks(self, totals: Sequence[Tensor | float], counts: Sequence[Tensor | float]) -> Tensor:
        """Returns the mean over the global batch, from weighted means or from sums over these counts."""
        return self.total_count(totals) / (self.total_count(counts) if counts else self._replicas_averaged)

    def drop_unreduced(self, optimizer: Optimizer, abandoned: bool) -> None:
        """Drops gradients of early micro-batches that no zero_grad reaches. An `abandoned` batch comes again."""

    def keep_gradients(self, parameters: Parameters) -> None:
        """An optimizer was asked to step before the last micro-batch: the loop is done with this one."""

    def gradients_are_finite(self, parameters: Parameters) -> bool:
        return bool(all_finite([values_of(each) for each in gradients_of(parameters)], self.runtime.device))

    def clip_gradients(self, parameters: Parameters, norm: float) -> Tensor:
        """Scales gradients down to a norm; returns the norm that they had."""
        if not self.keeps_slices and not any(each.is_sparse for each in gradients_of(parameters)):
            return torch.nn.utils.clip_grad_norm_(parameters, norm)
        total = self.gradient_norm(parameters)
        multiply_gradients(parameters, torch.clamp(norm / (total + 1e-6), max=1.0))
        return total

    def gradient_norm(self, parameters: Parameters) -> Tensor:
        """Returns the norm of all gradients, those of all ranks where each has a part."""
        return torch.nn.utils.get_total_norm([values_of(each) for each in gradients_of(parameters)])

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> None:
        """Steps an optimizer; with a closure, it computes loss and gradients itself."""
        optimizer.step() if closure is None else optimizer.step(closure)

    def stepped(self) -> None:
        """An optimizer has changed the parameters: the step ends here."""
        self.runtime.end_of_program()

    # State

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Returns a module's state by names that no strategy changes: whole tensors, or DTensors if it keeps slices."""
        return module.state_dict()

    def load_state_dict(self, module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
        """Takes whole tensors, or Stored; raises RuntimeError if they do not fit or, with `strict`, any is missing."""
        module.load_state_dict(state, strict=strict)

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        return optimizer.state_dict()

    def load_optimizer_state_dict(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Loads what optimizer_state_dict returned; with Stored tensors where the strategy keeps slices."""
        optimizer.load_state_dict(dict(state))

    def restored(self, modules: Modules, optimizers: Sequence[Optimizer]) -> None:
        self.runtime.end_of_program()

    # Comparing

    def parameters_to_check(self, modules: Modules) -> dict[str, Tensor]:
        """Returns the parameters by name, as they can be read without compiling a program for it."""
        named = named_parameters(modules)
        return dict(zip(named, self.runtime.fetch(list(named.values())), strict=True))

    def holders(self, modules: Modules) -> dict[str, tuple[int, ...]] | None:
        """Returns for each parameter the ranks that must have the same of it; None: all ranks, of all parameters."""
        return None

    def equalize_buffers(self, modules: Modules) -> None:
        """Gives every rank rank 0's buffers (running statistics), before they are evaluated or saved."""
        if self.has_replicas:
            self.runtime.broadcast([buffer for module in modules.values() for buffer in module.buffers()])
