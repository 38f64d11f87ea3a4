"""Names the mistakes of loops that were ported by hand, in their first steps: each would train something else."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.distributed.group import Group
from lockstep.errors import ConfigError
from lockstep.runtime.base import Runtime
from lockstep.strategy.base import Strategy

logger = logging.getLogger(__name__)

# Backward passes without a step that may still be accumulation: in run.batches, and with data of the loop's own, where
# every reward or sample often has a separate pass.
_MOST_PASSES, _MOST_OWN_PASSES = 256, 2048
_CLEARED = 3  # so often gradients were cleared that no optimizer has used
_LOOKED_AT = 3  # backward passes on the loop's own data
_SHOWN = 6  # names in a message


class _Inside:
    """Whether run.backward or run.step works; a closure calls the one within the other. A generator would be slower."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *failure: object) -> None:
        self.depth -= 1


class LoopChecks:
    """Looks on until the loop has stepped an optimizer, and at the data of its first steps."""

    def __init__(self, group: Group, runtime: Runtime, dp_size: int) -> None:
        self._group, self._runtime = group, runtime
        self._inside = _Inside()
        self._hooks: dict[int, RemovableHandle] = {}
        self._parameters: list[nn.Parameter] = []
        self._stepped = self._warned = False
        self._passes = self._cleared = 0
        self._walked: set[int] = set()
        self._compares_data = group.world_size > 1 and dp_size > 1
        self._losses: list[Tensor] = []

    # optimizer.step() in place of run.step(optimizer)

    def watch(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Refuses optimizer.step() outside of run.step, until run.step was called for this optimizer."""
        self._parameters = self._parameters or [each for each in model.parameters() if each.requires_grad]
        if isinstance(optimizer, Optimizer):
            self._hooks[id(optimizer)] = optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._inside.depth:
            raise ConfigError(
                "optimizer.step() was called: such a step is not counted, logged or saved, and is not that of the "
                "global batch. Replace loss.backward() and optimizer.step() by run.backward(loss) and "
                "run.step(optimizer)"
            )

    def stepping(self, optimizer: Optimizer | None) -> _Inside:
        """While run.step works. Its optimizer is no longer watched: a hook costs, and may change how it steps."""
        if self._hooks:
            for key in [id(optimizer)] if optimizer is not None else list(self._hooks):
                if key in self._hooks:
                    self._hooks.pop(key).remove()
        self._stepped = True
        return self._inside

    # run.step left out

    def computing(self, loss: Tensor, own_data: bool, completes_batch: bool) -> _Inside:
        """While run.backward works."""
        if not self._stepped and completes_batch:
            self._count_pass(own_data)
        if own_data and self._compares_data:
            self._compare_losses(loss)
        return self._inside

    def walks(self, dataset: Any) -> None:
        """The loop begins a pass over a dataset."""
        if not self._stepped and self._passes and id(dataset) in self._walked:
            self._warn_no_step()
        self._walked.add(id(dataset))

    def finish(self) -> None:
        if not self._stepped and self._passes:
            self._warn_no_step()

    def _count_pass(self, own_data: bool) -> None:
        if self._passes and all(each.grad is None for each in self._parameters):
            self._cleared += 1
        self._passes += 1
        if self._cleared >= _CLEARED or self._passes > (_MOST_OWN_PASSES if own_data else _MOST_PASSES):
            self._warn_no_step()

    def _warn_no_step(self) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "%d backward passes and no run.step: no weight has changed. Call run.step(optimizer) after "
                "run.backward(loss), in place of optimizer.step()", self._passes,
            )  # fmt: skip

    # Ranks that make the same data

    def _compare_losses(self, loss: Tensor) -> None:
        self._losses.append(loss.detach())
        if len(self._losses) < _LOOKED_AT:
            return
        self._compares_data = False
        losses = [] if self._runtime.compiles_everything else [each.item() for each in self._losses]
        self._losses = []
        found = self._group.gather(losses, "the losses of the first steps")
        if len(set(losses)) > 1 and all(each == losses for each in found):
            logger.warning(
                "every rank computes the same: the first %d losses are equal on all %d ranks. Iterate "
                "run.batches(dataset or loader, batch_size), or give each rank its own data by run.rank",
                len(losses), self._group.world_size,
            )  # fmt: skip


def check_hooks(named: Mapping[str, Tensor], strategy: Strategy, are_lost: bool) -> None:
    """Refuses hooks on parameters that torch does not call, and names those that see a part of a gradient."""
    hooked = [name for name, each in named.items() if getattr(each, "_backward_hooks", None)]
    instead = "Change finished gradients in a callback before_optimizer_step, or by run.gradients(optimizer)"
    if hooked and are_lost:
        raise ConfigError(
            f"run.setup: {', '.join(hooked[:_SHOWN])} has a hook (register_hook), and strategy: {strategy.name} splits "
            f"parameters, whose hooks torch does not call. {instead}"
        )
    if hooked and (strategy.dp_size > 1 or strategy.leaves):
        logger.warning(
            "%s has a hook (register_hook), which is called with the gradient of a part of the batch: right for a mask "
            "or a factor, and not for clipping. %s", ", ".join(hooked[:_SHOWN]), instead,
        )  # fmt: skip


def outside_of_a_step(what: str) -> ConfigError:
    return ConfigError(
        f"{what}: comes outside of a batch, where nothing is divided over ranks, and the run can neither be saved nor "
        "stopped. Iterate run.batches(dataset or loader, batch_size), or run.stream(...) where each rank has different "
        "batches. A loop that makes its data, as in reinforcement learning: for step in run.steps(count)"
    )


def refuse_steps_among_batches(mixed: bool) -> None:
    if mixed:
        raise ConfigError(
            "run.steps: is for loops that make their data, and cannot be combined with run.batches, run.stream or "
            "another run.steps, one inside of the other. Count with range(), or by run.epochs around run.batches"
        )


def saved_in_inner_loop(outer: str, inner: str) -> ConfigError:
    return ConfigError(
        f"run.checkpoint: was called in a loop over {inner} within a batch of {outer}: a resumed run would leave out "
        f"the rest of that batch. Call it in the loop over {outer}, after the inner one, or iterate over the outer "
        "data without run.batches"
    )


def compare_order(group: Group, name: str, facts: dict[str, Any]) -> None:
    """Refuses ranks with different orders: examples would be left out."""
    if group.world_size == 1:
        return
    everywhere = group.gather(facts, f"the order of {name}")
    for rank, other in enumerate(everywhere):
        differ = [f"{fact} {everywhere[0].get(fact)!r} on rank 0, {other.get(fact)!r} on rank {rank}"
                  for fact in {**everywhere[0], **other} if everywhere[0].get(fact) != other.get(fact)]  # fmt: skip
        if differ:
            raise ConfigError(
                f"run.batches: the ranks do not have the same order of {name}: {'; '.join(differ)}. Data, weights, "
                "lengths and a custom order must be the same on all ranks: make them from the seed"
            )


def refuse_stream(data: Any, leaves: int | None) -> None:
    """Refuses a stream with train.exact: which of its examples are in a batch depends on the number of ranks."""
    if leaves:
        raise ConfigError(
            f"train.exact: {leaves} needs batches that are the same on any number of ranks, and "
            f"{type(data).__name__} is a stream, of which every rank reads its own shards: use a dataset with __len__ "
            "and __getitem__, or leave train.exact out"
        )


def require_nothing_saved(storage: CheckpointStorage, attempt: int) -> None:
    """Refuses a restart or resume that has not restored its checkpoint."""
    if steps := storage.steps():
        raise ConfigError(
            f"{f'this is restart {attempt}' if attempt else 'the run is resumed'}, and main has not called "
            f"run.restore(): it would begin at step 0 and set {storage.path(steps[-1]).name} aside. Call run.restore() "
            "after run.setup"
        )


def warn_of_restarts(most: int) -> None:
    logger.warning(
        "launch.max_restarts is %d, but main does not call run.restore(): a restart cannot continue from a checkpoint. "
        "Call run.restore() after run.setup", most,
    )  # fmt: skip
