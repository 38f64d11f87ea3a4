"""From a checkpoint back to tensors and state, on every rank, with one reading per host.

On every host one rank reads each file once, checks its digest as it goes, and passes the bytes on to the others of its
host. A host that does not see the checkpoint that rank 0 sees, because its disk is its own, gets the bytes from rank 0.
All ranks do the same with them, and find out together whether the checkpoint was whole: one that is damaged on any host
is passed over by all, and one that cannot be read on any host ends the run on all. What is loaded has memory
of its own, and nothing to do with the files any more.

Where ranks keep slices of tensors, `sliced` opens a checkpoint instead, and each rank reads what it needs.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.checkpoint import codec, manifest, sliced, tensor_file
from lockstep.checkpoint.loaded import Hosts, Loaded, Problem, first_problem, manifest_together, sees
from lockstep.checkpoint.manifest import INDEX_FILE, TREE_FILE, Damaged, Unreadable
from lockstep.checkpoint.parts import Parts
from lockstep.checkpoint.shared_file import SharedFile
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.distributed.group import Group
from lockstep.distributed.topology import ranks_text
from lockstep.errors import CheckpointError

logger = logging.getLogger(__name__)


def restore(
    storage: CheckpointStorage,
    group: Group,
    step: int | None = None,
    best: bool = False,
    mode: str = "min",
    slices: bool = False,
) -> Loaded | None:
    """The checkpoint of a step, the best one, or else the newest, on all ranks together; None where there is none.

    Of the newest and the best, those that are damaged are passed over, each with a warning that names it. A step that
    was asked for must be there and whole: CheckpointError on all ranks where it is not. The same where there are
    checkpoints and none of them is whole, and where one cannot be read. With `slices`, tensors are not read yet but
    Stored: for ranks that need parts of them.
    """
    found = group.agree(lambda: _candidates(storage, step, best, mode), "the checkpoints to restore")
    if found["refused"]:
        raise CheckpointError(found["refused"])
    hosts = Hosts(group) if found["steps"] else None
    damaged: dict[int, str] = {}
    for candidate in found["steps"]:
        assert hosts is not None
        together = sliced.open_together if slices else _read_together
        loaded = together(storage, candidate, group, hosts)
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


def _read_together(storage: CheckpointStorage, step: int, group: Group, hosts: Hosts) -> Loaded | Problem:
    """A checkpoint on all ranks, or what is wrong with it. Every rank goes through the same exchanges."""
    folder = storage.path(step)
    told = manifest_together(group, folder)
    if isinstance(told, Problem):
        return told
    seen = not hosts.first_here or sees(folder, told)
    blind = [rank for rank, each in enumerate(group.gather(seen, f"who sees {folder.name}")) if not each]
    part = hosts.together(blind)
    if blind and group.rank == 0:
        logger.info("%s is not on the disk of the host of %s: it goes there from rank 0", folder.name,
                    ranks_text(blind))  # fmt: skip
    reads = group.rank == part.ranks[0]
    parts: Parts = {}
    mine = None
    try:
        if reads:
            parts = _looked_at(folder, told)
    except (Damaged, Unreadable) as error:
        mine = Problem.of(error)
    problem = first_problem(group, mine, f"the files of {folder.name}")
    if problem is not None:
        return problem
    name = f"{folder.name}, which rank {part.ranks[0]} reads"
    broadcast = functools.partial(group.broadcast, part=part, name=name) if len(part.ranks) > 1 else None

    def stream(file: str) -> SharedFile:
        return SharedFile(folder / file if reads else None, file, told, broadcast, group.activity, parts.get(file))

    loaded = None
    try:
        loaded = _load(step, told, stream)
    except (Damaged, Unreadable) as error:
        mine = Problem.of(error)
    problem = first_problem(group, mine, f"whether {folder.name} is whole")
    if problem is not None:
        return problem
    assert loaded is not None
    return loaded


def _load(step: int, told: dict[str, Any], stream: Callable[[str], SharedFile]) -> Loaded:
    with stream(TREE_FILE) as source:
        data = bytearray(source.size)
        source.fill(memoryview(data))
        tree = json.loads(str(data, "utf-8"))
    tensors: dict[str, codec.Tensors] = {"model": {}, "state": {}}
    for kind, found in tensors.items():
        entries: list[tensor_file.Entry] = []
        names = manifest.tensor_files(told, kind)
        together = sum(told["files"][name]["bytes"] for name in names)
        for name in names:
            with stream(name) as source:
                entries += tensor_file.add(source.fill, source.size, found, together)
        try:
            tensor_file.check_pieces(entries)
        except ValueError as error:
            raise Damaged(str(error)) from None
    try:
        model = tensors["model"] | {name: tensors["model"][first] for name, first in tree["shared"].items()}
        return Loaded(step, model, codec.unpack(tree["state"], tensors["state"]), told)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{TREE_FILE} cannot be read: {error}") from None


def _looked_at(folder: Path, told: dict[str, Any]) -> Parts:
    """For whoever reads: who wrote which bytes, once all files are there and as long as they were."""
    manifest.check_sizes(folder, told)
    if told["format"] == manifest.WHOLE:
        return {}
    manifest.check_part(folder, INDEX_FILE, None, {}, told)  # which nothing else reads
    return manifest.read_parts(folder, told)
