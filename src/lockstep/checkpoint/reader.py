"""Restores a checkpoint of either format on every rank, whoever wrote it.

First every byte is checked once: the ranks that see the same copy of a checkpoint divide its parts between them, and
all ranks find out together whether it is whole. One that is damaged on any host is passed over by all, and one that
cannot be read on any host ends the run on all. Then each rank reads what it needs: its slices of tensors, or all of
them. A host that does not have the checkpoint gets a copy of it from rank 0 for as long as it takes to read it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from lockstep.checkpoint import codec, manifest, ranges, tensor_file
from lockstep.checkpoint.manifest import PARTS_FILE, TREE_FILE, Damaged, Unreadable, not_read
from lockstep.checkpoint.ranges import Parts, Range
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.checkpoint.tensor_file import WRONG_CONTENT, OpenFiles
from lockstep.distributed.activity import Activity
from lockstep.distributed.group import Group
from lockstep.distributed.topology import ranks_text
from lockstep.errors import CheckpointError
from lockstep.strategy.slices import Stored, read_like

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

# What stays on the disk until those who know what they need of it ask for it; all else of the state is read at once.
_READ_LATER = ("optimizers", "optimizer", "averages", "attached")

# The copy of a checkpoint on a host that does not have it, followed by the process that made it.
_FETCHED = ".partial-{}-fetched-"

# What rank 0 reads and sends at once to hosts that do not have the checkpoint.
_PIECE_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class Loaded:
    """A checkpoint read back, or open to be read from."""

    step: int
    model: Mapping[str, Tensor | Stored]
    state: Any
    about: dict[str, Any]  # its manifest
    close: Callable[[], None] = lambda: None  # when nothing more is to be read from it


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
    damaged: dict[int, str] = {}
    for candidate in found["steps"]:
        try:
            return _open(storage, candidate, group, slices)
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


def read(storage: CheckpointStorage, step: int, slices: bool = False) -> Loaded:
    """Reads one checkpoint, by this process alone."""
    loaded = restore(storage, Group(0, 1, timeout=0.0), step, slices=slices)
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


def _open(storage: CheckpointStorage, step: int, group: Group, slices: bool) -> Loaded:
    """Opens a checkpoint on all ranks; raises Damaged or Unreadable on all of them."""
    folder = storage.path(step)
    found, problem = group.agree(lambda: _attempt(lambda: manifest.read(folder)), f"the manifest of {folder.name}")
    _raise_first([problem])
    meta = dict(found)
    copies = _copies(storage, folder, meta, group)
    mine = next(each for each in copies if group.rank in each.ranks)
    with _fetched(folder, meta, copies, group) as place:
        _together(group, lambda: _check(place, meta, mine.ranks, group), f"whether {folder.name} is whole")
        return _together(
            group, lambda: _opened(place, step, meta, group.activity, slices), f"whether {folder.name} can be opened"
        )


def _together(group: Group, work: Callable[[], Value], name: str) -> Value:
    """Returns what this rank's work returns if it succeeds on all ranks.

    Else raises Damaged or Unreadable on all of them: what the first rank that failed says, one that could not read
    before others.
    """
    found, problem = _attempt(work)
    try:
        _raise_first(group.gather(problem, name))
    except (Damaged, Unreadable):
        if isinstance(found, Loaded):
            found.close()
        raise
    return cast(Value, found)


def _attempt(work: Callable[[], Any]) -> tuple[Any, tuple[bool, str] | None]:
    """Returns what work returns, and else whether the checkpoint is damaged, and why."""
    try:
        return work(), None
    except (Damaged, Unreadable) as error:
        return None, (isinstance(error, Damaged), str(error))


def _raise_first(problems: Sequence[Any]) -> None:
    found = [
        (damaged, rank, text) for rank, each in enumerate(problems) if each is not None for damaged, text in [each]
    ]
    if found:
        damaged, rank, text = min(found)
        kind = Damaged if damaged else Unreadable
        raise kind(text if rank == 0 else f"as rank {rank} reads it, {text}")


# Checking every byte once


@dataclass(frozen=True)
class _Copy:
    """A checkpoint on one disk, and the ranks that read it there."""

    ranks: list[int]
    fetched: bool  # from rank 0, since it was not there


def _copies(storage: CheckpointStorage, folder: Path, meta: Mapping[str, Any], group: Group) -> list[_Copy]:
    """Returns rank 0's copy with all ranks that see it, and that of every other host.

    A name that two hosts share makes them one: what the first of their ranks finds counts for all of them.
    """
    if group.world_size == 1:
        return [_Copy([0], fetched=False)]
    same = storage.who_sees(group)
    answers = group.gather((socket.gethostname(), _sees(folder, meta)), f"who sees {folder.name}")
    with_rank_0 = [rank for rank, (_, seen) in enumerate(answers) if rank == 0 or (same[rank] and seen)]
    others: dict[str, list[int]] = {}
    for rank, (host, _) in enumerate(answers):
        if rank not in with_rank_0:
            others.setdefault(host, []).append(rank)
    return [_Copy(with_rank_0, False), *(_Copy(ranks, not answers[ranks[0]][1]) for ranks in others.values())]


def _sees(folder: Path, meta: Mapping[str, Any]) -> bool:
    """Whether this host has the checkpoint that rank 0 has. One that cannot be read counts: that has to be reported."""
    try:
        return bool(manifest.read(folder)["digest"] == meta["digest"])
    except Damaged:
        return False
    except Unreadable:
        return True


def _check(folder: Path, meta: dict[str, Any], ranks: list[int], group: Group) -> None:
    manifest.check_sizes(folder, meta)
    parts = manifest.read_parts(folder, meta) if meta["format"] == manifest.BY_OWNERS else {}
    for name, writer in _to_check(meta, parts, ranks, group):
        with group.activity.within(f"reading {name}", limit=group.activity.patience):
            manifest.check_part(folder, name, writer, parts, meta, group.activity.progress)


def _to_check(meta: Mapping[str, Any], parts: Parts, ranks: list[int], group: Group) -> list[tuple[str, str | None]]:
    """Returns what this rank checks: on as many ranks as wrote it, what it wrote and most likely reads again."""
    load = dict.fromkeys(ranks, 0)
    mine = []
    for name, writer in manifest.to_check(meta):
        if name in (TREE_FILE, PARTS_FILE):
            continue  # all ranks read those, and check them
        if writer is not None and int(writer) in load and meta.get("world_size") == group.world_size:
            rank = int(writer)
        else:
            rank = min(load, key=lambda each: (load[each], each))
        load[rank] += meta["files"][name]["bytes"] if writer is None else ranges.total(parts[name][writer])
        if rank == group.rank:
            mine.append((name, writer))
    return mine


# Reading what is whole


def _opened(folder: Path, step: int, meta: dict[str, Any], activity: Activity, slices: bool) -> Loaded:
    model, state = OpenFiles(activity), OpenFiles(activity)

    def close() -> None:
        model.close()
        state.close()

    try:
        tree = json.loads(manifest.read_small(folder, TREE_FILE, meta))
        for kind, files in (("model", model), ("state", state)):
            _add_files(folder, meta, kind, files)
        weights: dict[str, Any] = dict(model.tensors) if slices else {n: e.whole() for n, e in model.tensors.items()}
        weights |= {name: weights[first] for name, first in tree["shared"].items()}
        values = codec.unpack(tree["state"], state.tensors)
        if slices:
            values = {key: each if key in _READ_LATER else read_like(each, None) for key, each in values.items()}
        else:
            values = read_like(values, None)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        close()
        raise Damaged(f"{TREE_FILE} cannot be read: {error}") from None
    except BaseException:
        close()
        raise
    if not slices:
        close()
    return Loaded(step, weights, values, meta, close)


def _add_files(folder: Path, meta: Mapping[str, Any], kind: str, files: OpenFiles) -> None:
    name = kind
    try:
        for name in manifest.tensor_files(meta, kind):
            files.add(manifest.open_part(folder, name), folder / name)
        files.require_whole()
    except OSError as error:
        raise not_read(name, error) from None
    except WRONG_CONTENT as error:
        raise Damaged(f"{name} cannot be read: {error}") from None


# Hosts that do not have it


@contextlib.contextmanager
def _fetched(folder: Path, meta: dict[str, Any], copies: list[_Copy], group: Group) -> Iterator[Path]:
    """Yields where this rank finds the checkpoint: in its place, or in a copy that is removed at the end."""
    blind = [each.ranks for each in copies if each.fetched]
    if not blind:
        yield folder
        return
    receivers = [ranks[0] for ranks in blind]
    if group.rank == 0:
        logger.info("%s is not on the disk of the host of %s: it goes there from rank 0", folder.name,
                    ranks_text(receivers))  # fmt: skip
    place = folder.with_name(f"{_FETCHED.format(folder.name)}{os.getpid()}") if group.rank in receivers else None
    if place is not None:
        for left in place.parent.glob(_FETCHED.format("*") + "*"):
            if left == place or not _is_running(left.name.rpartition("-")[2]):  # it was killed while it read
                shutil.rmtree(left, ignore_errors=True)
    try:
        places = group.gather(str(place) if place else None, f"where {folder.name} goes")
        _together(group, lambda: _stream(folder, place, meta, receivers, group), f"whether {folder.name} came through")
        mine = next((ranks[0] for ranks in blind if group.rank in ranks), None)
        yield folder if mine is None else Path(str(places[mine]))
    finally:
        if place is not None:
            shutil.rmtree(place, ignore_errors=True)


def _stream(folder: Path, place: Path | None, meta: dict[str, Any], receivers: list[int], group: Group) -> None:
    """Copies every file from rank 0 to a folder of each receiver.

    A rank that cannot read or write takes part until the end all the same, and raises Damaged or Unreadable then.
    """
    talking = [0, *receivers]
    rest = [rank for rank in range(group.world_size) if rank not in talking]
    part = group.part([talking, rest] if rest else [talking])
    if group.rank in rest:
        return
    problem: Damaged | Unreadable | None = None

    def attempt(work: Callable[[], Value]) -> Value | None:
        nonlocal problem
        if problem is None:
            try:
                return work()
            except (Damaged, Unreadable) as error:
                problem = error
            except EOFError:
                problem = Damaged("it became shorter while it was read")
            except OSError as error:
                problem = Unreadable(f"a copy of it cannot be written here: {error}" if place else str(error))
        return None

    buffer = torch.empty(_PIECE_BYTES, dtype=torch.uint8)
    for name in manifest.files(meta):
        size: int = meta["files"][name]["bytes"]
        make = partial(manifest.open_part, folder, name) if place is None else partial(_new_file, place / name)
        descriptor = attempt(make)
        for begin in range(0, size, _PIECE_BYTES):
            piece = buffer[: min(_PIECE_BYTES, size - begin)]
            at = [Range(begin, len(piece), len(piece), 1)]
            if place is None and descriptor is not None:
                with group.activity.within(f"reading {name}", limit=group.activity.patience):
                    attempt(partial(ranges.fill, descriptor, at, tensor_file.memory(piece)))
            group.broadcast(piece, part, f"{folder.name}, which rank 0 reads")
            if place is not None and descriptor is not None:
                attempt(partial(ranges.put, descriptor, at, tensor_file.memory(piece), len))
        if descriptor is not None:
            os.close(descriptor)
    if problem is not None:
        raise problem


def _is_running(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except PermissionError:  # another user's
        pass
    return True


def _new_file(file: Path) -> int:
    file.parent.mkdir(parents=True, exist_ok=True)
    return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
