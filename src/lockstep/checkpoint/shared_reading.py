"""What ranks do together to read a checkpoint: check that it is whole, and share the bytes that one of them reads."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, TypeVar, cast

import torch
from torch import Tensor

from lockstep.checkpoint import manifest, tensor_file
from lockstep.checkpoint.manifest import Damaged, Unreadable, check_digest, not_read, open_part
from lockstep.checkpoint.ranges import Digests, Range
from lockstep.distributed.activity import Activity
from lockstep.distributed.group import Group, Part
from lockstep.strategy.slices import Stored

Value = TypeVar("Value")

# What is read, digested and passed on at once.
PIECE_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class Loaded:
    """A checkpoint read back, or open to be read from."""

    step: int
    model: Mapping[str, Tensor | Stored]
    state: Any
    about: dict[str, Any]  # its manifest
    close: Callable[[], None] = lambda: None  # when nothing more is to be read from it


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

    def with_one_reader(self, blind: Sequence[int]) -> Part:
        """Returns the ranks that get the bytes from the same reader as this one: those of its host, and with rank 0
        those of the hosts whose first ranks are `blind`. All ranks call it."""
        with_rank_0 = [rank for ranks in self.ranks if 0 in ranks or ranks[0] in blind for rank in ranks]
        others = [ranks for ranks in self.ranks if 0 not in ranks and ranks[0] not in blind]
        return self.apart([sorted(with_rank_0), *others])

    def apart(self, parts: list[list[int]]) -> Part:
        """Returns this rank's of these parts of the ranks. All ranks call it."""
        if parts != self._parts:
            self._parts, self._part = parts, self._group.part(parts)
        return self._part


def manifest_together(group: Group, folder: Path) -> dict[str, Any]:
    """Returns what rank 0 finds in the manifest of a checkpoint; raises Damaged or Unreadable on all ranks."""
    found, problem = group.agree(lambda: _attempt(lambda: manifest.read(folder)), f"the manifest of {folder.name}")
    _raise_first([problem])
    return dict(found)


def sees(folder: Path, meta: Mapping[str, Any]) -> bool:
    """Whether this host has the checkpoint that rank 0 has. One that cannot be read counts: that has to be reported."""
    try:
        return bool(manifest.read(folder)["digest"] == meta["digest"])
    except Damaged:
        return False
    except Unreadable:
        return True


def together(group: Group, work: Callable[[], Value], name: str) -> Value:
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


class SharedFile:
    """The bytes of one file on every rank of a host: one of them reads, the others get every piece from it.

    What the reader alone finds out (an error of the disk, a digest that does not match) it reports at the end of the
    file, so that no rank of its host stops before the others. What is wrong with the bytes themselves all of them see.
    """

    def __init__(
        self,
        path: Path | None,
        name: str,
        meta: Mapping[str, Any],
        broadcast: Callable[[Tensor], None] | None,
        activity: Activity,
        parts: Mapping[str, Sequence[Range]] | None = None,
    ) -> None:
        """`path` is for the rank that reads; `broadcast` brings its pieces to the others, where there are any.

        `meta` is the manifest, and `parts` which rank wrote which bytes, where more than one did.
        """
        self.size: int = meta["files"][name]["bytes"]
        self._path, self._name, self._meta, self._broadcast, self._activity = path, name, meta, broadcast, activity
        self._left, self._by_rank = self.size, parts is not None
        self._digests = Digests({"": [Range(0, self.size, self.size, 1)]} if parts is None else parts)
        self._file: BinaryIO | None = None
        self._problem: Damaged | Unreadable | None = None
        self._piece = torch.empty(min(self.size, PIECE_BYTES) if broadcast else 0, dtype=torch.uint8)
        self._unused = self._piece[:0]  # of the piece: what nobody has asked for yet

    def fill(self, memory: memoryview) -> None:
        """Fills memory with the next bytes of the file."""
        if len(memory) > self._left + len(self._unused):
            raise ValueError("it ends before its time")
        if self._broadcast is None:
            self._read(memory)
            return
        start = 0
        while start < len(memory):
            if not len(self._unused):
                self._unused = self._piece[: min(self._left, PIECE_BYTES)]
                self._read(tensor_file.memory(self._unused))
                self._broadcast(self._unused)
            count = min(len(self._unused), len(memory) - start)
            memory[start : start + count] = tensor_file.memory(self._unused[:count])
            self._unused, start = self._unused[count:], start + count

    def __enter__(self) -> SharedFile:
        if self._path is not None:
            try:
                self._file = os.fdopen(open_part(self._path.parent, self._name), "rb")
            except (Damaged, Unreadable) as problem:
                self._problem = problem
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, (ValueError, KeyError, TypeError, AttributeError, RecursionError)):
                self._read_to_the_end()
                raise (self._problem or Damaged(f"{self._name} cannot be read: {error}")) from None
            if error is None:
                self._conclude()
        finally:
            if self._file is not None:
                self._file.close()

    def _read(self, memory: memoryview) -> None:
        """Reads the next bytes, where this is the rank that reads; zeros once the file cannot be read any more."""
        self._left -= len(memory)
        if self._path is None:
            return
        for start in range(0, len(memory), PIECE_BYTES):
            piece = memory[start : start + PIECE_BYTES]
            with self._activity.within(f"reading {self._name}", limit=self._activity.patience):
                self._read_piece(piece)
            self._digests.update(piece)

    def _read_piece(self, piece: memoryview) -> None:
        done = 0
        try:
            while self._file is not None and self._problem is None and done < len(piece):
                count = self._file.readinto(piece[done:])  # type: ignore[attr-defined]
                if not count:
                    self._problem = Damaged(f"{self._name} became shorter while it was read")
                done += count
        except OSError as error:
            self._problem = not_read(self._name, error)
        piece[done:] = bytes(len(piece) - done)

    def _read_to_the_end(self) -> None:
        """Reads what is left of a file that makes no sense: its digest shows whether it is damaged."""
        scratch = memoryview(bytearray(min(self._left, PIECE_BYTES)))
        while self._left:
            self._read(scratch[: min(self._left, PIECE_BYTES)])
        self._compare()

    def _compare(self) -> None:
        if self._path is None or self._problem is not None:
            return
        try:
            for rank, found in self._digests.found().items():
                check_digest(self._name, found, self._meta, rank if self._by_rank else None)
        except Damaged as problem:
            self._problem = problem

    def _conclude(self) -> None:
        """Raises on all ranks of the host where the file is not what the manifest says."""
        self._compare()
        damaged = torch.tensor([self._problem is not None], dtype=torch.uint8)
        if self._broadcast is not None:
            self._broadcast(damaged)
        if damaged.item():
            raise self._problem or Damaged(f"{self._name} could not be read to its end")  # the reader knows more
