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
from lockstep.errors import ConfigError
from lockstep.runtime.base import Runtime, seed_generators
from lockstep.strategy.base import Strategy
from lockstep.strategy.parameters import Parameters, to_device

Node = dict[Hashable, Tensor]

_BUCKET_BYTES = 64 * 2**20
# Gradients begin at multiples of so many elements, as they would by themselves: reductions on CUDA depend on it.
_ALIGNED = 128
_AFTER_LEAVES = -1  # takes the place of a leaf: between two steps all ranks draw the same


class LeafTree:
    """Adds up what the leaves of this rank have computed, two neighbours at a time."""

    def __init__(self, leaves: int) -> None:
        self._leaves = leaves
        self._nodes: list[Node] = []  # complete ones, from the left
        self._heights: list[int] = []
        self.taken = 0  # leaves so far

    def add(self, leaf: Node) -> None:
        node, height = leaf, 0
        while self._heights and self._heights[-1] == height:
            node, height = _parent(self._nodes.pop(), node), self._heights.pop() + 1
        self._nodes.append(node)
        self._heights.append(height)
        self.taken += 1

    def drop(self, keys: Sequence[Hashable]) -> None:
        for node in self._nodes:
            for key in keys:
                node.pop(key, None)

    def finish(self) -> Node:
        """Returns the root, and begins anew."""
        self.skip_to(self._leaves)
        (root,) = self._nodes
        self.reset()
        return root

    def skip_to(self, leaf: int) -> None:
        """Leaves that computed nothing count as zeros."""
        while self.taken < leaf:
            self.add({})

    def reset(self) -> None:
        self._nodes, self._heights, self.taken = [], [], 0

    @property
    def is_empty(self) -> bool:
        return not any(self._nodes)


def _parent(left: Node, right: Node) -> Node:
    """Adds two nodes. What only one of them has is added to zero, as it is where the other is on another rank."""
    both = [key for key in left if key in right]
    if both:
        torch._foreach_add_([left[key] for key in both], [right[key] for key in both])
    alone = [node[key] for node, other in ((left, right), (right, left)) for key in node if key not in other]
    if alone:
        torch._foreach_add_(alone, 0)
    return {**right, **left}


class ExactStrategy(Strategy):
    """One replica per process, which computes its leaves of every batch."""

    reduces_in_step = True

    def __init__(self, runtime: Runtime, rank: int, world_size: int, leaves: int, seed: int) -> None:
        super().__init__(runtime, world_size)
        self.name = "ddp" if world_size > 1 else "single"
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

    def place(self, model: nn.Module) -> nn.Module:
        model = to_device(model, self.runtime.device)
        if self.world_size > 1:
            with torch.no_grad():
                self.runtime.broadcast([*model.parameters(), *model.buffers()])
        self._buffers.add(model)
        return model

    def place_optimizer(self, optimizer: Optimizer) -> None:
        super().place_optimizer(optimizer)
        self._optimizers.append(optimizer)

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
        seed_generators(self.runtime, self._seed, step, self._leaf, self._piece)

    def _begin_batch(self, source: str, leaf: int) -> None:
        self._end_leaf()
        if self._root or not self._tree.is_empty:
            raise ConfigError(
                f"train.exact: {self.leaves}: gradients of the batch before wait for a step, and those of the next "
                "would be added to them. Step every optimizer for each batch (or clear it by zero_grad), or let "
                "run.batches(..., accumulate=N) make one batch of several"
            )
        self._tree.reset()
        self._buffers.begin_step()
        self._source, self._leaf, self._piece, self._weight = source, leaf, 0, 0.0

    def computed(self, last: bool) -> None:
        super().computed(last)
        self._computed = True

    def _end_leaf(self) -> None:
        """Takes the gradients of the leaf that ends here; the next one computes its own."""
        if not self._computed:
            return
        self._computed = False
        self._tree.skip_to(self._leaf - self._first)
        self._tree.add(self._taken_gradients())
        self._buffers.end_leaf(self._leaf, self._leaf - self._first, self._weight)

    def _taken_gradients(self) -> Node:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                self.keep_gradients(group["params"])
        node, self._kept = self._kept, {}
        return node

    def keep_gradients(self, parameters: Parameters) -> None:
        for parameter in parameters:
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            if gradient.is_sparse:
                raise ConfigError(
                    f"train.exact: {self.leaves}: an embedding has sparse gradients, which are added in no fixed "
                    "order: make it with sparse=False"
                )
            if parameter in self._kept:
                self._kept[parameter] += gradient
            else:
                self._kept[parameter] = gradient

    def reduce_gradients(self, parameters: Parameters) -> None:
        """Gives parameters the gradients of the whole batch. The first optimizer that steps ends the last leaf."""
        if self._source is None:
            raise ConfigError(
                f"train.exact: {self.leaves} divides the batches of run.batches into leaves, and this loop brings its "
                "own data: use run.batches with a dataset, or leave train.exact out"
            )
        if self._tree.taken or self._computed:
            self._end_leaf()
            self._root = self._tree.finish()
            self._buffers.finish(self._exchanged)
            seed_generators(self.runtime, self._seed, self._step, _AFTER_LEAVES)
        found = self._exchanged({each: self._root.pop(each) for each in parameters if each in self._root}, parameters)
        for parameter in parameters:
            parameter.grad = found.get(parameter)

    def drop_unreduced(self, optimizer: Optimizer, abandoned: bool) -> None:
        """In the midst of a batch, zero_grad is for the current leaf alone: loops call it for every micro-batch."""
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        for each in parameters:
            self._root.pop(each, None)
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
        mine = torch.stack([torch.as_tensor(each, dtype=dtype, device=device).detach().reshape(()) for each in counts])
        if self.world_size == 1:
            return mine.sum()
        here = mine.to(_device_between(device))
        of_all = [torch.empty_like(here) for _ in range(self.world_size)]
        dist.all_gather(of_all, here)
        return torch.cat(of_all).to(device).sum()

    def _exchanged(self, node: Node, keys: Sequence[Hashable], like: Mapping[Hashable, Tensor] | None = None) -> Node:
        """Continues the tree over ranks. Returns the sum of what any of them has."""
        if self.world_size == 1:
            return node
        tensors = [like[key] if like is not None else key for key in keys]
        there = self._anywhere([key in node for key in keys])
        wanted = [(key, each) for key, each, present in zip(keys, tensors, there, strict=True) if present]
        found: Node = {}
        for bucket in _buckets(wanted):
            flat, views = _flattened(bucket, node, self.world_size)
            add_over_ranks(flat, self._rank, self.world_size)
            found.update(views)
        return found

    def _anywhere(self, present: list[bool]) -> list[bool]:
        """Returns for each of these whether any rank has it."""
        has = torch.tensor(present, dtype=torch.uint8, device=_device_between(self.runtime.device))
        dist.all_reduce(has, dist.ReduceOp.MAX)
        return list(map(bool, has.tolist()))


def _buckets(wanted: Sequence[tuple[Hashable, Any]]) -> list[list[tuple[Hashable, Tensor]]]:
    """Groups tensors of one dtype and device, each group of a limited size."""
    found: list[list[tuple[Hashable, Tensor]]] = []
    open_ones: dict[tuple[torch.dtype, torch.device], int] = {}
    for key, tensor in wanted:
        kind = (tensor.dtype, tensor.device)
        at = open_ones.get(kind)
        if at is None or sum(each.nbytes for _, each in found[at]) + tensor.nbytes > _BUCKET_BYTES:
            at = open_ones[kind] = len(found)
            found.append([])
        found[at].append((key, tensor))
    return found


def _flattened(bucket: Sequence[tuple[Hashable, Tensor]], node: Node, world_size: int) -> tuple[Tensor, Node]:
    """Moves a bucket's part of a node into one tensor. Returns it, and its parts in their shapes."""
    starts, end = [], 0
    for _, tensor in bucket:
        starts.append(end)
        end += -(-tensor.numel() // _ALIGNED) * _ALIGNED
    flat = torch.zeros(-(-end // world_size) * world_size, dtype=bucket[0][1].dtype, device=bucket[0][1].device)
    views: Node = {
        key: flat[start : start + tensor.numel()].view(tensor.shape)
        for start, (key, tensor) in zip(starts, bucket, strict=True)
    }
    here = [key for key, _ in bucket if key in node]
    if here:
        torch._foreach_copy_([views[key] for key in here], [node.pop(key) for key in here])
    return flat, views


def add_over_ranks(flat: Tensor, rank: int, world_size: int) -> None:
    """Sums a tensor over ranks in place in the order of a binary tree: halving what is exchanged, then the way back."""
    low, high, distance = 0, flat.numel(), 1
    exchanges: list[tuple[int, tuple[int, int], tuple[int, int]]] = []
    while distance < world_size:
        partner, middle = rank ^ distance, (low + high) // 2
        kept, given = ((low, middle), (middle, high)) if rank < partner else ((middle, high), (low, middle))
        flat[slice(*kept)] += _swapped(flat[slice(*given)], kept[1] - kept[0], partner)
        exchanges.append((partner, kept, given))
        (low, high), distance = kept, distance * 2
    for partner, kept, given in reversed(exchanges):
        flat[slice(*given)] = _swapped(flat[slice(*kept)], given[1] - given[0], partner)


def _swapped(mine: Tensor, length: int, partner: int) -> Tensor:
    """Sends a tensor to another rank, and returns what that rank sends. Gloo sends from the host alone."""
    here = mine.to(_device_between(mine.device))
    theirs = torch.empty(length, dtype=mine.dtype, device=here.device)
    sent, received = dist.P2POp(dist.isend, here, partner), dist.P2POp(dist.irecv, theirs, partner)
    for work in dist.batch_isend_irecv([sent, received]):
        work.wait()
    return theirs.to(mine.device)


def _device_between(device: torch.device) -> torch.device:
    return torch.device("cpu") if dist.get_backend() == "gloo" else device


class LeafBuffers:
    """The buffers of models that a forward pass in training changes: each leaf begins with those of the step."""

    def __init__(self, leaves: int) -> None:
        self._tree = LeafTree(leaves)
        self._models: list[nn.Module] = []
        self._begun: dict[tuple[nn.Module, str], tuple[Tensor, Tensor]] = {}  # the buffer, and its value then
        self._versions: dict[tuple[nn.Module, str], int] = {}
        self._silent: set[tuple[nn.Module, str]] = set()  # those that change without a new version, found once
        self._looked = False

    def add(self, model: nn.Module) -> None:
        self._models.append(model)

    def begin_step(self) -> None:
        self._restore()
        self._tree.reset()
        self._begun = {
            (module, name): (buffer, buffer.detach().clone())
            for model in self._models
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.numel()
        }
        self._versions = {key: buffer._version for key, (buffer, _) in self._begun.items()}

    def end_leaf(self, leaf: int, number: int, weight: float) -> None:
        """Takes what a leaf changed, and restores it. Whole numbers count batches: one leaf has them for all."""
        changes: Node = {}
        for key in self._changed():
            now, before = key[0]._buffers[key[1]], self._begun[key][1]
            if now is not None and (before.is_floating_point() or before.is_complex()):
                changes[key] = (now.detach() - before) * weight
            elif now is not None and leaf == 0:
                changes[key] = now.detach() - before if before.dtype != torch.bool else now.detach().clone()
        self._tree.skip_to(number)
        self._tree.add(changes)
        self._restore()

    def finish(self, exchanged: Callable[..., Node]) -> None:
        """Gives buffers the weighted mean over all leaves."""
        changes = self._tree.finish()
        if not self._begun:
            return
        befores = {key: before for key, (_, before) in self._begun.items()}
        found = exchanged(changes, list(befores), befores)
        with torch.no_grad():
            for key, change in found.items():
                buffer, before = self._begun[key]  # type: ignore[index]
                buffer.copy_(change if before.dtype == torch.bool else before + change)
        self._begun = {}

    def _changed(self) -> list[tuple[nn.Module, str]]:
        """Torch's kernels for batch normalization write to buffers without a new version."""
        changed = [
            key
            for key, (buffer, _) in self._begun.items()
            if key[0]._buffers[key[1]] is not buffer or buffer._version != self._versions[key] or key in self._silent
        ]
        if self._begun and not self._looked:
            self._looked = True
            others = [key for key in self._begun if key not in changed]
            self._silent = {key for key in others if _may_change(key[0]) or not torch.equal(*self._begun[key])}
            changed += self._silent
        return changed

    @torch.no_grad()
    def _restore(self) -> None:
        for key in self._changed():
            buffer, before = self._begun[key]
            key[0]._buffers[key[1]] = buffer
            buffer.copy_(before)
            self._versions[key] = buffer._version


def _may_change(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._NormBase)
