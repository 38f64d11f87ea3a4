"""Tensors in safetensors files, of which a rank reads what it needs, whoever wrote them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from lockstep.checkpoint import ranges, tensor_file
from lockstep.checkpoint.header import Entry, check_pieces, read_header
from lockstep.distributed.activity import Activity
from lockstep.errors import CheckpointError
from lockstep.strategy.slices import Stored

# What reading raises where the bytes are not those of a file of tensors, or of JSON.
WRONG_CONTENT = (EOFError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


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


class OpenFiles:
    """The tensors of open files by name, whatever becomes of the names of the files, until `close`."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self._descriptors: list[int] = []
        self._entries: list[Entry] = []
        self.tensors: dict[str, Stored] = {}

    def add(self, descriptor: int, file: Path, only: Iterable[str] | None = None) -> None:
        """Adds the tensors of a file; `only` those of these names.

        Raises OSError where it cannot be read, and one of WRONG_CONTENT where it is no such file.
        """
        self._descriptors.append(descriptor)
        entries, _ = read_header(ranges.from_start(descriptor), os.fstat(descriptor).st_size)
        found = {each.name: each for each in entries}
        missing = [name for name in only or () if name not in found]
        if missing:
            raise ValueError(f"it has no {missing[0]!r}, which the index says is in it")
        for entry in entries if only is None else [found[name] for name in only]:
            self._place(entry, StoredTensor(entry, descriptor, file, self._activity))

    def require_whole(self) -> None:
        """Raises ValueError where the pieces of a tensor do not make it up."""
        check_pieces(self._entries)

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _place(self, entry: Entry, stored: StoredTensor) -> None:
        self._entries.append(entry)
        if entry.piece is None:
            self.tensors[entry.name] = stored
            return
        axes = len(stored.shape)  # without that of pairs
        whole = self.tensors.get(entry.piece.name)
        if not isinstance(whole, StoredPieces):
            whole = StoredPieces(entry.piece.name, entry.piece.shape[:axes], stored.dtype)
            self.tensors[whole.name] = whole
        whole.pieces.append((entry.piece.offset[:axes], stored))
