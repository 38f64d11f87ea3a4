"""Saves what users register beside the models: once where all ranks have the same, else the state of every rank."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from lockstep.checkpoint import codec, tensor_file
from lockstep.distributed.group import Group
from lockstep.errors import ConfigError
from lockstep.strategy.slices import is_spread, read_like

logger = logging.getLogger(__name__)

# What becomes of state that differs by rank where a run is resumed on another number of ranks.
Elsewhere = Literal["refuse", "begin anew", "rank 0"]

_OF_RANKS = "of ranks"  # the only key of a state that was saved for every rank


class Stateful(Protocol):
    """Anything whose state belongs into a checkpoint."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class Weights(Protocol):
    """The models of a run, as far as saving them is concerned."""

    @property
    def modules(self) -> Mapping[str, nn.Module]: ...

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]: ...

    def load(self, weights: Mapping[str, Any], state: Mapping[str, Any], source: str) -> None: ...

    def hyperparameters(self) -> dict[str, Any]: ...

    def moved(self) -> list[str]: ...

    def note_moved(self, names: Iterable[str]) -> None: ...


class RegisteredState:
    """The state of what users register, by name. All ranks call it alike."""

    def __init__(self, group: Group, slices: bool) -> None:
        self._group, self._slices = group, slices
        self._parts: dict[str, tuple[Stateful, Elsewhere]] = {}
        self._unclaimed: dict[str, Any] = {}  # restored, for what is registered later
        self._reported: set[str] = set()

    def register(self, name: str, part: Stateful, elsewhere: Elsewhere) -> None:
        """Registers an object, and restores it at once where the run is restored already."""
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise ConfigError(f"{name}: must have state_dict() and load_state_dict(), got a {type(part).__name__}")
        self._parts[name] = part, elsewhere
        if name in self._unclaimed:
            self._load(name, self._unclaimed.pop(name))

    def digests(self) -> dict[str, str]:
        """Returns digests that are equal where the states are; one rank alone compares nothing."""
        parts = self._parts if self._group.world_size > 1 else {}
        return {name: _digest(name, part.state_dict()) for name, (part, _) in parts.items()}

    def states(self, digests: list[Mapping[str, str]]) -> dict[str, Any]:
        """Returns what is saved, by name; `digests` are those of all ranks."""
        found = dict(self._unclaimed)
        for name, (part, _) in self._parts.items():
            if len({of_rank.get(name) for of_rank in digests}) == 1:
                found[name] = part.state_dict()
                continue
            if name not in self._reported and self._group.rank == 0:
                logger.info("the state of %r differs by rank: checkpoints hold that of every rank", name)
            self._reported.add(name)
            packed = self._group.rendezvous(f"the state of {name!r}", codec.to_bytes(part.state_dict()))
            found[name] = {_OF_RANKS: [codec.from_bytes(state) for state in packed]}
        return found

    def without_tensors(self) -> tuple[dict[str, Any], bool]:
        """Returns the states of this rank as plain data, to compare, and whether they hold tensors beside that."""
        packed = {name: codec.pack(part.state_dict()) for name, (part, _) in self._parts.items()}
        return {name: tree for name, (tree, _) in packed.items()}, any(tensors for _, tensors in packed.values())

    def load(self, saved: Mapping[str, Any]) -> None:
        for name, state in saved.items():
            if name in self._parts:
                self._load(name, state)
            else:
                self._unclaimed[name] = read_like(state, None)

    def _load(self, name: str, state: Any) -> None:
        part, elsewhere = self._parts[name]
        if isinstance(state, Mapping) and list(state) == [_OF_RANKS]:
            ranks = state[_OF_RANKS]
            if len(ranks) == self._group.world_size:
                state = ranks[self._group.rank]
            elif elsewhere == "refuse":
                raise ConfigError(
                    f"run.register_state: the state of {name!r} differed on the {len(ranks)} ranks that saved it, "
                    f"and cannot be carried over to {self._group.world_size}. Resume on {len(ranks)} ranks, "
                    f"or begin it anew: run.register_state({name!r}, ..., per_rank=True)"
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


def _digest(name: str, state: Any) -> str:
    tree, tensors = codec.pack(state)
    if any(is_spread(each) for each in tensors.values()):
        return ""  # every rank has its part of it, and saves that
    tensor_file.check_types(f"the state of {name!r}", tensors)
    found = hashlib.blake2b(json.dumps(tree, sort_keys=True).encode(), digest_size=8)
    tensor_file.write(found.update, {key: each.cpu() for key, each in tensors.items()})
    return found.hexdigest()
