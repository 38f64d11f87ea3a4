"""Tensors to a file and back in the safetensors format, in one pass over the bytes.

The format is a length, a JSON header and the tensors' bytes. The library of that name writes and maps whole files by
itself: a digest would cost a second reading, and what it loads stays tied to the file. docs/decisions/015 says more.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from safetensors.torch import save

_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000  # as in the library of the format
_DIMENSIONS = 64
_LARGEST = 2**62
_PAIRS = (torch.float16, torch.float32, torch.float64)  # of which complex numbers can be made
_ALIGNMENT = 8  # of the first tensor, so that the file can be mapped
_METADATA = "__metadata__"
_PIECES = "pieces"  # in the metadata: which entries are pieces of tensors that several files hold
_COMPLEX = "complex"  # in the metadata: tensors of pairs that are complex numbers of a type that the format lacks


class Piece(NamedTuple):
    """Which part of a tensor an entry is."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor, as a file would hold it
    offset: tuple[int, ...]

    def slices(self, size: Sequence[int]) -> tuple[slice, ...]:
        return tuple(slice(begin, begin + length) for begin, length in zip(self.offset, size, strict=True))


class Entry(NamedTuple):
    """A tensor of a file, as the file holds it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int = 0  # of its bytes in the file
    pairs: bool = False  # whether these are complex numbers of a type that the format lacks
    piece: Piece | None = None

    @property
    def tensor(self) -> str:
        """The name of the tensor that it is, or is a piece of."""
        return self.name if self.piece is None else self.piece.name

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def unsupported(tensor: torch.Tensor) -> str | None:
    """Why a file cannot hold this tensor; nothing where it can."""
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}; only dense tensors can be saved"
    if tensor.dtype not in _codes() and not tensor.is_complex():
        return f"its type is {tensor.dtype}, which the safetensors format does not have"
    return None


def stored_form(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as a file holds it: the same memory, and pairs for complex numbers of a type that the format lacks."""
    return torch.view_as_real(tensor) if _needs_pairs(tensor) else tensor


def entry_of(name: str, tensor: torch.Tensor, shape: Sequence[int] | None = None) -> Entry:
    """What a header says of a tensor, or of one of its type and another shape."""
    pairs = _needs_pairs(tensor)
    whole = tuple(tensor.shape if shape is None else shape)
    return Entry(name, stored_form(tensor).dtype, (*whole, 2) if pairs else whole, pairs=pairs)


def write(
    send: Callable[[memoryview], Any], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Pass on the bytes of a file, in order. Tensors are on the host."""
    header, entries = laid_out([entry_of(name, each) for name, each in tensors.items()], metadata)
    send(memoryview(header))
    for each in entries:
        send(memory(stored_form(tensors[each.name]).contiguous()))


def laid_out(entries: Iterable[Entry], metadata: Mapping[str, str] | None = None) -> tuple[bytes, list[Entry]]:
    """The header of a file, and its tensors in their order and with their places."""
    # The widest first: every tensor then begins where its type may.
    ordered = sorted(entries, key=lambda each: (-each.dtype.itemsize, each.name))
    pairs = [each.name for each in ordered if each.pairs]
    more = {_COMPLEX: json.dumps(sorted(pairs))} if pairs else {}
    pieces = {each.name: each.piece for each in ordered if each.piece is not None}
    more |= {_PIECES: json.dumps(pieces)} if pieces else {}
    header = _header(ordered, {**(metadata or {}), **more})
    begins = itertools.accumulate((each.nbytes for each in ordered), initial=len(header))
    return header, [each._replace(begin=begin) for each, begin in zip(ordered, begins, strict=False)]


def read(fill: Callable[[memoryview], None], size: int) -> dict[str, torch.Tensor]:
    """The tensors of a file of so many bytes, in memory of their own; `fill` fills memory with the next bytes.

    Raises ValueError, KeyError or TypeError where the bytes are not those of such a file.
    """
    tensors: dict[str, torch.Tensor] = {}
    add(fill, size, tensors, size)
    return tensors


def add(fill: Callable[[memoryview], None], size: int, tensors: dict[str, torch.Tensor], together: int) -> list[Entry]:
    """The same, beside the tensors of other files, which may hold other pieces; returns the entries.

    All files have so many bytes `together`: no tensor has more.
    """
    entries = read_header(fill, size)
    for each in entries:
        stored = torch.empty(each.shape, dtype=each.dtype)
        fill(memory(stored))
        if each.piece is None:
            tensors[each.name] = torch.view_as_complex(stored) if each.pairs else stored
            continue
        if math.prod(each.piece.shape) * each.dtype.itemsize > together:
            raise ValueError(f"{each.piece.name!r} of shape {each.piece.shape} has more bytes than all files")
        if each.piece.name not in tensors:
            whole = torch.zeros(each.piece.shape, dtype=each.dtype)
            tensors[each.piece.name] = torch.view_as_complex(whole) if each.pairs else whole
        whole = tensors[each.piece.name]
        whole = torch.view_as_real(whole) if each.pairs and whole.is_complex() else whole
        if (whole.dtype, tuple(whole.shape)) != (each.dtype, each.piece.shape):
            raise ValueError(f"the pieces of {each.piece.name!r} do not fit together")
        whole[each.piece.slices(each.shape)] = stored
    return entries


def check_pieces(entries: Iterable[Entry]) -> None:
    """Make sure that the pieces of tensors, of all files together, make them up; raises ValueError."""
    found: dict[str, list[Entry]] = {}
    for each in entries:
        if each.piece is not None:
            found.setdefault(each.piece.name, []).append(each)
    for name, pieces in found.items():
        forms = {(each.dtype, each.pairs, each.piece and each.piece.shape) for each in pieces}
        count = sum(math.prod(each.shape) for each in pieces)
        places = {each.piece and each.piece.offset for each in pieces}
        if len(forms) != 1 or len(places) != len(pieces) or count != math.prod(next(iter(forms))[2] or ()):
            raise ValueError(f"the pieces of {name!r} do not make it up")


def read_header(fill: Callable[[memoryview], None], size: int) -> list[Entry]:
    """The tensors that are in a file of so many bytes, in the order of their bytes, by its beginning.

    Raises ValueError, KeyError or TypeError where the bytes are not those of such a file.
    """
    length = int.from_bytes(_next(fill, _LENGTH_BYTES, size), "little")
    if length > _LONGEST_HEADER:
        raise ValueError(f"its header would have {length} bytes; the format allows {_LONGEST_HEADER}")
    header = _parsed(_next(fill, length, size - _LENGTH_BYTES))
    entries = {each.name: each for each in _entries(header, _LENGTH_BYTES + length, size)}
    for name in _parsed(header.get(_METADATA, {}).get(_COMPLEX, "[]")):
        if entries[name].shape[-1:] != (2,) or entries[name].dtype not in _PAIRS:
            raise ValueError(f"{name!r} has no pairs of numbers")
        entries[name] = entries[name]._replace(pairs=True)
    for name, (whole, shape, offset) in _parsed(header.get(_METADATA, {}).get(_PIECES, "{}")).items():
        piece, held = Piece(str(whole), tuple(shape), tuple(offset)), entries[name].shape
        numbers = (*piece.shape, *piece.offset)
        fits = len(piece.shape) == len(piece.offset) == len(held) and all(type(each) is int for each in numbers)
        if not fits or not all(
            0 <= begin <= begin + length <= end <= _LARGEST
            for begin, length, end in zip(piece.offset, held, piece.shape, strict=True)
        ):
            raise ValueError(f"{name!r} is no piece of a tensor of shape {shape}")
        entries[name] = entries[name]._replace(piece=piece)
    return list(entries.values())


def code_of(dtype: torch.dtype) -> str:
    """What the format calls a type of number."""
    return _codes()[dtype]


def dtype_of(code: str) -> torch.dtype:
    return next(dtype for dtype, each in _codes().items() if each == code)


def memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _needs_pairs(tensor: torch.Tensor) -> bool:
    return tensor.is_complex() and tensor.dtype not in _codes()


def _header(entries: Iterable[Entry], metadata: Mapping[str, str]) -> bytes:
    told: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    end = 0
    for each in entries:
        begin, end = end, end + each.nbytes
        told[each.name] = {"dtype": _codes()[each.dtype], "shape": list(each.shape), "data_offsets": [begin, end]}
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _entries(header: dict[str, Any], start: int, size: int) -> list[Entry]:
    """The tensors of a header in the order of their bytes, once it is known that these fill the file."""
    dtypes = {code: dtype for dtype, code in _codes().items()}  # a code that is not among them is a KeyError
    entries, position = [], 0
    told = {name: entry for name, entry in header.items() if name != _METADATA}
    for name, entry in sorted(told.items(), key=lambda each: each[1]["data_offsets"]):
        dtype, shape, (begin, end) = (
            dtypes[entry["dtype"]],
            tuple(entry["shape"]),
            entry["data_offsets"],
        )
        if (
            not all(type(each) is int and 0 <= each <= _LARGEST for each in (*shape, begin, end))
            or len(shape) > _DIMENSIONS
        ):
            raise ValueError(f"the shape or the place of {name!r} cannot be")
        if begin != position or end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"the place of {name!r} in the file does not fit its shape")
        entries.append(Entry(name, dtype, shape, start + begin))
        position = end
    if start + position != size:
        raise ValueError(f"its tensors have {position} bytes, and the file has room for {size - start}")
    return entries


def _parsed(text: bytearray | str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None


def _next(fill: Callable[[memoryview], None], length: int, left: int) -> bytearray:
    if not 0 <= length <= left:
        raise ValueError(f"its header would have {length} bytes, and the file has {left}")
    data = bytearray(length)
    fill(memoryview(data))
    return data


@functools.cache
def _codes() -> dict[torch.dtype, str]:
    """What the format calls each type of number, as the library itself writes it. Types that it packs are left out."""
    found = {}
    for dtype in {each for each in vars(torch).values() if isinstance(each, torch.dtype)}:
        with contextlib.suppress(Exception):  # each type that the library does not know fails in its own way
            probe = save({"probe": torch.zeros(2, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype)})
            entry = json.loads(probe[_LENGTH_BYTES : -2 * dtype.itemsize])["probe"]
            if entry["shape"] == [2]:
                found[dtype] = entry["dtype"]
    return found
