"""The tensors of a checkpoint that is open: read where and when they are asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint import manifest, ranges, tensor_file
from lockstep.checkpoint.manifest import Damaged, not_read
from lockstep.checkpoint.tensor_file import Entry
from lockstep.distributed.activity import Activity
from lockstep.errors import CheckpointError
from lockstep.strategy.slices import Stored


class StoredTensor(Stored):
    """A tensor that a file holds whole, or a piece of one."""

    def __init__(self, entry: Entry, descriptor: int, file: Path, activity: Activity) -> None:
        self._entry, self._descriptor, self._file, self._activity = entry, descriptor, file, activity
        self.name = entry.name
        self.shape = entry.shape[:-1] if entry.pairs else entry.shape
        self.dtype = _complex(entry.dtype) if entry.pairs else entry.dtype

    def part(self, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        if self._entry.pairs:
            offset, size = (*offset, 0), (*size, 2)
        found = torch.empty(size, dtype=self._entry.dtype)
        self._read(found, offset)
        return torch.view_as_complex(found) if self._entry.pairs else found

    def fill(self, tensor: Tensor, offset: tuple[int, ...]) -> None:
        if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.dtype == self._entry.dtype:
            self._read(tensor, offset)  # straight into place
        else:
            super().fill(tensor, offset)

    def _read(self, found: Tensor, offset: tuple[int, ...]) -> None:
        entry = self._entry
        wanted = ranges.of_block(entry.shape, offset, tuple(found.shape), entry.dtype.itemsize, entry.begin)
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
        self._pieces: list[tuple[tuple[int, ...], StoredTensor]] = []

    def add(self, offset: tuple[int, ...], piece: StoredTensor) -> None:
        self._pieces.append((offset, piece))

    def part(self, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        found = torch.zeros(size, dtype=self.dtype)
        for begin, piece in self._pieces:
            first = [max(a, b) for a, b in zip(offset, begin, strict=True)]
            last = [min(a + n, b + m) for a, n, b, m in zip(offset, size, begin, piece.shape, strict=True)]
            if all(a < b for a, b in zip(first, last, strict=True)):
                here = tuple(slice(a - o, b - o) for a, b, o in zip(first, last, offset, strict=True))
                there = tuple(a - b for a, b in zip(first, begin, strict=True))
                found[here] = piece.part(there, tuple(b - a for a, b in zip(first, last, strict=True)))
        return found


def place(tensors: dict[str, Stored], entry: Entry, stored: StoredTensor) -> None:
    """Put an entry of a file among the tensors: by itself, or as a piece of one."""
    if entry.piece is None:
        tensors[entry.name] = stored
        return
    axes = len(stored.shape)  # without that of pairs
    whole = tensors.get(entry.piece.name)
    if not isinstance(whole, StoredPieces):
        whole = tensors[entry.piece.name] = StoredPieces(entry.piece.name, entry.piece.shape[:axes], stored.dtype)
    whole.add(entry.piece.offset[:axes], stored)


class OpenFiles:
    """The files of tensors of a checkpoint, open until it has been loaded, whatever becomes of their names."""

    def __init__(self, folder: Path, told: Mapping[str, Any], activity: Activity) -> None:
        self._folder, self._told, self._activity = folder, told, activity
        self._open: list[int] = []

    def tensors(self, kind: str) -> dict[str, Stored]:
        """Those of the model, or of the state, by name; raises Damaged or Unreadable."""
        tensors: dict[str, Stored] = {}
        entries: list[Entry] = []
        for name in manifest.tensor_files(self._told, kind):
            descriptor = self._opened(name)
            for entry in self._entries(descriptor, name):
                place(tensors, entry, StoredTensor(entry, descriptor, self._folder / name, self._activity))
                entries.append(entry)
        try:
            tensor_file.check_pieces(entries)
        except ValueError as error:
            raise Damaged(str(error)) from None
        return tensors

    def close(self) -> None:
        while self._open:
            os.close(self._open.pop())

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _opened(self, name: str) -> int:
        self._open.append(manifest.open_part(self._folder, name))
        return self._open[-1]

    def _entries(self, descriptor: int, name: str) -> list[Entry]:
        try:
            return tensor_file.read_header(ranges.from_start(descriptor), self._told["files"][name]["bytes"])
        except OSError as error:
            raise not_read(name, error) from None
        except (EOFError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Damaged(f"{name} cannot be read: {error}") from None


def _complex(dtype: torch.dtype) -> torch.dtype:
    return torch.view_as_complex(torch.empty(0, 2, dtype=dtype)).dtype
