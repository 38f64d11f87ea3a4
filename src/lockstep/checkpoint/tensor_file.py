"""Tensors in the safetensors format: written in one pass over the bytes, and read as far as a rank needs them.

The library of that name writes and maps whole files by itself: a digest would cost a second reading, and what it loads
stays tied to the file. docs/decisions/015 says more.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from lockstep.checkpoint import ranges
from lockstep.checkpoint.header import Entry, check_pieces, laid_out, read_header
from lockstep.distributed.activity import Activity
from lockstep.errors import CheckpointError
from lockstep.strategy.slices import Stored


def check_types(part: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuses tensors that a file cannot hold."""
    for name, tensor in tensors.items():
        problem = None
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
            kind = "nested" if tensor.is_nested else "meta" if tensor.is_meta else tensor.layout
            problem = f"it is a {kind} tensor; only dense tensors can be saved"
        elif tensor.dtype not in _codes() and not tensor.is_complex():
            problem = f"its type is {tensor.dtype}, which the safetensors format does not have"
        if problem is not None:
            raise CheckpointError(f"{part}: {name!r} cannot be saved: {problem}")


def stored_form(tensor: Tensor) -> Tensor:
    """A tensor as a file holds it: the same memory, and pairs for complex numbers of a type that the format lacks."""
    tensor = tensor.resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if _needs_pairs(tensor.dtype) else tensor


def entry_of(name: str, dtype: torch.dtype, shape: Sequence[int]) -> Entry:
    """What a header says of a tensor of this type and shape."""
    pairs = _needs_pairs(dtype)
    stored = dtype.to_real() if pairs else dtype
    return Entry(name, _codes()[stored], stored.itemsize, (*shape, 2) if pairs else tuple(shape), pairs=pairs)


def write(
    send: Callable[[memoryview], Any],
    tensors: Mapping[str, Tensor | Stored],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Passes on the bytes of a file, in order. Tensors are on the host, or read one after the other."""
    header, entries = laid_out([entry_of(name, each.dtype, each.shape) for name, each in tensors.items()], metadata)
    send(memoryview(header))
    for entry in entries:
        each = tensors[entry.name]
        send(memory(stored_form(each.whole() if isinstance(each, Stored) else each).contiguous()))


def read(data: memoryview) -> dict[str, Tensor]:
    """Returns the tensors of a file that is in memory."""
    found: dict[str, Tensor] = {}
    for entry in read_header(io.BytesIO(data[: 8 + int.from_bytes(data[:8], "little")]), len(data)):
        tensor = torch.empty(entry.shape, dtype=dtype_of(entry))
        memory(tensor)[:] = data[entry.begin : entry.begin + entry.nbytes]
        found[entry.name] = torch.view_as_complex(tensor) if entry.pairs else tensor
    return found


def dtype_of(entry: Entry) -> torch.dtype:
    """The type of an entry's numbers; raises KeyError or ValueError where there is none."""
    dtype = {code: dtype for dtype, code in _codes().items()}[entry.dtype]
    if entry.itemsize not in (0, dtype.itemsize):
        raise ValueError(f"the place of {entry.name!r} in the file does not fit its shape")
    return dtype


def memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, without a copy."""
    # Not by reshape(-1): a tensor of one number is contiguous whatever its stride.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def _needs_pairs(dtype: torch.dtype) -> bool:
    return dtype.is_complex and dtype not in _codes()


@functools.cache
def _codes() -> dict[torch.dtype, str]:
    """What the format calls each type of number, as the library itself writes it. Types that it packs are left out."""
    found = {}
    for dtype in {each for each in vars(torch).values() if isinstance(each, torch.dtype)}:
        with contextlib.suppress(Exception):  # each type that the library does not know fails in another way
            probe = save({"probe": torch.zeros(2, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype)})
            entry = json.loads(probe[8 : -2 * dtype.itemsize])["probe"]
            if entry["shape"] == [2]:
                found[dtype] = entry["dtype"]
    return found


# What reading raises where the bytes are not those of a file of tensors, or of JSON.
WRONG_CONTENT = (EOFError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


class StoredTensor(Stored):
    """A tensor that a file holds whole, or a piece of one."""

    def __init__(self, entry: Entry, descriptor: int, file: Path, activity: Activity) -> None:
        self._entry, self._descriptor, self._file, self._activity = entry, descriptor, file, activity
        self.name = entry.name
        self.shape = entry.shape[:-1] if entry.pairs else entry.shape
        self._stored_dtype = dtype_of(entry)
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
                ranges.fill(self._descriptor, wanted, memory(found))
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
        with open(descriptor, "rb", closefd=False) as stream:
            entries = read_header(stream, os.fstat(descriptor).st_size)
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
