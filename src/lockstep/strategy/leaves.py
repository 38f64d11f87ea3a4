"""What the leaves of `train.exact` leave behind: gradients, added up in a tree, and buffers, each leaf with its own."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lockstep.strategy.tree_exchange import Node


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

    def has(self, key: Hashable) -> bool:
        return any(key in node for node in self._nodes)

    def add_up(self, keys: Sequence[Hashable], views: Node, given: set[Hashable]) -> None:
        """Adds what the leaves before have to what `views` were `given` of the last leaf, and to zeros elsewhere."""
        for node in reversed(self._nodes):
            here = [key for key in keys if key in node]
            alone = [views[key] for key in given if key not in node]
            if here:
                torch._foreach_add_([views[key] for key in here], [node[key] for key in here])
            if alone:
                torch._foreach_add_(alone, 0)
            given.update(here)


def _parent(left: Node, right: Node) -> Node:
    """Adds two nodes. What only one of them has is added to zero, as it is where the other is on another rank."""
    both = [key for key in left if key in right]
    if both:
        torch._foreach_add_([left[key] for key in both], [right[key] for key in both])
    alone = [node[key] for node, other in ((left, right), (right, left)) for key in node if key not in other]
    if alone:
        torch._foreach_add_(alone, 0)
    return {**right, **left}


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

    def finish(self, continued: Callable[[Node, Mapping[Hashable, Tensor]], Node]) -> None:
        """Gives buffers the weighted mean over all leaves; `continued` continues the tree over ranks."""
        changes = self._tree.finish()
        if not self._begun:
            return
        found = continued(changes, {key: before for key, (_, before) in self._begun.items()})
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
