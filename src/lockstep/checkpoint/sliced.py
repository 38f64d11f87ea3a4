"""Opens a checkpoint of either format for ranks that need parts of its tensors, whoever wrote it.

First every byte is checked once: the ranks that see the same copy of it divide its parts between them. All of them find
out together whether it is whole. Then each rank reads just what it needs. A host with a disk of its own, which does not
have the checkpoint, gets a copy of it from rank 0 for as long as it takes to read it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import Tensor

from lockstep.checkpoint import codec, manifest, ranges
from lockstep.checkpoint.loaded import Hosts, Loaded, Problem, first_problem, manifest_together, sees
from lockstep.checkpoint.manifest import PARTS_FILE, TREE_FILE, Damaged, Unreadable
from lockstep.checkpoint.parts import Parts
from lockstep.checkpoint.shared_file import SharedFile
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.checkpoint.stored import OpenFiles
from lockstep.distributed.group import Group, Part
from lockstep.distributed.topology import ranks_text
from lockstep.strategy.slices import Stored

Value = TypeVar("Value")

logger = logging.getLogger(__name__)

# What stays on the disk until those who know what they need of it ask for it; all else of the state is read at once.
_READ_LATER = ("optimizers", "optimizer", "averages", "attached")
_PIECE_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class _Copy:
    """A checkpoint on one disk, and the ranks that read it there."""

    ranks: list[int]
    fetched: bool  # from rank 0, since it was not there


def open_together(storage: CheckpointStorage, step: int, group: Group, hosts: Hosts) -> Loaded | Problem:
    """A checkpoint that all ranks can read from, or what is wrong with it. Every rank takes part in every exchange."""
    folder = storage.path(step)
    name = folder.name
    told = manifest_together(group, folder)
    if isinstance(told, Problem):
        return told
    copies = _copies(storage, folder, told, group, hosts)
    mine = next(each for each in copies if group.rank in each.ranks)
    with contextlib.ExitStack() as fetching:
        if any(each.fetched for each in copies):
            fetched = fetching.enter_context(_fetched(folder, told, copies, group, hosts))
            if isinstance(fetched, Problem):
                return fetched
            folder = fetched
        problem = _together(group, lambda: _check(folder, told, mine.ranks, group), f"whether {name} is whole")
        if isinstance(problem, Problem):
            return problem
        return _together(group, lambda: _opened(folder, step, told, group), f"whether {name} can be opened")


def _together(group: Group, work: Callable[[], Value], name: str) -> Value | Problem:
    """What this rank's work comes to, if it went well on all ranks."""
    with contextlib.ExitStack() as failing:
        found, mine = None, None
        try:
            found = work()
            if isinstance(found, Loaded):
                failing.callback(found.close)
        except (Damaged, Unreadable) as error:
            mine = Problem.of(error)
        problem = first_problem(group, mine, name)
        if problem is not None:
            return problem
        failing.pop_all()
    return cast(Value, found)


def _copies(
    storage: CheckpointStorage, folder: Path, told: Mapping[str, Any], group: Group, hosts: Hosts
) -> list[_Copy]:
    """Rank 0's with all ranks that see it; and that of every other host, which may be as good or as bad as any."""
    same = storage.who_sees(group)
    seen = group.gather(sees(folder, told), f"who sees {folder.name}")
    with_rank_0 = [rank for rank in range(group.world_size) if rank == 0 or (same[rank] and seen[rank])]
    copies = [_Copy(with_rank_0, fetched=False)]
    for ranks in hosts.ranks:
        rest = [rank for rank in ranks if rank not in with_rank_0]
        if rest:
            copies.append(_Copy(rest, fetched=not seen[rest[0]]))
    return copies


def _check(folder: Path, told: dict[str, Any], ranks: list[int], group: Group) -> None:
    """This rank's share of the check of what these ranks see; raises Damaged or Unreadable."""
    manifest.check_sizes(folder, told)
    parts = manifest.read_parts(folder, told) if told["format"] == manifest.BY_OWNERS else {}
    for name, writer in _assigned(told, parts, ranks, group):
        with group.activity.within(f"reading {name}", limit=group.activity.patience):
            manifest.check_part(folder, name, writer, parts, told, group.activity.progress)


def _opened(folder: Path, step: int, told: dict[str, Any], group: Group) -> Loaded:
    """What this rank reads from; raises Damaged or Unreadable."""
    files = OpenFiles(folder, told, group.activity)
    try:
        tree = json.loads(manifest.read_small(folder, TREE_FILE, told))
        model, tensors = files.tensors("model"), files.tensors("state")
        model |= {name: model[first] for name, first in tree["shared"].items()}
        wholes = _Wholes(tensors)
        state = {
            key: codec.unpack(value, tensors if key in _READ_LATER else wholes) for key, value in tree["state"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        files.close()
        raise Damaged(f"{TREE_FILE} cannot be read: {error}") from None
    except BaseException:
        files.close()
        raise
    return Loaded(step, model, state, told, files.close)


def _assigned(told: Mapping[str, Any], parts: Parts, ranks: list[int], group: Group) -> list[tuple[str, str | None]]:
    """What this rank checks. On as many ranks as wrote it each takes what it wrote, and most likely reads again."""
    load = dict.fromkeys(ranks, 0)
    mine = []
    for name, writer in manifest.to_check(told):
        if name in (TREE_FILE, PARTS_FILE):
            continue  # all ranks read those, and check them
        if writer is not None and int(writer) in load and told.get("world_size") == group.world_size:
            rank = int(writer)
        else:
            rank = min(load, key=lambda each: (load[each], each))
        load[rank] += told["files"][name]["bytes"] if writer is None else ranges.total(parts[name][writer])
        if rank == group.rank:
            mine.append((name, writer))
    return mine


class _Wholes(Mapping[str, Tensor]):
    """Tensors that are read when they are looked up."""

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self._stored = stored

    def __getitem__(self, name: str) -> Tensor:
        return self._stored[name].whole()

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


# Hosts that do not have it


@contextlib.contextmanager
def _fetched(
    folder: Path, told: dict[str, Any], copies: list[_Copy], group: Group, hosts: Hosts
) -> Iterator[Path | Problem]:
    """Where this rank finds the checkpoint: in its place, or in a copy that is gone when all ranks have opened it."""
    blind = [each.ranks for each in copies if each.fetched]
    receivers = [ranks[0] for ranks in blind]
    if group.rank == 0:
        logger.info("%s is not on the disk of the host of %s: it goes there from rank 0", folder.name,
                    ranks_text(receivers))  # fmt: skip
    talking = [0, *receivers]
    rest = [rank for rank in range(group.world_size) if rank not in talking]
    part = hosts.apart([talking, rest] if rest else [talking])
    place, problem = None, None
    try:
        if group.rank in talking:
            if group.rank != 0:
                place = folder.with_name(f".partial-{folder.name}-fetched-{os.getpid()}")
            try:
                _stream(folder, place, told, part, group)
            except (Damaged, Unreadable) as error:
                problem = Problem.of(error)
        places = group.gather(str(place) if place else None, f"where {folder.name} went")
        found = first_problem(group, problem, f"whether {folder.name} came through")
        mine = next((ranks[0] for ranks in blind if group.rank in ranks), None)
        yield found or (folder if mine is None else Path(str(places[mine])))
    finally:
        if place is not None:
            shutil.rmtree(place, ignore_errors=True)


def _stream(folder: Path, place: Path | None, told: dict[str, Any], part: Part, group: Group) -> None:
    """Every file from rank 0 to a folder here; raises Damaged where rank 0's is not whole, Unreadable where it cannot
    be written here."""
    broadcast = functools.partial(group.broadcast, part=part, name=f"{folder.name}, which rank 0 reads")
    problem: OSError | None = None
    if place is not None:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
        except OSError as error:
            problem = error
    sends = group.rank == 0
    parts: Parts = {}
    failed: Damaged | Unreadable | None = None
    if sends and told["format"] == manifest.BY_OWNERS:
        try:
            parts = manifest.read_parts(folder, told)
        except (Damaged, Unreadable) as error:
            failed = error
    for name in manifest.files(told):
        source = SharedFile(folder / name if sends else None, name, told, broadcast, group.activity, parts.get(name))
        try:
            with source:
                problem = _take_in(source, None if place is None else place / name, problem)
        except (Damaged, Unreadable) as error:
            failed = failed or error
    if failed is not None:
        raise failed
    if problem is not None:
        raise Unreadable(f"a copy of it cannot be written here: {problem}")


def _take_in(source: SharedFile, file: Path | None, problem: OSError | None) -> OSError | None:
    """A whole file as it comes, to the disk where there is room; to its end in any case, since others go on."""
    memory = memoryview(bytearray(min(source.size, _PIECE_BYTES)))
    descriptor = None
    try:
        if file is not None and problem is None:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        problem = error
    try:
        for start in range(0, source.size, _PIECE_BYTES):
            count = min(_PIECE_BYTES, source.size - start)
            source.fill(memory[:count])
            try:
                if descriptor is not None and problem is None:
                    ranges.put(descriptor, [ranges.Range(start, count, count, 1)], memory[:count], lambda _: None)
            except OSError as error:
                problem = error
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return problem
