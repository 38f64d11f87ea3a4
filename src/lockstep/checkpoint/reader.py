"""From a checkpoint back to tensors and state, on every rank, with one reading per host.

On every host one rank reads each file once, checks its digest as it goes, and passes the bytes on to the others of its
host. A host that does not see the checkpoint that rank 0 sees, because its disk is its own, gets the bytes from rank 0.
All ranks do the same with them, and find out together whether the checkpoint was whole: one that is damaged on any host
is passed over by all, and one that cannot be read on any host ends the run on all. What is loaded has memory
of its own, and nothing to do with the files any more.
"""

from __future__ import annotations

import functools
import json
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.checkpoint import codec, manifest, tensor_file
from lockstep.checkpoint.manifest import MODEL_FILE, STATE_FILE, TREE_FILE, Damaged, Unreadable
from lockstep.checkpoint.shared_file import SharedFile
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.distributed.group import Group, Part
from lockstep.distributed.topology import ranks_text
from lockstep.errors import CheckpointError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A checkpoint read back."""

    step: int
    model: codec.Tensors
    state: Any
    about: dict[str, Any]  # its manifest


@dataclass(frozen=True)
class Problem:
    """Why a checkpoint cannot be used: it is damaged, or it cannot be read, which is something else."""

    text: str
    damaged: bool = True

    @classmethod
    def of(cls, error: Damaged | Unreadable) -> Problem:
        return cls(str(error), isinstance(error, Damaged))


def restore(
    storage: CheckpointStorage, group: Group, step: int | None = None, best: bool = False, mode: str = "min"
) -> Loaded | None:
    """The checkpoint of a step, the best one, or else the newest, on all ranks together; None where there is none.

    Of the newest and the best, those that are damaged are passed over, each with a warning that names it. A step that
    was asked for must be there and whole: CheckpointError on all ranks where it is not. The same where there are
    checkpoints and none of them is whole, and where one cannot be read.
    """
    found = group.agree(lambda: _candidates(storage, step, best, mode), "the checkpoints to restore")
    if found["refused"]:
        raise CheckpointError(found["refused"])
    hosts = _Hosts(group) if found["steps"] else None
    damaged: dict[int, str] = {}
    for candidate in found["steps"]:
        assert hosts is not None
        loaded = _read_together(storage, candidate, group, hosts)
        if isinstance(loaded, Loaded):
            return loaded
        if not loaded.damaged:
            raise storage.unreadable(candidate, loaded.text)
        if step is not None:
            raise CheckpointError(f"{storage.path(step)} is damaged: {loaded.text}. Name another step, or none")
        if group.rank == 0:
            storage.pass_over(candidate, loaded.text)
        damaged[candidate] = loaded.text
    if damaged:
        raise storage.none_usable(damaged)
    return None


def read(storage: CheckpointStorage, step: int) -> Loaded:
    """One checkpoint, by this process alone."""
    loaded = restore(storage, Group(0, 1, timeout=0.0), step)
    assert loaded is not None
    return loaded


def _candidates(storage: CheckpointStorage, step: int | None, best: bool, mode: str) -> dict[str, Any]:
    """For rank 0: the steps to try in their order, or why there is no point in trying."""
    try:
        steps = storage.to_try(step, best, mode)
        if best and not steps and storage.steps():
            there = ", ".join(map(str, storage.steps()))
            raise CheckpointError(
                f"{storage.folder}: no checkpoint has a value to be the best by (steps with one: {there}): "
                "checkpoint.keep.metric names it, and it is measured by validation. Name a step instead"
            )
    except (CheckpointError, OSError) as error:
        return {"refused": str(error), "steps": []}
    return {"refused": None, "steps": steps}


class _Hosts:
    """The ranks of every host, and the groups that they talk over. A name that two hosts share makes them one: slower,
    and just as right."""

    def __init__(self, group: Group) -> None:
        self._group = group
        ranks: dict[str, list[int]] = {}
        for rank, host in enumerate(group.gather(socket.gethostname(), "the hosts that read a checkpoint")):
            ranks.setdefault(host, []).append(rank)
        self._ranks = list(ranks.values())
        self._parts: list[list[int]] = []
        self._part = Part([group.rank], None)

    @property
    def first_here(self) -> bool:
        """Whether this rank is the first of its host."""
        return any(self._group.rank == ranks[0] for ranks in self._ranks)

    def together(self, blind: Sequence[int]) -> Part:
        """Those who get the bytes from one reader: every host its own ranks, and rank 0's those of the hosts whose
        first ranks are `blind` as well. The same on all ranks, so that they make the groups together."""
        with_rank_0 = [rank for ranks in self._ranks if 0 in ranks or ranks[0] in blind for rank in ranks]
        others = [ranks for ranks in self._ranks if 0 not in ranks and ranks[0] not in blind]
        parts = [sorted(with_rank_0), *others]
        if parts != self._parts:
            self._parts, self._part = parts, self._group.part(parts)
        return self._part


def _read_together(storage: CheckpointStorage, step: int, group: Group, hosts: _Hosts) -> Loaded | Problem:
    """A checkpoint on all ranks, or what is wrong with it. Every rank goes through the same exchanges."""
    folder = storage.path(step)
    told = group.agree(lambda: _manifest(folder), f"the manifest of {folder.name}")
    if "problem" in told:
        return Problem(**told["problem"])
    sees = not hosts.first_here or _sees(folder, told)
    blind = [rank for rank, each in enumerate(group.gather(sees, f"who sees {folder.name}")) if not each]
    part = hosts.together(blind)
    if blind and group.rank == 0:
        logger.info("%s is not on the disk of the host of %s: it goes there from rank 0", folder.name,
                    ranks_text(blind))  # fmt: skip
    reads = group.rank == part.ranks[0]
    problem = _first_problem(group, _sizes_problem(folder, told) if reads else None, f"the files of {folder.name}")
    if problem is not None:
        return problem
    name = f"{folder.name}, which rank {part.ranks[0]} reads"
    share = functools.partial(group.broadcast, part=part, name=name) if len(part.ranks) > 1 else None

    def stream(file: str) -> SharedFile:
        return SharedFile(folder / file if reads else None, file, told["files"][file], share, group.activity)

    loaded, mine = None, None
    try:
        loaded = _load(step, told, stream)
    except (Damaged, Unreadable) as error:
        mine = Problem.of(error)
    problem = _first_problem(group, mine, f"whether {folder.name} is whole")
    if problem is not None:
        return problem
    assert loaded is not None
    return loaded


def _load(step: int, told: dict[str, Any], stream: Callable[[str], SharedFile]) -> Loaded:
    with stream(TREE_FILE) as source:
        data = bytearray(source.size)
        source.fill(memoryview(data))
        tree = json.loads(str(data, "utf-8"))
    with stream(MODEL_FILE) as source:
        model = tensor_file.read(source.fill, source.size)
        model.update({name: model[first] for name, first in tree["shared"].items()})
    with stream(STATE_FILE) as source:
        state = codec.unpack(tree["state"], tensor_file.read(source.fill, source.size))
    return Loaded(step, model, state, told)


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        return manifest.read(folder)
    except (Damaged, Unreadable) as error:
        return {"problem": asdict(Problem.of(error))}


def _sees(folder: Path, told: Mapping[str, Any]) -> bool:
    """Whether this host has the checkpoint that rank 0 has. One that cannot be read is there: that has to be said."""
    try:
        return bool(manifest.read(folder)["digest"] == told["digest"])
    except Damaged:
        return False
    except Unreadable:
        return True


def _sizes_problem(folder: Path, told: Mapping[str, Any]) -> Problem | None:
    try:
        manifest.check_sizes(folder, told)
    except (Damaged, Unreadable) as error:
        return Problem.of(error)
    return None


def _first_problem(group: Group, mine: Problem | None, name: str) -> Problem | None:
    """What the first rank that has a problem says, one that could not read before others; the same on all ranks."""
    told = group.gather(None if mine is None else asdict(mine), name)
    problems = {rank: Problem(**each) for rank, each in enumerate(told) if each is not None}
    if not problems:
        return None
    rank = min(problems, key=lambda each: (problems[each].damaged, each))
    first = problems[rank]
    return first if rank == 0 else replace(first, text=f"as rank {rank} reads it, {first.text}")
