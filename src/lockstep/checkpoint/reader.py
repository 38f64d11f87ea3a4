"""Restores a checkpoint on every rank, with one reading per host.

On every host one rank reads each file once, checks its digest as it goes, and passes the bytes on to the others of its
host. A host that does not see rank 0's checkpoint gets the bytes from rank 0. All ranks find out together whether the
checkpoint is whole: one that is damaged on any host is passed over by all, and one that cannot be read on any host ends
the run on all. Where ranks keep slices of tensors, sharded_reader.py opens a checkpoint instead, and each rank reads
what it needs.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.checkpoint import codec, manifest, sharded_reader, tensor_file
from lockstep.checkpoint.header import Entry, check_pieces
from lockstep.checkpoint.manifest import INDEX_FILE, TREE_FILE, Damaged, Unreadable
from lockstep.checkpoint.ranges import Parts
from lockstep.checkpoint.sharded_reader import HeldTensor, place
from lockstep.checkpoint.shared_reading import Hosts, Loaded, SharedFile, manifest_together, sees, together
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.distributed.group import Group
from lockstep.distributed.topology import ranks_text
from lockstep.errors import CheckpointError
from lockstep.strategy.slices import Stored

logger = logging.getLogger(__name__)


def restore(
    storage: CheckpointStorage,
    group: Group,
    step: int | None = None,
    best: bool = False,
    mode: str = "min",
    slices: bool = False,
) -> Loaded | None:
    """Returns the checkpoint of a step, the best one, or else the newest, on all ranks; None where there is none.

    Of the newest and the best, those that are damaged are passed over with a warning. A requested step must be there
    and whole: CheckpointError on all ranks where it is not. The same where there are checkpoints and none of them is
    whole, and where one cannot be read. With `slices`, tensors are not read yet but Stored.
    """
    found = group.agree(lambda: _candidates(storage, step, best, mode), "the checkpoints to restore")
    if found["refused"]:
        raise CheckpointError(found["refused"])
    hosts = Hosts(group) if found["steps"] else None
    damaged: dict[int, str] = {}
    for candidate in found["steps"]:
        assert hosts is not None
        load = sharded_reader.open_together if slices else _read_together
        try:
            return load(storage, candidate, group, hosts)
        except Unreadable as error:
            raise storage.unreadable(candidate, str(error)) from None
        except Damaged as error:
            damaged[candidate] = str(error)
        if step is not None:
            raise CheckpointError(f"{storage.path(step)} is damaged: {damaged[step]}. Name another step, or none")
        if group.rank == 0:
            storage.pass_over(candidate, damaged[candidate])
    if damaged:
        raise storage.none_usable(damaged)
    return None


def read(storage: CheckpointStorage, step: int) -> Loaded:
    """Reads one checkpoint, by this process alone."""
    loaded = restore(storage, Group(0, 1, timeout=0.0), step)
    assert loaded is not None
    return loaded


def _candidates(storage: CheckpointStorage, step: int | None, best: bool, mode: str) -> dict[str, Any]:
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


def _read_together(storage: CheckpointStorage, step: int, group: Group, hosts: Hosts) -> Loaded:
    """Reads a checkpoint on all ranks; raises Damaged or Unreadable on all of them."""
    folder = storage.path(step)
    meta = manifest_together(group, folder)
    seen = not hosts.first_here or sees(folder, meta)
    blind = [rank for rank, each in enumerate(group.gather(seen, f"who sees {folder.name}")) if not each]
    part = hosts.with_one_reader(blind)
    if blind and group.rank == 0:
        logger.info("%s is not on the disk of the host of %s: it goes there from rank 0", folder.name,
                    ranks_text(blind))  # fmt: skip
    reads = group.rank == part.ranks[0]
    parts = together(group, lambda: _check_files(folder, meta) if reads else {}, f"the files of {folder.name}")
    name = f"{folder.name}, which rank {part.ranks[0]} reads"
    broadcast = functools.partial(group.broadcast, part=part, name=name) if len(part.ranks) > 1 else None

    def open_file(file: str) -> SharedFile:
        return SharedFile(folder / file if reads else None, file, meta, broadcast, group.activity, parts.get(file))

    return together(group, lambda: _load(step, meta, open_file), f"whether {folder.name} is whole")


def _load(step: int, meta: dict[str, Any], open_file: Callable[[str], SharedFile]) -> Loaded:
    with open_file(TREE_FILE) as source:
        data = bytearray(source.size)
        source.fill(memoryview(data))
        tree = json.loads(str(data, "utf-8"))
    model, state = (_tensors(manifest.tensor_files(meta, kind), open_file) for kind in ("model", "state"))
    try:
        model |= {name: model[first] for name, first in tree["shared"].items()}
        return Loaded(step, model, codec.unpack(tree["state"], state), meta)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{TREE_FILE} cannot be read: {error}") from None


def _tensors(files: list[str], open_file: Callable[[str], SharedFile]) -> codec.Tensors:
    stored: dict[str, Stored] = {}
    entries: list[Entry] = []
    for name in files:
        with open_file(name) as source:
            for entry, tensor in tensor_file.read(source.fill, source.size):
                place(stored, entry, HeldTensor(entry.name, tensor))
                entries.append(entry)
    try:
        check_pieces(entries)
    except ValueError as error:
        raise Damaged(str(error)) from None
    return {name: stored.pop(name).whole() for name in list(stored)}  # pieces are dropped as they are put together


def _check_files(folder: Path, meta: dict[str, Any]) -> Parts:
    """Makes sure that all files are there and as long as they were; returns who wrote which bytes."""
    manifest.check_sizes(folder, meta)
    if meta["format"] == manifest.WHOLE:
        return {}
    manifest.check_part(folder, INDEX_FILE, None, {}, meta)  # which nothing else reads
    return manifest.read_parts(folder, meta)
