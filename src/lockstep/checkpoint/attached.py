"""Saves what users register beside the models: once where all ranks have the same, else the state of every rank."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import safetensors.torch
import torch

from lockstep.checkpoint import codec
from lockstep.checkpoint.stateful import Stateful
from lockstep.distributed.group import Group
from lockstep.errors import ConfigError
from lockstep.strategy.fingerprint import fingerprint
from lockstep.strategy.loading import read_like
from lockstep.strategy.slices import is_spread

logger = logging.getLogger(__name__)

# What becomes of state that differs by rank where a run is resumed on another number of ranks.
Elsewhere = Literal["refuse", "begin anew", "rank 0"]

_OF_RANKS = "of ranks"  # the only key of a state that was saved for every rank


@dataclass(frozen=True)
class Part:
    part: Stateful
    elsewhere: Elsewhere

    def state(self) -> dict[str, Any]:
        return self.part.state_dict()


class Attached:
    """By name. Called by all ranks alike."""

    def __init__(self, group: Group, slices: bool) -> None:
        self._group, self._slices = group, slices
        self._parts: dict[str, Part] = {}
        self._unclaimed: dict[str, Any] = {}  # restored, for what is attached later
        self._reported: set[str] = set()

    def register(self, name: str, part: Stateful, elsewhere: Elsewhere) -> None:
        """Restored at once where the run already is."""
        self._parts[name] = Part(part, elsewhere)
        if name in self._unclaimed:
            self._load(name, self._unclaimed.pop(name))

    def digests(self) -> dict[str, str]:
        """Equal where the states are."""
        return {name: _digest(each.state()) for name, each in self._parts.items()}

    def states(self, digests: list[Mapping[str, str]]) -> dict[str, Any]:
        """What is saved, by name; `digests` are those of all ranks."""
        found: dict[str, Any] = {}
        for name, each in self._parts.items():
            if len({of_rank.get(name) for of_rank in digests}) == 1:
                found[name] = each.state()
                continue
            if name not in self._reported and self._group.rank == 0:
                logger.info("the state of %r differs by rank: checkpoints hold that of every rank", name)
            self._reported.add(name)
            packed = self._group.rendezvous(f"the state of {name!r}", _to_bytes(each.state()))
            found[name] = {_OF_RANKS: [_from_bytes(state) for state in packed]}
        return found

    def without_tensors(self) -> tuple[dict[str, Any], bool]:
        """The states of this rank as plain data, to compare; and whether they hold tensors beside that."""
        packed = {name: codec.pack(each.state()) for name, each in self._parts.items()}
        return {name: tree for name, (tree, _) in packed.items()}, any(tensors for _, tensors in packed.values())

    def load(self, saved: Mapping[str, Any]) -> None:
        for name, state in saved.items():
            if name in self._parts:
                self._load(name, state)
            else:
                self._unclaimed[name] = read_like(state, None)

    def _load(self, name: str, state: Any) -> None:
        part, elsewhere = self._parts[name].part, self._parts[name].elsewhere
        if isinstance(state, Mapping) and list(state) == [_OF_RANKS]:
            ranks = state[_OF_RANKS]
            if len(ranks) == self._group.world_size:
                state = ranks[self._group.rank]
            elif elsewhere == "refuse":
                raise ConfigError(
                    f"run.register_state: the state of {name!r} differed on the {len(ranks)} ranks that saved it, "
                    f"and cannot "
                    f"be carried over to {self._group.world_size}. Resume on {len(ranks)} ranks, or begin it anew: "
                    f"run.register_state({name!r}, ..., per_rank=True)"
                )
            else:
                how = "it begins anew" if elsewhere == "begin anew" else "every rank continues with that of rank 0"
                if self._group.rank == 0:
                    logger.warning(
                        "the state of %r differed on the %d ranks that saved it, and cannot be carried over to %d: %s",
                        name, len(ranks), self._group.world_size, how,
                    )  # fmt: skip
                if elsewhere == "begin anew":
                    return
                state = ranks[0]
        part.load_state_dict(read_like(state, part.state_dict() if self._slices else None))


def _digest(state: Any) -> str:
    tree, tensors = codec.pack(state)
    if any(is_spread(each) for each in tensors.values()):
        return ""  # every rank has its part of it, and saves that
    facts = [(name, str(each.dtype), list(each.shape)) for name, each in tensors.items()]
    text = json.dumps([tree, facts, fingerprint(tensors)], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _to_bytes(state: Any) -> bytes:
    tree, tensors = codec.pack(state)
    here = {name: each.to("cpu", copy=True).contiguous() for name, each in tensors.items()}
    return safetensors.torch.save(here, {"tree": json.dumps(tree)})


def _from_bytes(data: bytes) -> Any:
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    tensors: dict[str, torch.Tensor] = safetensors.torch.load(data)
    return codec.unpack(json.loads(header["__metadata__"]["tree"]), tensors)
