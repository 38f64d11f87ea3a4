"""From a checkpoint back to tensors and state, on every rank, with one reading per host.

On every host one rank reads each file once, checks its digest as it goes, and passes the bytes on to the others of its
host. All ranks do the same with them, and find out together whether the checkpoint was whole: one that is damaged on
any host is passed over by all. What is loaded has memory of its own, and nothing to do with the files any more.
"""

from __future__ import annotations

import functools
import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint import codec, manifest, tensor_file
from lockstep.checkpoint.manifest import MODEL_FILE, STATE_FILE, TREE_FILE, Damaged
from lockstep.checkpoint.shared_file import SharedFile
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.distributed.group import Group, Part
from lockstep.errors import CheckpointError


@dataclass(frozen=True)
class Loaded:
    """A checkpoint read back."""

    step: int
    model: codec.Tensors
    state: Any
    about: dict[str, Any]  # its manifest


def restore(
    storage: CheckpointStorage, group: Group, step: int | None = None, best: bool = False, mode: str = "min"
) -> Loaded | None:
    """The checkpoint of a step, the best one, or else the newest, on all ranks together; None where there is none.

    Of the newest and the best, those that are damaged are passed over, each with a warning that names it. A step that
    was asked for must be there and whole: CheckpointError on all ranks where it is not.
    """
    found = group.agree(lambda: _candidates(storage, step, best, mode), "the checkpoints to restore")
    if found["refused"]:
        raise CheckpointError(found["refused"])
    part = group.part(_hosts(group)) if found["steps"] else Part([group.rank], None)
    for candidate in found["steps"]:
        loaded, problem = _read_together(storage, candidate, group, part)
        if loaded is not None:
            return loaded
        if step is not None:
            raise CheckpointError(f"{storage.path(step)} is damaged: {problem}. Name another step, or none")
        if group.rank == 0:
            storage.pass_over(candidate, problem)
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


def _hosts(group: Group) -> list[list[int]]:
    """The ranks of every host. A name that two hosts share makes them one: slower, and just as right."""
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(group.gather(socket.gethostname(), "the hosts that read a checkpoint")):
        ranks.setdefault(host, []).append(rank)
    return list(ranks.values())


def _read_together(storage: CheckpointStorage, step: int, group: Group, part: Part) -> tuple[Loaded | None, str]:
    """A checkpoint on all ranks, or what is wrong with it. Every rank goes through the same exchanges."""
    folder = storage.path(step)
    told = group.agree(lambda: _manifest(folder), f"the manifest of {folder.name}")
    if "damaged" in told:
        return None, str(told["damaged"])
    reads = group.rank == part.ranks[0]
    problem = _first_problem(group, _sizes_problem(folder, told) if reads else None, f"the files of {folder.name}")
    if problem:
        return None, problem
    name = f"{folder.name}, which rank {part.ranks[0]} reads"
    share = functools.partial(group.broadcast, part=part, name=name) if len(part.ranks) > 1 else None

    def stream(file: str) -> SharedFile:
        return SharedFile(folder / file if reads else None, file, told["files"][file], share, group.activity)

    loaded = None
    try:
        loaded = _load(step, told, stream)
    except Damaged as error:
        problem = str(error)
    problem = _first_problem(group, problem, f"whether {folder.name} is whole")
    return (None, problem) if problem else (loaded, "")


def _load(step: int, told: dict[str, Any], stream: Callable[[str], SharedFile]) -> Loaded:
    with stream(TREE_FILE) as source:
        data = bytearray(source.size)
        source.fill(memoryview(data))
        tree = json.loads(data)
    with stream(MODEL_FILE) as source:
        model = tensor_file.read(source.fill, source.size)
        model.update({name: model[first] for name, first in tree["shared"].items()})
    with stream(STATE_FILE) as source:
        state = codec.unpack(tree["state"], tensor_file.read(source.fill, source.size))
    return Loaded(step, model, state, told)


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        return manifest.read(folder)
    except Damaged as error:
        return {"damaged": str(error)}


def _sizes_problem(folder: Path, told: Mapping[str, Any]) -> str | None:
    try:
        manifest.check_sizes(folder, told)
    except Damaged as error:
        return str(error)
    return None


def _first_problem(group: Group, mine: str | None, name: str) -> str:
    """What the first rank that has a problem says; empty where none has. The same on all ranks."""
    problems = group.gather(mine, name)
    rank = next((rank for rank, each in enumerate(problems) if each), None)
    if rank is None:
        return ""
    return str(problems[rank]) if rank == 0 else f"as rank {rank} reads it, {problems[rank]}"
