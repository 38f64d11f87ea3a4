"""Opens a checkpoint of either format for ranks that need parts of its tensors, whoever wrote it.

First every byte is checked once: the ranks that see the same copy of it divide its parts between them, and find out
together whether it is whole. Then each rank reads just what it needs. A host that does not have the checkpoint gets a
copy of it from rank 0 for as long as it takes to read it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint import codec, manifest, ranges, tensor_file
from lockstep.checkpoint.header import Entry, check_pieces, read_header
from lockstep.checkpoint.manifest import PARTS_FILE, TREE_FILE, Damaged, Unreadable, not_read
from lockstep.checkpoint.ranges import Parts
from lockstep.checkpoint.shared_reading import (
    PIECE_BYTES,
    Hosts,
    Loaded,
    SharedFile,
    manifest_together,
    sees,
    together,
)
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.distributed.activity import Activity
from lockstep.distributed.group import Group, Part
from lockstep.distributed.topology import ranks_text
from lockstep.errors import CheckpointError
from lockstep.strategy.slices import Stored

logger = logging.getLogger(__name__)

# What stays on the disk until those who know what they need of it ask for it; all else of the state is read at once.
_READ_LATER = ("optimizers", "optimizer", "averages", "attached")


class StoredTensor(Stored):
    """A tensor that a file holds whole, or a piece of one."""

    def __init__(self, entry: Entry, descriptor: int, file: Path, activity: Activity) -> None:
        self._entry, self._descriptor, self._file, self._activity = entry, descriptor, file, activity
        self.name = entry.name
        self.shape = entry.shape[:-1] if entry.pairs else entry.shape
        self._stored_dtype = tensor_file.dtype_of(entry)
        self.dtype = self._stored_dtype.to_complex() if entry.pairs else self._stored_dtype

    def part(self, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        if self._entry.pairs:
            offset, size = (*offset, 0), (*size, 2)
        found = torch.empty(size, dtype=self._stored_dtype)
        self._read(found, offset)
        return torch.view_as_complex(found) if self._entry.pairs else found

    def fill(self, tensor: Tensor, offset: tuple[int, ...]) -> None:
        if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.dtype == self._stored_dtype:
            self._read(tensor, offset)  # straight into place
        else:
            super().fill(tensor, offset)

    def _read(self, found: Tensor, offset: tuple[int, ...]) -> None:
        entry = self._entry
        wanted = ranges.of_block(entry.shape, offset, tuple(found.shape), found.itemsize, entry.begin)
        with self._activity.within(f"reading {self._file.name}", limit=self._activity.patience):
            try:
                ranges.fill(self._descriptor, wanted, tensor_file.memory(found))
            except (OSError, EOFError) as error:
                raise CheckpointError(
                    f"{self._file}: {entry.name!r} cannot be read, and a moment ago it could be: {error}. Make sure "
                    "that nobody changes the checkpoint, and that its disk works; then resume"
                ) from None


class HeldTensor(Stored):
    """A tensor, or a piece of one, that was read already."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name, self.shape, self.dtype, self._tensor = name, tuple(tensor.shape), tensor.dtype, tensor

    def part(self, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        return self._tensor[tuple(slice(begin, begin + count) for begin, count in zip(offset, size, strict=True))]

    def whole(self) -> Tensor:
        return self._tensor


class StoredPieces(Stored):
    """A tensor of which several files hold pieces."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.name, self.shape, self.dtype = name, shape, dtype
        self.pieces: list[tuple[tuple[int, ...], Stored]] = []  # with the offset of each

    def part(self, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        found = torch.zeros(size, dtype=self.dtype)
        for begin, piece in self.pieces:
            first = [max(a, b) for a, b in zip(offset, begin, strict=True)]
            last = [min(a + n, b + m) for a, n, b, m in zip(offset, size, begin, piece.shape, strict=True)]
            if all(a < b for a, b in zip(first, last, strict=True)):
                here = tuple(slice(a - o, b - o) for a, b, o in zip(first, last, offset, strict=True))
                there = tuple(a - b for a, b in zip(first, begin, strict=True))
                found[here] = piece.part(there, tuple(b - a for a, b in zip(first, last, strict=True)))
        return found


def place(tensors: dict[str, Stored], entry: Entry, stored: Stored) -> None:
    """Adds an entry of a file to the tensors: by itself, or as a piece of one."""
    if entry.piece is None:
        tensors[entry.name] = stored
        return
    axes = len(stored.shape)  # without that of pairs
    whole = tensors.get(entry.piece.name)
    if not isinstance(whole, StoredPieces):
        whole = tensors[entry.piece.name] = StoredPieces(entry.piece.name, entry.piece.shape[:axes], stored.dtype)
    whole.pieces.append((entry.piece.offset[:axes], stored))


class OpenFiles:
    """The files of tensors of a checkpoint, open until it has been loaded, whatever becomes of their names."""

    def __init__(self, folder: Path, meta: Mapping[str, Any], activity: Activity) -> None:
        self._folder, self._meta, self._activity = folder, meta, activity
        self._open: list[int] = []

    def tensors(self, kind: str) -> dict[str, Stored]:
        """Returns those of the model, or of the state, by name; raises Damaged or Unreadable."""
        tensors: dict[str, Stored] = {}
        entries: list[Entry] = []
        for name in manifest.tensor_files(self._meta, kind):
            descriptor = manifest.open_part(self._folder, name)
            self._open.append(descriptor)
            try:
                here, _ = read_header(ranges.from_start(descriptor), self._meta["files"][name]["bytes"])
                for entry in here:
                    place(tensors, entry, StoredTensor(entry, descriptor, self._folder / name, self._activity))
            except OSError as error:
                raise not_read(name, error) from None
            except (EOFError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise Damaged(f"{name} cannot be read: {error}") from None
            entries += here
        try:
            check_pieces(entries)
        except ValueError as error:
            raise Damaged(str(error)) from None
        return tensors

    def close(self) -> None:
        while self._open:
            os.close(self._open.pop())


@dataclass(frozen=True)
class _Copy:
    """A checkpoint on one disk, and the ranks that read it there."""

    ranks: list[int]
    fetched: bool  # from rank 0, since it was not there


def open_together(storage: CheckpointStorage, step: int, group: Group, hosts: Hosts) -> Loaded:
    """Opens a checkpoint on all ranks; raises Damaged or Unreadable on all of them."""
    folder = storage.path(step)
    name = folder.name
    meta = manifest_together(group, folder)
    copies = _copies(storage, folder, meta, group, hosts)
    mine = next(each for each in copies if group.rank in each.ranks)
    with contextlib.ExitStack() as fetching:
        if any(each.fetched for each in copies):
            folder = fetching.enter_context(_fetched(folder, meta, copies, group, hosts))
        together(group, lambda: _check(folder, meta, mine.ranks, group), f"whether {name} is whole")
        return together(group, lambda: _opened(folder, step, meta, group), f"whether {name} can be opened")


def _copies(
    storage: CheckpointStorage, folder: Path, meta: Mapping[str, Any], group: Group, hosts: Hosts
) -> list[_Copy]:
    """Returns rank 0's copy with all ranks that see it, and that of every other host."""
    same = storage.who_sees(group)
    seen = group.gather(sees(folder, meta), f"who sees {folder.name}")
    with_rank_0 = [rank for rank in range(group.world_size) if rank == 0 or (same[rank] and seen[rank])]
    copies = [_Copy(with_rank_0, fetched=False)]
    for ranks in hosts.ranks:
        rest = [rank for rank in ranks if rank not in with_rank_0]
        if rest:
            copies.append(_Copy(rest, fetched=not seen[rest[0]]))
    return copies


def _check(folder: Path, meta: dict[str, Any], ranks: list[int], group: Group) -> None:
    manifest.check_sizes(folder, meta)
    parts = manifest.read_parts(folder, meta) if meta["format"] == manifest.BY_OWNERS else {}
    for name, writer in _to_check(meta, parts, ranks, group):
        with group.activity.within(f"reading {name}", limit=group.activity.patience):
            manifest.check_part(folder, name, writer, parts, meta, group.activity.progress)


def _opened(folder: Path, step: int, meta: dict[str, Any], group: Group) -> Loaded:
    files = OpenFiles(folder, meta, group.activity)
    try:
        tree = json.loads(manifest.read_small(folder, TREE_FILE, meta))
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
    return Loaded(step, model, state, meta, files.close)


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
def _fetched(folder: Path, meta: dict[str, Any], copies: list[_Copy], group: Group, hosts: Hosts) -> Iterator[Path]:
    """Yields where this rank finds the checkpoint: in its place, or in a copy that is removed at the end."""
    blind = [each.ranks for each in copies if each.fetched]
    receivers = [ranks[0] for ranks in blind]
    if group.rank == 0:
        logger.info("%s is not on the disk of the host of %s: it goes there from rank 0", folder.name,
                    ranks_text(receivers))  # fmt: skip
    talking = [0, *receivers]
    rest = [rank for rank in range(group.world_size) if rank not in talking]
    part = hosts.apart([talking, rest] if rest else [talking])
    place = None
    if group.rank in receivers:
        place = folder.with_name(f".partial-{folder.name}-fetched-{os.getpid()}")
    try:
        places = group.gather(str(place) if place else None, f"where {folder.name} goes")
        work = functools.partial(_stream, folder, place, meta, part, group)
        together(group, work if group.rank in talking else lambda: None, f"whether {folder.name} came through")
        mine = next((ranks[0] for ranks in blind if group.rank in ranks), None)
        yield folder if mine is None else Path(str(places[mine]))
    finally:
        if place is not None:
            shutil.rmtree(place, ignore_errors=True)


def _stream(folder: Path, place: Path | None, meta: dict[str, Any], part: Part, group: Group) -> None:
    """Copies every file from rank 0 to a folder here; raises Damaged where rank 0's is not whole, Unreadable where the
    copy cannot be written."""
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
    if sends and meta["format"] == manifest.BY_OWNERS:
        try:
            parts = manifest.read_parts(folder, meta)
        except (Damaged, Unreadable) as error:
            failed = error
    for name in manifest.files(meta):
        source = SharedFile(folder / name if sends else None, name, meta, broadcast, group.activity, parts.get(name))
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
    """Writes a file as it comes, where there is room; it is received to its end in any case, since others go on."""
    memory = memoryview(bytearray(min(source.size, PIECE_BYTES)))
    descriptor = None
    try:
        if file is not None and problem is None:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        problem = error
    try:
        for start in range(0, source.size, PIECE_BYTES):
            count = min(PIECE_BYTES, source.size - start)
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
