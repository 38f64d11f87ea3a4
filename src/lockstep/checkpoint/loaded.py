"""What is read back of a checkpoint, or why it is not; and what ranks find out about it together."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.checkpoint import manifest
from lockstep.checkpoint.manifest import Damaged, Unreadable
from lockstep.distributed.group import Group, Part
from lockstep.strategy.slices import Stored


@dataclass(frozen=True)
class Loaded:
    """A checkpoint read back, or open to be read from."""

    step: int
    model: Mapping[str, Tensor | Stored]
    state: Any
    about: dict[str, Any]  # its manifest
    close: Callable[[], None] = lambda: None  # when nothing more is to be read from it


@dataclass(frozen=True)
class Problem:
    """Why a checkpoint cannot be used: it is damaged, or it cannot be read, which is something else."""

    text: str
    damaged: bool = True

    @classmethod
    def of(cls, error: Damaged | Unreadable) -> Problem:
        return cls(str(error), isinstance(error, Damaged))


class Hosts:
    """The ranks of every host, and the groups that they talk over. A name that two hosts share makes them one: slower,
    and just as right."""

    def __init__(self, group: Group) -> None:
        self._group = group
        ranks: dict[str, list[int]] = {}
        for rank, host in enumerate(group.gather(socket.gethostname(), "the hosts that read a checkpoint")):
            ranks.setdefault(host, []).append(rank)
        self.ranks = list(ranks.values())
        self._parts: list[list[int]] = []
        self._part = Part([group.rank], None)

    @property
    def first_here(self) -> bool:
        """Whether this rank is the first of its host."""
        return any(self._group.rank == ranks[0] for ranks in self.ranks)

    def together(self, blind: Sequence[int]) -> Part:
        """Those who get the bytes from one reader: every host its own ranks, and rank 0's those of the hosts whose
        first ranks are `blind` as well. The same on all ranks, so that they make the groups together."""
        with_rank_0 = [rank for ranks in self.ranks if 0 in ranks or ranks[0] in blind for rank in ranks]
        others = [ranks for ranks in self.ranks if 0 not in ranks and ranks[0] not in blind]
        return self.apart([sorted(with_rank_0), *others])

    def apart(self, parts: list[list[int]]) -> Part:
        """This rank's of these parts of the ranks. The same on all ranks."""
        if parts != self._parts:
            self._parts, self._part = parts, self._group.part(parts)
        return self._part


def manifest_together(group: Group, folder: Path) -> dict[str, Any] | Problem:
    """What rank 0 finds in the manifest of a checkpoint, on all ranks."""
    told: dict[str, Any] = group.agree(lambda: _manifest(folder), f"the manifest of {folder.name}")
    found: dict[str, Any] | None = told["manifest"]
    return Problem(**told["problem"]) if found is None else found


def sees(folder: Path, told: Mapping[str, Any]) -> bool:
    """Whether this host has the checkpoint that rank 0 has. One that cannot be read is there: that has to be said."""
    try:
        return bool(manifest.read(folder)["digest"] == told["digest"])
    except Damaged:
        return False
    except Unreadable:
        return True


def first_problem(group: Group, mine: Problem | None, name: str) -> Problem | None:
    """What the first rank that has a problem says, one that could not read before others; the same on all ranks."""
    told = group.gather(None if mine is None else asdict(mine), name)
    problems = {rank: Problem(**each) for rank, each in enumerate(told) if each is not None}
    if not problems:
        return None
    rank = min(problems, key=lambda each: (problems[each].damaged, each))
    first = problems[rank]
    return first if rank == 0 else replace(first, text=f"as rank {rank} reads it, {first.text}")


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        return {"manifest": manifest.read(folder)}
    except (Damaged, Unreadable) as error:
        return {"manifest": None, "problem": asdict(Problem.of(error))}
