"""Fingerprints of replicas: equal on all ranks, or the run stops and names the parameter that differs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.distributed.group import Group
from lockstep.distributed.topology import ranks_text
from lockstep.errors import NonFiniteWeights, ReplicasDiffer
from lockstep.strategy.base import Strategy
from lockstep.strategy.parameters import Modules, named_parameters
from lockstep.strategy.slices import local_part

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORD = 8

Holders = tuple[int, ...]


def fingerprint(tensors: Mapping[str, Tensor]) -> list[int]:
    """Returns a number per tensor that changes with any of its bits: their sum as integers, exact in any order.

    Reads every tensor once, where it is, and waits for the device once.
    """
    if not tensors:
        return []
    with torch.no_grad():
        sums = [_bits(each.detach()).sum(dtype=torch.int64) for each in tensors.values()]
        return [int(each) for each in torch.stack(sums).tolist()]


def marks_of_weights(strategy: Strategy, modules: Modules) -> list[list[int]] | None:
    """Returns numbers that change with this rank's weights and buffers; None where one of them has no fingerprint."""
    buffers = [local_part(each) for module in modules.values() for each in module.buffers()]
    try:
        # Buffers one by one: they may be on several devices.
        each_buffer = [fingerprint({"": each}) for each in strategy.runtime.fetch(buffers)]
        return [fingerprint(strategy.parameters_to_check(modules)), *each_buffer]
    except RuntimeError:  # sparse, quantized
        return None


def non_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Returns the first tensor with a value that is not finite; in the usual case one wait for the device."""
    floating = {name: each.detach() for name, each in tensors.items() if each.is_floating_point() and each.numel()}
    if not floating or torch.isfinite(torch.nn.utils.get_total_norm(list(floating.values()), math.inf)):
        return None
    return next((name for name, each in floating.items() if not each.isfinite().all()), None)


def digests(fingerprints: list[int], holders: list[Holders]) -> dict[str, int]:
    """Returns one number for all tensors that the same ranks hold, by these ranks; it depends on their order, too."""
    together: dict[str, list[int]] = {}
    for index, each in enumerate(fingerprints):
        together.setdefault(_key(holders[index]) if holders else "", []).append(each)
    return {key: hash(tuple(each)) for key, each in together.items()}


def check_replicas(
    group: Group, strategy: Strategy, modules: Modules, message: Mapping[str, Any], name: str, step: int
) -> list[dict[str, Any]]:
    """Gathers a message from all ranks, and checks that weights are finite, and equal where they must be."""
    checked = strategy.parameters_to_check(modules)
    mine = fingerprint(checked) if strategy.has_replicas else []
    holders = list((strategy.holders(modules) or {}).values())
    # Frozen weights may be what they are: a mask of -inf, or of a type that has no norm.
    trained = {name for name, each in named_parameters(modules).items() if each.requires_grad}
    bad = non_finite({name: each for name, each in checked.items() if name in trained})
    about = {"fingerprint": digests(mine, holders), "bad": bad, "used": strategy.used}
    messages = group.gather({**message, **about}, name)
    strategy.compare_used([each["used"] for each in messages])
    found = {rank: each["bad"] for rank, each in enumerate(messages) if each["bad"]}
    if found:
        ranks = "all ranks" if len(found) == len(messages) else ranks_text(list(found))
        raise NonFiniteWeights(step, next(iter(found.values())), ranks)
    compare(group, list(checked), mine, holders, [each["fingerprint"] for each in messages], step)
    return messages


def compare(
    group: Group, names: list[str], mine: list[int], holders: list[Holders], messages: list[dict[str, int]], step: int
) -> None:
    """Raises on every rank where digests differ that must not; only then the fingerprints themselves are exchanged.

    `holders` are the ranks that have the same of each tensor as this one; none given, all ranks have all of it.
    """
    found: dict[str, set[int]] = {}
    for message in messages:
        for key, digest in message.items():
            found.setdefault(key, set()).add(digest)
    if all(len(each) == 1 for each in found.values()):
        return
    everyone: list[Any] = group.gather([mine, [_key(each) for each in holders]], f"the fingerprints of step {step}")
    for index, name in enumerate(names):
        alike: dict[str, dict[int, int]] = {}
        for rank, (each, keys) in enumerate(everyone):
            alike.setdefault(keys[index] if keys else "", {})[rank] = each[index]
        for ranks in alike.values():
            if len(set(ranks.values())) > 1:
                raise ReplicasDiffer(difference(step, name, ranks, group.world_size))


def _key(holders: Holders) -> str:
    return ",".join(map(str, holders))


def difference(step: int, name: str, found: Mapping[int, int], world_size: int) -> str:
    """Describes how ranks disagree about a parameter: the odd ones out, where there is a majority."""
    counted = Counter(found.values()).most_common()
    usual, votes = counted[0]
    odd = [rank for rank, each in found.items() if each != usual]
    everyone = "all ranks" if len(found) == world_size else ranks_text(list(found))
    who = f"on {ranks_text(odd)} from the others" if votes > len(found) / 2 else f"between {everyone}"
    return (
        f"the replicas of the model are not equal any more at step {step}: {name!r} differs {who}, and it is the first "
        "parameter that does. No checkpoint was written from this state. A rank changed its weights by itself (a "
        "branch on the rank, randomness that is not shared, a module called past its wrapper), or its memory is "
        "faulty; the run can be resumed from its last checkpoint"
    )


def _bits(tensor: Tensor) -> Tensor:
    """Returns the same memory as integers, in words as long as they fit: fewer additions."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    size = tensor.element_size()
    if tensor.is_contiguous() and tensor.numel() * size % _WORD == 0 and tensor.data_ptr() % _WORD == 0:
        return tensor.reshape(-1).view(torch.int64)
    return tensor.view(_INTEGERS[size])
