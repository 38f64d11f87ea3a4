"""A file that one rank of a host reads for all of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch

from lockstep.checkpoint import tensor_file
from lockstep.checkpoint.manifest import Damaged, Unreadable, check_digest, not_read, open_part
from lockstep.checkpoint.ranges import Digests, Range
from lockstep.distributed.activity import Activity

# What is read, digested and passed on at once.
_PIECE_BYTES = 8 * 1024 * 1024


class SharedFile:
    """The bytes of one file on every rank of a host: one of them reads, the others get every piece from it.

    What the reader alone finds out (an error of the disk, a digest that does not match) it tells at the end of the
    file, so that no rank of its host stops before the others. What is wrong with the bytes themselves all of them see.
    """

    def __init__(
        self,
        path: Path | None,
        name: str,
        told: Mapping[str, Any],
        broadcast: Callable[[torch.Tensor], None] | None,
        activity: Activity,
        parts: Mapping[str, Sequence[Range]] | None = None,
    ) -> None:
        """`path` is for the one that reads; `share` brings its piece to the others, where there are any.

        `told` is the manifest, and `parts` which rank wrote which bytes, where more than one did.
        """
        self.size: int = told["files"][name]["bytes"]
        self._path, self._name, self._told, self._broadcast, self._activity = path, name, told, broadcast, activity
        self._left, self._by_rank = self.size, parts is not None
        whole = {"": [Range(0, self.size, self.size, 1)]}
        self._digests = Digests(whole if parts is None else parts)
        self._file: BinaryIO | None = None
        self._problem: Damaged | Unreadable | None = None
        self._piece = torch.empty(min(self.size, _PIECE_BYTES) if broadcast else 0, dtype=torch.uint8)
        self._unused = self._piece[:0]  # of the piece: what nobody has asked for yet

    def fill(self, memory: memoryview) -> None:
        """Fill memory with the next bytes of the file."""
        if len(memory) > self._left + len(self._unused):
            raise ValueError("it ends before its time")
        if self._broadcast is None:
            self._read(memory)
            return
        start = 0
        while start < len(memory):
            if not len(self._unused):
                self._unused = self._piece[: min(self._left, _PIECE_BYTES)]
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
        """The next bytes of the file, where this is the rank that reads; zeros once it cannot be read any more."""
        self._left -= len(memory)
        if self._path is None:
            return
        for start in range(0, len(memory), _PIECE_BYTES):
            piece = memory[start : start + _PIECE_BYTES]
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
        """For the rank that reads: what is left, which makes no sense, tells at least whether the digest is right."""
        scratch = memoryview(bytearray(min(self._left, _PIECE_BYTES)))
        while self._left:
            self._read(scratch[: min(self._left, _PIECE_BYTES)])
        self._compare()

    def _compare(self) -> None:
        if self._path is None or self._problem is not None:
            return
        try:
            for rank, found in self._digests.found().items():
                check_digest(self._name, found, self._told, rank if self._by_rank else None)
        except Damaged as problem:
            self._problem = problem

    def _conclude(self) -> None:
        """Whether the file was what the manifest says, on all ranks of the host."""
        self._compare()
        damaged = torch.tensor([self._problem is not None], dtype=torch.uint8)
        if self._broadcast is not None:
            self._broadcast(damaged)
        if damaged.item():
            raise self._problem or Damaged(f"{self._name} could not be read to its end")  # the reader knows more
