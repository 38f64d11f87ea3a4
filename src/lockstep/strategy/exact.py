"""Adds the gradients of a batch in a fixed binary tree, so that the number of ranks changes no bit (`train.exact`).

Every global batch is divided into as many leaves, whatever the number of ranks; a rank computes its neighbouring leaves
one by one. Two neighbours become their parent, on a rank as soon as both are there, and between ranks by vector halving
and distance doubling: rank 0 and 1, then these and 2 and 3, and so on. Addition of two numbers is commutative, so each
element is ((g0 + g1) + (g2 + g3)) + ... on any number of ranks, and 2 (N - 1) / N of the bytes travel, as in a ring.

What a leaf draws and changes is its own, too: generators are seeded by the seed, the step and the leaf, and buffers
(running statistics) begin each leaf as the step began, and end it as the weighted mean over leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.data.batches import MicroBatch
from lockstep.distributed.group import Group
from lockstep.errors import ConfigError
from lockstep.runtime.base import Runtime, meeting_place, seed_generators
from lockstep.strategy.base import Strategy
from lockstep.strategy.leaves import LeafBuffers, LeafTree
from lockstep.strategy.parameters import Parameters
from lockstep.strategy.tree_exchange import Node, TreeExchange, add_over_ranks, buckets, flat_views

_AFTER_LEAVES = -1  # takes the place of a leaf: between two steps all ranks draw the same


class ExactStrategy(Strategy):
    """One replica per process, which computes its leaves of every batch."""

    reduces_in_step = True

    def __init__(self, runtime: Runtime, group: Group, leaves: int, seed: int) -> None:
        rank, world_size = group.rank, group.world_size
        super().__init__(runtime, world_size)
        self.name = "ddp" if world_size > 1 else "single"
        self._exchange = TreeExchange(runtime, group, self._fill) if world_size > 1 else None
        self._overlaps = True  # until gradients change after they were sent
        self._hooked: set[nn.Parameter] = set()
        self._seen: dict[nn.Parameter, tuple[Tensor, int]] = {}  # gradients as the backward pass left them
        self.has_replicas = world_size > 1
        self.leaves, self._rank, self._seed = leaves, rank, seed
        self._first = rank * leaves // world_size
        self._optimizers: list[Optimizer] = []
        self._buffers = LeafBuffers(leaves // world_size)
        self._tree = LeafTree(leaves // world_size)
        self._kept: Node = {}  # of the current leaf, if the loop is done with a part of it
        self._root: Node = {}  # of the current batch, once an optimizer steps: what the others have still to take
        self._source: str | None = None  # whose micro-batches are the leaves; those of others come with them
        # The current ones; a leaf comes in pieces where it is accumulated.
        self._batch = self._leaf = self._piece = self._step = 0
        self._weight = 0.0  # of the current leaf
        self._computed = False  # whether the current leaf has gradients
        self._most_counts = 0  # of losses that were given as sums: how many the rank with the most has
        self._is_reduced = True  # whether an optimizer has stepped for the batch: all ranks know it alike

    def place(self, model: nn.Module) -> nn.Module:
        model = super().place(model)
        if self.world_size > 1:
            self.runtime.broadcast([*model.parameters(), *model.buffers()])
        self._buffers.add(model)
        return model

    def place_optimizer(self, optimizer: Optimizer) -> None:
        super().place_optimizer(optimizer)
        self._optimizers.append(optimizer)
        if self._exchange is not None:
            for parameter in _parameters_of(optimizer):
                if parameter.requires_grad and parameter not in self._hooked:
                    self._hooked.add(parameter)
                    parameter.register_post_accumulate_grad_hook(self._exchange.computed)  # type: ignore[no-untyped-call]

    def all_gather(self, tensor: Tensor) -> Tensor:
        raise ConfigError(
            f"run.all_gather: with train.exact: {self.leaves} the examples of a leaf are computed by themselves, "
            "whatever the number of ranks: leave all_gather out, and a loss over pairs sees the examples of its leaf"
        )

    # Leaves

    def begin_micro_batch(self, step: int, source: str, micro: MicroBatch, begins_step: bool) -> None:
        if begins_step or (source == self._source and micro.batch != self._batch):
            self._begin_batch(source, micro.leaf)
            self._batch = micro.batch
        elif source == self._source and micro.leaf != self._leaf:
            self._end_leaf()
            self._leaf, self._piece, self._weight = micro.leaf, 0, 0.0
        if source == self._source:
            self._piece, self._weight = self._piece + 1, self._weight + micro.weight
        self._step = step
        if self._exchange is not None and source == self._source and micro.completes_batch:
            self._tree.skip_to(self._leaf - self._first)
            self._exchange.arm()
        seed_generators(self.runtime, self._seed, step, self._leaf, self._piece)

    def _begin_batch(self, source: str, leaf: int) -> None:
        self._end_leaf()
        if self._root or not self._tree.is_empty:
            raise ConfigError(
                f"train.exact: {self.leaves}: gradients of the batch before wait for a step, and those of the next "
                "would be added to them. Step every optimizer for each batch (or clear it by zero_grad), or let "
                "run.batches(..., accumulate=N) make one batch of several"
            )
        if self._exchange is not None and self._exchange.armed:
            self._exchange.finish()  # the loop has dropped the batch before, and other ranks wait for what they sent
        self._is_reduced = False
        self._tree.reset()
        self._buffers.begin_step()
        self._source, self._leaf, self._piece, self._weight = source, leaf, 0, 0.0

    def computed(self, last: bool) -> None:
        super().computed(last)
        self._computed = True
        self._seen = {each: (each.grad, each.grad._version) for each in self._parameters() if each.grad is not None}

    def _parameters(self) -> list[nn.Parameter]:
        return list(dict.fromkeys(each for optimizer in self._optimizers for each in _parameters_of(optimizer)))

    def _end_leaf(self, dropped: Mapping[Hashable, Tensor] | None = None) -> None:
        """Takes the gradients of the leaf that ends here, but for those to drop; the next leaf computes its own."""
        if not self._computed:
            return
        self._computed = False
        self._tree.skip_to(self._leaf - self._first)
        self.keep_gradients(self._parameters())
        self._tree.add({key: each for key, each in self._kept.items() if dropped is None or key not in dropped})
        self._kept = {}
        self._buffers.end_leaf(self._leaf, self._leaf - self._first, self._weight)

    def keep_gradients(self, parameters: Parameters) -> None:
        if self._exchange is not None:
            self._exchange.changed(parameters)
        for parameter in parameters:
            gradient, parameter.grad = parameter.grad, None
            seen = self._seen.pop(parameter, None)
            if gradient is None:
                continue
            if seen is not None and (gradient is not seen[0] or gradient._version != seen[1]):
                raise ConfigError(
                    f"train.exact: {self.leaves}: gradients were changed between run.backward and run.step, where each "
                    "is that of one leaf. Clip by train.clip_norm (run.setup(clip_norm=...)), or leave train.exact out"
                )
            if gradient.is_sparse:
                raise ConfigError(
                    f"train.exact: {self.leaves}: an embedding has sparse gradients, which are added in no fixed "
                    "order: make it with sparse=False"
                )
            if parameter in self._kept:
                self._kept[parameter] += gradient
            else:
                self._kept[parameter] = gradient

    def reduce_gradients(self, parameters: Parameters, counts: int = 0) -> int:
        """Gives parameters the gradients of the whole batch. The first optimizer that steps ends the last leaf."""
        if self._source is None:
            raise ConfigError(
                f"train.exact: {self.leaves} divides the batches of run.batches into leaves, and this loop brings its "
                "own data: use run.batches with a dataset, or leave train.exact out"
            )
        self._most_counts = counts
        if not self._is_reduced:
            self._is_reduced = True
            self._root = self._reduced()
            self._buffers.finish(self._continued)
            seed_generators(self.runtime, self._seed, self._step, _AFTER_LEAVES)
        elif self.world_size > 1:
            (self._most_counts,) = self._most([counts])
        for parameter in parameters:
            parameter.grad = self._root.pop(parameter, None)
        return self._most_counts

    def drop_unreduced(self, optimizer: Optimizer, abandoned: bool) -> None:
        """In the midst of a batch, zero_grad is for the current leaf alone: loops call it for every micro-batch."""
        parameters = _parameters_of(optimizer)
        if self._exchange is not None:
            self._exchange.changed(parameters)
            if abandoned and self._exchange.armed:
                self._exchange.finish()  # other ranks wait for it
        for each in parameters:
            self._root.pop(each, None)
            self._seen.pop(each, None)
            if abandoned:
                self._kept.pop(each, None)
        if abandoned:
            self._tree.drop(parameters)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> None:
        if closure is not None:
            raise ConfigError(
                f"run.step: {type(optimizer).__name__} evaluates a closure on the whole batch, and train.exact: "
                f"{self.leaves} computes it leaf by leaf: leave train.exact out, or use another optimizer"
            )
        super().step(optimizer)

    def total_count(self, counts: Sequence[Tensor | float]) -> Tensor:
        """Adds the counts of all leaves: integers, as a rule, which are exact in any order; others in leaf order."""
        device, dtype = self.runtime.device, self.runtime.count_dtype
        found = [torch.as_tensor(each, dtype=dtype, device=device).detach().reshape(()) for each in counts]
        if self.world_size == 1:
            return torch.stack(found).sum()
        # A leaf may have none (no tokens, no loss): each rank sends how many it has, and as many as any rank has.
        mine = torch.zeros(1 + self._most_counts, dtype=dtype, device=device)
        mine[0] = len(found)
        if found:
            mine[1 : 1 + len(found)] = torch.stack(found)
        here = mine.to(meeting_place(device))
        of_all = [torch.empty_like(here) for _ in range(self.world_size)]
        dist.all_gather(of_all, here)
        return torch.cat([each[1 : 1 + int(each[0])] for each in of_all]).to(device).sum()

    def _fill(self, keys: Sequence[Any], views: Node) -> None:
        """Writes this rank's sums, as they are with the gradients that are there now."""
        leaf = {key: each for key in keys if (each := self._kept.get(key, key.grad)) is not None}
        if leaf:
            torch._foreach_copy_([views[key] for key in leaf], list(leaf.values()))
        for key in [key for key in keys if key in self._kept and key.grad is not None]:
            views[key] += key.grad
        self._tree.add_up(keys, views, set(leaf))

    def _reduced(self) -> Node:
        """Returns the gradients of the whole batch, of the parameters of all optimizers."""
        exchange, all_parameters = self._exchange, self._parameters()
        if exchange is None:
            self._end_leaf()
            return self._tree.finish()
        found, stale = exchange.finish()
        here = {each for each in all_parameters if each.grad is not None or self._tree.has(each) or each in self._kept}
        flags = [each in here for each in all_parameters] + [number in stale for number in range(exchange.count)]
        *anywhere, self._most_counts = self._most([*flags, self._most_counts])
        present = [each for each, there in zip(all_parameters, anywhere, strict=False) if there]
        again = [number for number, is_stale in enumerate(anywhere[len(all_parameters) :]) if is_stale]
        for key in [*exchange.keys(again), *set(found).difference(present)]:
            found.pop(key, None)
        self._tree.drop(list(found))
        self._end_leaf(dropped=found)
        found |= self._exchanged(self._tree.finish(), [key for key in present if key not in found])
        self._overlaps = self._overlaps and not again
        exchange.plan(present[::-1] if self._overlaps else [])
        return found

    def _continued(self, node: Node, like: Mapping[Hashable, Tensor]) -> Node:
        """Continues the tree of buffers over ranks. Returns the sum of what any of them has."""
        if self.world_size == 1:
            return node
        there = self._most([key in node for key in like])
        return self._exchanged(node, [key for key, present in zip(like, there, strict=True) if present], like)

    def _exchanged(self, node: Node, keys: Sequence[Any], like: Mapping[Hashable, Tensor] | None = None) -> Node:
        found: Node = {}
        for bucket in buckets([(key, like[key] if like is not None else key) for key in keys]):
            flat, views = flat_views(bucket, self.world_size)
            here = [key for key, _ in bucket if key in node]
            if here:
                torch._foreach_copy_([views[key] for key in here], [node.pop(key) for key in here])
            add_over_ranks(flat, self._rank, self.world_size)
            found.update(views)
        return found

    def _most(self, present: Sequence[int]) -> list[int]:
        """Returns for each of these the most that any rank has: whether any has it."""
        has = torch.tensor(present, dtype=torch.int32, device=meeting_place(self.runtime.device))
        dist.all_reduce(has, dist.ReduceOp.MAX)
        return list(map(int, has.tolist()))


def _parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [each for group in optimizer.param_groups for each in group["params"]]
