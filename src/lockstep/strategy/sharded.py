"""A mesh of processes: torch's fully_shard over the data axis, DTensor for rules over the others.

The settings are the same as on XLA. Every parameter becomes a DTensor of which a rank keeps its part. Ranks along the
axes that batches are spread over have a slice of the batch each; ranks along the other axes work on one together.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer, SparseAdam

from lockstep.config.strategy import BATCH_AXES, CONTEXT_AXIS, DATA_AXIS, REPLICA_AXIS, ShardRule
from lockstep.config.strategy import Strategy as StrategySettings
from lockstep.distributed.group import Group
from lockstep.errors import ConfigError
from lockstep.runtime.base import Runtime
from lockstep.strategy import (
    collectives,
    context,
    optimizer_step,
    parallelized,
    placing,
    tensor_parallel,
    whole_matrices,
)
from lockstep.strategy import mesh as meshing
from lockstep.strategy.base import Strategy
from lockstep.strategy.blocks import find_blocks, first_line, without_views
from lockstep.strategy.collectives import synchronise
from lockstep.strategy.fsdp import (
    BlockTracker,
    SecondBackward,
    UsedParameters,
    let_methods_compute,
    param_groups,
    reshard_without_backward,
)  # fmt: skip
from lockstep.strategy.parameters import (
    Modules,
    Parameters,
    all_finite,
    give_new_parameters,
    gradients_of,
    named_parameters,
    require_memory,
)
from lockstep.strategy.placing import Initialise, Parallelize
from lockstep.strategy.slices import from_part, is_spread, load_module, load_optimizer, local_part, slice_of, take_part
from lockstep.strategy.tensor_parallel import make_mesh

logger = logging.getLogger(__name__)

# An axis of one place: where parameters are to be whole on every rank, they are "split" over it.
_WHOLE = "whole"

_FITTING = ", ".join(each.__name__ for each in optimizer_step.BY_NUMBER)


class ShardedStrategy(Strategy):
    keeps_slices: ClassVar[bool] = True

    def __init__(self, runtime: Runtime, settings: StrategySettings, group: Group) -> None:
        super().__init__(runtime, group.world_size)
        self.name = settings.type
        self._settings, self._group = settings, group
        self._shapes = meshing.resolve_meshes(settings, group.world_size, "processes")
        self._shape = self._shapes[meshing.MAIN]
        self._rules = dict(settings.shard)
        more = {} if settings.splits_all else {_WHOLE: 1}
        more |= {} if DATA_AXIS in self._shape else {DATA_AXIS: 1}
        first = (REPLICA_AXIS, CONTEXT_AXIS, DATA_AXIS, _WHOLE)
        self._mesh = make_mesh(runtime, group, {**self._shape, **more}, first=first)
        copied = (CONTEXT_AXIS,) if CONTEXT_AXIS in self._shape else ()
        axes = {"fsdp": (*copied, DATA_AXIS), "hsdp": (REPLICA_AXIS, DATA_AXIS)}.get(settings.type, (DATA_AXIS, _WHOLE))
        self._over = self._mesh[axes]  # what fully_shard is given: axes to copy over, then the one to split over
        batch_axes = [axis for axis in BATCH_AXES if axis in self._shape]
        self.dp_size = self._replicas_averaged = math.prod(self._mesh[axis].size() for axis in batch_axes)
        self.dp_rank = 0
        for axis in batch_axes:
            self.dp_rank = self.dp_rank * self._mesh[axis].size() + self._mesh.get_local_rank(axis)
        self.is_dp_leader = all(self._mesh.get_local_rank(axis) == 0 for axis in self._shape if axis not in BATCH_AXES)
        self.measures_together = self.has_replicas = self.world_size > 1
        self._copies = self.world_size // self.dp_size  # ranks that work on the same slice of a batch
        self._models: list[FSDPModule] = []
        self._second: list[SecondBackward] = []  # of each model
        self._spread: list[nn.Parameter] = []
        self._scalars: list[nn.Parameter] = []
        self._unchecked: list[tuple[nn.Module, tensor_parallel.Plan]] = []  # whose gradients nobody has looked at
        self._syncs, self._accumulates = True, False
        self._seed = 0
        self._holders: dict[int, int] = {}  # by the identity of a parameter
        self._init_weights: Initialise | None = None
        self._parallelize: Parallelize | None = None
        self._tracker = BlockTracker()
        self._used = UsedParameters()
        group.activity.locate = self._tracker.locate

    # Where things are

    @property
    def meshes(self) -> Mapping[str, Any]:
        return {"mesh": self._mesh}

    def split_by(self, rules: Mapping[str, ShardRule], parallelize: Parallelize | None) -> None:
        self._rules = meshing.with_rules_of_code(self._settings.shard, rules, self._shapes)
        if parallelize is not None:
            parallelized.refuse_settings(self._settings, self._rules)
        elif self._shape.get(CONTEXT_AXIS, 1) > 1:
            self.split_sequences = self._split_sequences
        self._parallelize = parallelize

    def check_precision(self, precision: str) -> None:
        if self._settings.param_dtype == "bf16" and precision not in ("bf16", "fp8"):
            raise ConfigError(
                f"strategy.param_dtype: bf16 is for a model computed in bf16, but its precision is {precision}: "
                'set train.precision: bf16 (run.setup(precision="bf16") in a custom loop), or remove it'
            )

    # Placing

    def convert(self, model: nn.Module) -> None:
        if self._settings.sync_batchnorm and self.world_size > 1:
            synchronise(model, copies=self._copies)

    def _split_sequences(self, model: nn.Module) -> None:
        blocks = find_blocks(model, self._settings.blocks)
        context.split_sequences(model, blocks, self._mesh[CONTEXT_AXIS], self._group.activity)

    def build(self, make: Callable[[], Any]) -> Any:
        """Rank 0 makes the model as it is; the others make it on the meta device, where its code allows that."""
        if self._group.rank == 0:
            return make()
        before = torch.get_rng_state()
        try:
            with torch.device("meta"):
                return make()
        except Exception as error:
            torch.set_rng_state(before)
            logger.warning(
                "the model cannot be made on the meta device (%s: %s): this rank makes all of it, and drops what is "
                "not its own. Keep what reads values (.item(), numpy) out of the model's constructor to save memory",
                type(error).__name__, first_line(error),
            )  # fmt: skip
            return make()

    def fill(self, model: nn.Module, seed: int, init_weights: Initialise | None) -> None:
        self._seed, self._init_weights = seed, init_weights  # as each block is placed: whole it may fit nowhere

    def place(self, model: nn.Module) -> nn.Module:
        _refuse_sparse(model)
        owned = placing.owned_by(model, (each for pair in self._replaced for each in pair))
        filling = placing.Filling(model, self._group, self.runtime.device, self._seed, self._init_weights)
        text = " x ".join(f"{axis} {size}" for axis, size in self._shape.items())
        if self._parallelize is not None:
            self._place_by_user(self._parallelize, model, owned, filling)
            logger.info("mesh %s; split by %s", text, parallelized.name_of(self._parallelize))
        else:
            units, split = self._place_by_rules(model, owned, filling)
            logger.info("mesh %s; %d blocks, %d of %d parameters split by rules", text, units - 1, split, len(owned))
        self._replaced += [(each.before, each.now) for each in owned.values()]
        for each in model.parameters():
            (self._spread if is_spread(each) else self._scalars).append(each)
        model.register_forward_hook(reshard_without_backward)
        let_methods_compute(model)
        assert isinstance(model, FSDPModule)
        self._models.append(model)
        self._second.append(SecondBackward(model))
        return model

    def _place_by_rules(
        self, model: nn.Module, owned: Mapping[int, placing.Owned], filling: placing.Filling
    ) -> tuple[int, int]:
        """Splits one unit after the other; returns the numbers of units, and of parameters split by rules."""
        shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
        ruled = meshing.by_rules(shapes, self._shapes, self._settings, self._rules)
        plan = tensor_parallel.plan(model, ruled, self._shape)
        self._unchecked.append((model, plan))
        units = placing.units(model, find_blocks(model, self._settings.blocks))
        done: set[int] = set()

        def part(name: str, value: Tensor) -> Tensor:
            split = plan.parameters.get(name)
            return value if split is None else tensor_parallel.part_of(value, split, self._mesh)

        with torch.no_grad():
            for name, unit in units.items():
                inside = {id(each) for each in unit.modules()}
                mine = [
                    each
                    for key, each in owned.items()
                    if key not in done and inside.issuperset(id(module) for module, _ in each.places)
                ]
                done |= {id(each.before) for each in mine}
                filling.fill(unit, mine, part)
                if not name:
                    filling.fill_buffers()
                    tensor_parallel.apply(model, plan, self._mesh)
                unit.register_forward_hook(without_views)  # before torch's own, which must not be given one
                self._split(unit, {each for each in model.parameters() if each.dim() == 0})
                self._tracker.add(name, unit)
                self._group.activity.progress()
        return len(units), len(plan.parameters)

    def _place_by_user(
        self, function: Parallelize, model: nn.Module, owned: Mapping[int, placing.Owned], filling: placing.Filling
    ) -> None:
        """Gives every rank the whole model, and lets the user's function split it; what it leaves is split here."""
        with torch.no_grad():
            filling.fill(model, list(owned.values()), lambda name, value: value)
            filling.fill_buffers()
        shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
        with self._group.activity.within(parallelized.name_of(function), waits=True):
            parallelized.apply(function, model, self._mesh)
        if not isinstance(model, FSDPModule):
            self._split(model, {each for each in model.parameters() if each.dim() == 0})
        for name, unit in model.named_modules():
            if hasattr(unit, "unshard"):
                unit.register_forward_hook(without_views, prepend=True)
                self._tracker.add(name, unit)
        replicas = [axis for axis in BATCH_AXES if axis in self._shape]
        over = self._mesh[tuple(replicas)].mesh.flatten().tolist() if replicas else []
        parallelized.check(function, model, shapes, over)

    def _split(self, unit: nn.Module, scalars: set[nn.Parameter]) -> None:
        how: dict[str, Any] = {"ignored_params": scalars}  # there is nothing to split: every rank has them
        if self._settings.offload and self.runtime.device.type != "cpu":
            how["offload_policy"] = CPUOffloadPolicy()
        gathered, reduced = (
            torch.bfloat16 if dtype == "bf16" else None
            for dtype in (self._settings.param_dtype, self._settings.reduce_dtype)
        )
        if gathered or reduced:
            # What flows between blocks stays what autocast makes it, as without a mesh.
            how["mp_policy"] = MixedPrecisionPolicy(gathered, reduced or torch.float32, cast_forward_inputs=False)
        if not self._settings.reshard_after_forward:
            how["reshard_after_forward"] = False
        fully_shard(unit, mesh=self._over, **how)
        if not self._settings.reshard_after_forward:
            unit.register_forward_hook(reshard_without_backward)

    def place_optimizer(self, optimizer: Optimizer) -> None:
        """Gives the optimizer the split parameters, and splits the state that it had for them."""
        if isinstance(optimizer, (LBFGS, SparseAdam)):
            raise self._does_not_fit(optimizer, "it needs whole parameters")
        give_new_parameters(optimizer, self._replaced)
        filling = placing.Filling(nn.Module(), self._group, self.runtime.device)
        for parameter, state in optimizer.state.items():
            for key, value in [each for each in state.items() if not isinstance(each[1], DTensor)]:
                if self._group.rank == 0 and isinstance(value, Tensor):
                    require_memory(optimizer, value)
                state[key] = self._like(parameter, value, filling)

    def _like(self, parameter: Tensor, value: Any, filling: placing.Filling) -> Any:
        """Turns state of a whole parameter into state of its part."""
        if not isinstance(value, Tensor) or value.shape != parameter.shape or not isinstance(parameter, DTensor):
            return value
        (whole,) = filling.from_rank_0([value])
        mine = slice_of(parameter)
        assert mine is not None
        return from_part(take_part(whole, mine).to(mine.tensor.device), parameter)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> None:
        try:
            if closure is None:
                optimizer_step.step_parts(optimizer)
            else:
                optimizer.step(closure)
        except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
            if "DTensor" not in str(error) and "sharding" not in str(error).lower():
                raise
            raise self._does_not_fit(
                optimizer, f"torch cannot do its arithmetic on their parts ({first_line(error)})"
            ) from None

    def _does_not_fit(self, optimizer: Optimizer, why: str) -> ConfigError:
        return ConfigError(
            f"optimizer: {type(optimizer).__name__} cannot step parameters that strategy: {self.name} splits: {why}. "
            f"Use one that works on each number by itself ({_FITTING}), give its class whole_matrices = True, or use "
            "strategy: ddp"
        )

    # Gradients

    def sync_gradients(self, wanted: bool) -> None:
        if wanted == self._syncs:
            return
        self._syncs = wanted
        self._accumulates = self._accumulates or not wanted
        for model in self._models:
            model.set_requires_gradient_sync(wanted)

    def all_gather(self, tensor: Tensor) -> Tensor:
        if self.world_size == 1:
            return tensor
        return collectives.all_gather(tensor, self.dp_rank, self.is_dp_leader, self._copies)

    def computed(self, last: bool) -> None:
        super().computed(last)
        for each in self._second:
            each.computed()
        if last:
            self.used = self._used.note(self._spread)
            for model, plan in [each for each in self._unchecked if gradients_of(list(each[0].parameters()))]:
                self._unchecked.remove((model, plan))  # once is enough
                tensor_parallel.check_gradients(model, plan, self._mesh, self._group)
            self._average_scalars()

    def compare_used(self, digests: Sequence[int]) -> None:
        models = cast(list[nn.Module], self._models)
        names = {id(each): name for model in models for name, each in model.named_parameters()}
        self.used = self._used.compare(digests, [names.get(id(each), "") for each in self._spread], self._group)

    def _average_scalars(self) -> None:
        """Averages gradients of parameters that are not split, which torch does not reduce; a rank that has not used
        one counts with zero. What was averaged before stays the same."""
        trained = [each for each in self._scalars if each.requires_grad]
        if not trained or self.world_size == 1:
            return
        sums = torch.zeros(len(trained), 2, dtype=torch.float64, device=self.runtime.device)
        for mine, each in zip(sums, trained, strict=True):
            if each.grad is not None:
                mine[0], mine[1] = each.grad, 1
        with self._group.activity.within("the gradients of scalar parameters", waits=True):
            dist.all_reduce(sums)
        for (total, users), each in zip(sums, trained, strict=True):
            if each.grad is None and users > 0:
                each.grad = torch.zeros_like(each)
            if each.grad is not None:
                each.grad.copy_(total / self.world_size)

    def begin_micro_batch(self, *about: Any) -> None:
        self.reshard()

    def reshard(self) -> None:
        for each in self._second:
            each.reshard()

    def stepped(self) -> None:
        super().stepped()
        for each in self._second:
            each.release()

    def restored(self, modules: Modules, optimizers: Sequence[Optimizer]) -> None:
        super().restored(modules, optimizers)
        for each in self._second:
            each.release()

    def drop_unreduced(self, optimizer: Optimizer, abandoned: bool) -> None:
        if not self._accumulates:
            return
        owned = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for waiting in (each for model in self._models for each in _parameters_of_torch(model)):
            if id(waiting.sharded_param) in owned:
                waiting.unsharded_accumulated_grad = None
                if hasattr(waiting, "_unsharded_param"):
                    waiting._unsharded_param.grad = None

    def total_count(self, counts: Sequence[Tensor | float]) -> Tensor:
        """Ranks that work on one slice counted the same: it counts once."""
        total = super().total_count(counts)
        if self.world_size > 1:
            dist.all_reduce(total)
            total /= self._copies
        return total

    def gradients_are_finite(self, parameters: Parameters) -> bool:
        """The same on all ranks: each has a part of every gradient."""
        finite = all_finite([local_part(each) for each in gradients_of(parameters)], self.runtime.device).float()
        if self.world_size > 1:
            with self._group.activity.within("whether all gradients are finite", waits=True):
                dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        return bool(finite.item())

    def gradient_norm(self, parameters: Parameters) -> Tensor:
        """A part that several ranks have counts once, as a fraction on each."""
        total = torch.zeros((), dtype=torch.float64, device=self.runtime.device)
        parts: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is not None and (mine := local_part(parameter.grad)).numel():
                parts.setdefault((self._holder_count(parameter), mine.dtype), []).append(mine)
        for (holders, _), tensors in parts.items():
            norms = torch.stack(list(torch._foreach_norm(tensors))).double()
            total += (norms.square().sum() / holders).to(total.device)
        if self.world_size > 1:
            with self._group.activity.within("the norm of the gradients", waits=True):
                dist.all_reduce(total)
        return total.sqrt()

    def _holder_count(self, parameter: nn.Parameter) -> int:
        """Returns how many ranks have this rank's part of a parameter; cached, since it is needed in every step."""
        known = self._holders.get(id(parameter))
        if known is None:
            found = slice_of(parameter)
            known = self._holders[id(parameter)] = self.world_size if found is None else len(found.holders)
        return known

    # State: each rank reads its own parts

    def load_state_dict(self, module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
        load_module(module, state, strict)

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        return whole_matrices.whole_state(optimizer, self._group)

    def load_optimizer_state_dict(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        load_optimizer(optimizer, state, whole=whole_matrices.shared_parameters(optimizer))

    # Comparing

    def parameters_to_check(self, modules: Modules) -> dict[str, Tensor]:
        return {name: local_part(each) for name, each in named_parameters(modules).items()}

    def holders(self, modules: Modules) -> dict[str, tuple[int, ...]]:
        everyone = tuple(range(self.world_size))
        found = {name: slice_of(each) for name, each in named_parameters(modules).items()}
        return {name: everyone if each is None else each.holders for name, each in found.items()}


def _parameters_of_torch(model: FSDPModule) -> Iterator[Any]:
    """Yields what fully_shard keeps of each parameter: only there are gradients that are not exchanged yet."""
    for module in model.modules():  # type: ignore[attr-defined]
        if isinstance(module, FSDPModule):
            for group in param_groups(module._get_fsdp_state()):
                yield from group.fsdp_params


def _refuse_sparse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ConfigError(
                f"{name}.weight: sparse gradients cannot be split over a mesh: make the {type(module).__name__} with "
                "sparse=False, or use strategy: ddp"
            )
