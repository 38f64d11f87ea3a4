"""Muon on several ranks: one rank computes each matrix, and the numbers are those of torch.optim.Muon.

Momentum and the change of the weights work on each number by itself, so every rank does them on its own part. What
needs a whole matrix is to make the update orthogonal. Its parts travel to the rank that does that, and back, in
bfloat16, in which torch computes it anyway.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from lockstep.strategy.slices import Box, boxes_of, from_part, is_spread, local_part

_DTYPE = torch.bfloat16  # in which torch makes an update orthogonal
_ROUND_BYTES = 256 * 2**20  # that a rank receives at once
_plans: WeakKeyDictionary[Optimizer, tuple[tuple[int, ...], Matrices]] = WeakKeyDictionary()


def _step(optimizer: Optimizer) -> None:
    """Steps a torch.optim.Muon; all ranks take part, each with its parts of the same parameters."""
    todo = [(group, each) for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
    key = tuple(id(each) for _, each in todo)
    known = _plans.get(optimizer)
    if known is None or known[0] != key:
        known = _plans[optimizer] = key, Matrices([each for _, each in todo])
    matrices = known[1]
    for numbers in matrices.rounds:
        wholes = matrices.gather({number: _update(optimizer, *todo[number]) for number in numbers})
        for number, whole in wholes.items():
            group = todo[number][0]
            made = _zeropower_via_newtonschulz(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])
            wholes[number] = made
        for number, part in matrices.scatter(wholes, numbers).items():
            group, parameter = todo[number]
            rate = float(group["lr"])
            mine = local_part(parameter)
            mine.mul_(1 - rate * group["weight_decay"])
            mine.add_(part.to(mine.device), alpha=-_adjust_lr(rate, group["adjust_lr_fn"], parameter.shape))


# With the hooks of an optimizer's step, as torch calls them.
step = torch.no_grad()(Optimizer.profile_hook_step(_step))


def _update(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> Tensor:
    """Returns this rank's part of the update before it is made orthogonal."""
    gradient = local_part(parameter.grad)  # type: ignore[arg-type]
    state = optimizer.state[parameter]
    if "momentum_buffer" not in state:
        zeros = torch.zeros_like(gradient)
        state["momentum_buffer"] = from_part(zeros, parameter) if is_spread(parameter) else zeros
    momentum = local_part(state["momentum_buffer"])
    momentum.lerp_(gradient, 1 - group["momentum"])
    update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
    return update.to(_DTYPE, copy=True)  # torch divides it in place


class Matrices:
    """Which rank computes which matrix, and how parts come together there."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._rank, self._size = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        self._shapes = [tuple(each.shape) for each in parameters]
        self._boxes = [boxes_of(each, self._size) for each in parameters]
        self._owners = self._assign()
        self.rounds = list(self._cut())

    def _assign(self) -> list[int]:
        """Gives the most costly matrix that is left to the rank with the least to do."""
        owners, load = [0] * len(self._shapes), [0.0] * self._size
        for number in self._by_cost():
            owners[number] = load.index(min(load))
            load[owners[number]] += self._cost(number)
        return owners

    def _by_cost(self) -> list[int]:
        return sorted(range(len(self._shapes)), key=lambda number: (-self._cost(number), number))

    def _cost(self, number: int) -> float:
        return float(math.prod(self._shapes[number]) * min(self._shapes[number]))

    def _cut(self) -> Iterator[list[int]]:
        """Yields the numbers of the matrices that are exchanged at once, so that memory stays small."""
        begun, size = list[int](), 0
        for number in self._by_cost():
            received = _DTYPE.itemsize * max(math.prod(length) for _, length in self._boxes[number])
            if begun and size + received > _ROUND_BYTES:
                yield begun
                begun, size = [], 0
            begun.append(number)
            size += received
        if begun:
            yield begun

    def _senders(self, number: int) -> list[int]:
        """Returns the ranks whose parts make the whole matrix: of those with the same part one, its owner if it can."""
        found: dict[Box, int] = {}
        for rank in (self._owners[number], *range(self._size)):
            found.setdefault(self._boxes[number][rank], rank)
        return sorted(found.values())

    def gather(self, parts: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Returns the whole matrices that this rank computes, from the parts of all ranks."""
        if self._size == 1:
            return dict(parts)
        numbers = list(parts)
        routes = [(source, self._owners[number], number) for number in numbers for source in self._senders(number)]
        arrived = self._exchange({(self._rank, number): part for number, part in parts.items()}, routes)
        some = next(iter(parts.values()))
        wholes = {
            number: torch.empty(self._shapes[number], dtype=some.dtype, device=some.device)
            for number in numbers if self._owners[number] == self._rank
        }  # fmt: skip
        for (source, number), part in arrived.items():
            _inside(wholes[number], self._boxes[number][source]).copy_(part)
        return wholes

    def scatter(self, wholes: Mapping[int, Tensor], numbers: Sequence[int]) -> dict[int, Tensor]:
        """Returns this rank's parts of matrices that others have computed."""
        if self._size == 1:
            return dict(wholes)
        routes = [(self._owners[number], rank, number) for number in numbers for rank in range(self._size)]
        leaving = {
            (rank, number): _inside(whole, self._boxes[number][rank])
            for number, whole in wholes.items() for rank in range(self._size)
        }  # fmt: skip
        arrived = self._exchange(leaving, routes, to_each=True)
        return {number: part for (_, number), part in arrived.items()}

    def _exchange(
        self, leaving: Mapping[tuple[int, int], Tensor], routes: Sequence[tuple[int, int, int]], to_each: bool = False
    ) -> dict[tuple[int, int], Tensor]:
        """Sends parts along routes (from, to, number), all at once. Returns what arrived, by where it came from.

        `leaving` is by number and this rank or, with `to_each`, the rank that it is for.
        """
        routes = sorted(routes)

        def size(source: int, target: int, number: int) -> int:
            return _DTYPE.itemsize * math.prod(self._boxes[number][target if to_each else source][1])

        sent = [each for each in routes if each[0] == self._rank and size(*each)]
        received = [each for each in routes if each[1] == self._rank and size(*each)]
        device = torch.device("cpu") if dist.get_backend() == "gloo" else torch.device("cuda")
        flat = [leaving[(target if to_each else source, number)].reshape(-1) for source, target, number in sent]
        out = (torch.cat(flat) if flat else torch.empty(0, dtype=_DTYPE)).to(device).view(torch.uint8)
        into = torch.empty(sum(size(*each) for each in received), dtype=torch.uint8, device=device)
        by_rank = range(self._size)
        dist.all_to_all_single(
            into,
            out,
            [sum(size(*each) for each in received if each[0] == rank) for rank in by_rank],
            [sum(size(*each) for each in sent if each[1] == rank) for rank in by_rank],
        )
        ends = list(itertools.accumulate((size(*each) for each in received), initial=0))
        found = {}
        for (source, target, number), begin, end in zip(received, ends, ends[1:], strict=False):
            shape = self._boxes[number][target if to_each else source][1]
            found[(source, number)] = into[begin:end].view(_DTYPE).view(shape)
        return found


def _inside(whole: Tensor, box: Box) -> Tensor:
    offset, size = box
    return whole[tuple(slice(begin, begin + length) for begin, length in zip(offset, size, strict=True))]
