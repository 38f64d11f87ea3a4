"""Optimizers that need whole matrices, of which ranks have parts: one rank computes each matrix.

An optimizer says so by an attribute, `whole_matrices = True` (SOAP, Shampoo). Gradients and weights travel to the rank
that computes a matrix, and weights back. That rank alone has the state, and checkpoints have all of it.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.errors import ConfigError
from lockstep.runtime.base import in_buckets, meeting_place
from lockstep.strategy.combined import parts_of
from lockstep.strategy.slices import Box, boxes_of, local_part

if TYPE_CHECKING:
    from lockstep.distributed.group import Group

_plans: WeakKeyDictionary[Optimizer, tuple[tuple[int, ...], Matrices]] = WeakKeyDictionary()


def needs_whole(optimizer: Optimizer) -> bool:
    return bool(getattr(optimizer, "whole_matrices", False))


def plan_of(
    optimizer: Optimizer, parameters: Sequence[Tensor], dtype: torch.dtype, round_bytes: float = math.inf
) -> Matrices:
    """Returns the plan for these parameters; the one of the step before, if they are the same."""
    key = tuple(map(id, parameters))
    known = _plans.get(optimizer)
    if known is None or known[0] != key:
        known = _plans[optimizer] = key, Matrices(parameters, dtype, round_bytes)
    return known[1]


@torch.no_grad()
def step(optimizer: Optimizer) -> None:
    """Steps an optimizer on whole matrices; all ranks take part, each with its parts of the same parameters."""
    groups = [group["params"] for group in optimizer.param_groups]
    todo = [each for parameters in groups for each in parameters if each.grad is not None]
    kinds = {each.dtype for each in todo}
    if len(kinds) > 1:
        raise ConfigError(
            f"optimizer: {type(optimizer).__name__} needs whole matrices, and its parameters have several dtypes "
            f"({', '.join(sorted(map(str, kinds)))}): give it those of one, and the others to another optimizer"
        )
    if not todo:
        return
    # Of all parameters, so that each stays with the rank that has its state, whichever have gradients in a step.
    everything = [each for parameters in groups for each in parameters]
    numbered = {number: each for number, each in enumerate(everything) if each.grad is not None}
    matrices = plan_of(optimizer, everything, todo[0].dtype)
    gradients = matrices.gather({number: local_part(each.grad) for number, each in numbered.items()})
    weights = matrices.gather({number: local_part(each) for number, each in numbered.items()})
    mine: dict[Tensor, nn.Parameter] = {}
    for number, whole in weights.items():
        mine[numbered[number]] = parameter = nn.Parameter(whole)
        parameter.grad = gradients[number]
    state = optimizer.state
    optimizer.state = defaultdict(dict, {whole: state[each] for each, whole in mine.items() if each in state})
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [mine[each] for each in parameters if each in mine]
    try:
        with torch.enable_grad():
            optimizer.step()
    finally:
        learned, optimizer.state = optimizer.state, state
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = parameters
    for each in todo:
        state.pop(each, None)  # what another rank has of it was restored here, too
        if each in mine and mine[each] in learned:
            state[each] = learned[mine[each]]
    wholes = {number: mine[numbered[number]].detach() for number in weights}
    for number, part in matrices.scatter(wholes, list(numbered)).items():
        local_part(numbered[number]).copy_(part)


def shared_parameters(optimizer: Optimizer) -> set[int]:
    """Returns the numbers of the parameters whose state one rank alone has."""
    whole = {id(each) for part in parts_of(optimizer) if needs_whole(part) for each in _parameters(part)}
    return {number for number, each in enumerate(_parameters(optimizer)) if id(each) in whole}


def whole_state(optimizer: Optimizer, group: Group) -> dict[str, Any]:
    """Returns the state_dict of an optimizer, with the state that other ranks have; all of them call it."""
    found = optimizer.state_dict()
    shared = shared_parameters(optimizer)
    if not shared or group.world_size == 1:
        return found
    device = next(iter(_parameters(optimizer))).device
    mine: list[Tensor] = []
    told = _described({number: each for number, each in found["state"].items() if number in shared}, mine)
    for rank, theirs in enumerate(group.gather(told, "the state of the optimizer")):
        waiting = iter(mine)

        def received(shape: list[int], dtype: str, rank: int = rank, waiting: Iterator[Tensor] = waiting) -> Tensor:
            is_mine = rank == group.rank
            tensor = next(waiting) if is_mine else torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            sent = tensor.to(device).contiguous()
            dist.broadcast(sent, src=rank)
            return tensor if is_mine else sent

        with group.activity.within("the state of the optimizer", waits=True):
            found["state"].update(_rebuilt(theirs, received))
    return found


def _described(value: Any, tensors: list[Tensor]) -> Any:
    """Returns plain data in which each tensor is its shape and dtype, and collects the tensors."""
    match value:
        case Tensor():
            tensors.append(value)
            return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        case dict():
            return {"dict": [_described(each, tensors) for each in value.items()]}
        case list() | tuple():
            return {"tuple" if isinstance(value, tuple) else "list": [_described(each, tensors) for each in value]}
    return {"value": value}


def _rebuilt(told: Any, received: Callable[[list[int], str], Tensor]) -> Any:
    if "shape" in told:
        return received(told["shape"], told["dtype"])
    ((kind, value),) = told.items()
    made = {"dict": dict, "tuple": tuple, "list": list}.get(kind)
    return value if made is None else made(_rebuilt(each, received) for each in value)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


class Matrices:
    """Which rank computes which matrix, and how parts come together there.

    They travel in `dtype`, and in rounds in which a rank receives no more than about so many bytes.
    """

    def __init__(self, parameters: Sequence[Tensor], dtype: torch.dtype, round_bytes: float) -> None:
        self._dtype = dtype
        several = dist.is_initialized() and dist.get_world_size() > 1
        self.rank, self._size = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        self._shapes = [tuple(each.shape) for each in parameters]
        self._boxes = [boxes_of(each, self._size) for each in parameters]
        self.owners = self._assign()
        # The numbers of the matrices that are exchanged at once, so that memory stays small.
        self.rounds = in_buckets(self._by_cost(), self._most_received, round_bytes)

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
        return float(math.prod(self._shapes[number]) * min(self._shapes[number], default=1))

    def _most_received(self, number: int) -> int:
        return self._dtype.itemsize * max(math.prod(length) for _, length in self._boxes[number])

    def _senders(self, number: int) -> list[int]:
        """Returns the ranks whose parts make the whole matrix: of those with the same part one, its owner if it can."""
        found: dict[Box, int] = {}
        for rank in (self.owners[number], *range(self._size)):
            found.setdefault(self._boxes[number][rank], rank)
        return sorted(found.values())

    def gather(self, parts: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Returns the whole matrices that this rank computes, from the parts of all ranks."""
        if self._size == 1:
            return dict(parts)
        numbers = list(parts)
        routes = [(source, self.owners[number], number) for number in numbers for source in self._senders(number)]
        arrived = self._exchange({(self.rank, number): part for number, part in parts.items()}, routes)
        device = next(iter(parts.values())).device
        wholes = {
            number: torch.empty(self._shapes[number], dtype=self._dtype, device=device)
            for number in numbers if self.owners[number] == self.rank
        }  # fmt: skip
        for (source, number), part in arrived.items():
            _inside(wholes[number], self._boxes[number][source]).copy_(part)
        return wholes

    def scatter(self, wholes: Mapping[int, Tensor], numbers: Sequence[int]) -> dict[int, Tensor]:
        """Returns this rank's parts of matrices that others have computed."""
        if self._size == 1:
            return dict(wholes)
        routes = [(self.owners[number], rank, number) for number in numbers for rank in range(self._size)]
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
            return self._dtype.itemsize * math.prod(self._boxes[number][target if to_each else source][1])

        sent = [each for each in routes if each[0] == self.rank and size(*each)]
        received = [each for each in routes if each[1] == self.rank and size(*each)]
        device = meeting_place(torch.device("cuda"))
        flat = [leaving[(target if to_each else source, number)].reshape(-1) for source, target, number in sent]
        out = (torch.cat(flat) if flat else torch.empty(0, dtype=self._dtype)).to(device).view(torch.uint8)
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
            found[(source, number)] = into[begin:end].view(self._dtype).view(shape)
        return found


def _inside(whole: Tensor, box: Box) -> Tensor:
    offset, size = box
    return whole[tuple(slice(begin, begin + length) for begin, length in zip(offset, size, strict=True))]
