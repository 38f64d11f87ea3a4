"""The header of a safetensors file: the name, type, shape and place of every tensor in it. Needs no torch."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, NamedTuple

_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000  # as in the library of the format
_DIMENSIONS = 64
_LARGEST = 2**62
_PAIRS = ("F16", "F32", "F64")  # of which complex numbers can be made
_ALIGNMENT = 8  # of the first tensor, so that the file can be mapped
_METADATA = "__metadata__"
_PIECES = "pieces"  # in the metadata: which entries are pieces of tensors that several files hold
_COMPLEX = "complex"  # in the metadata: tensors of pairs that are complex numbers of a type that the format lacks


class Piece(NamedTuple):
    """Which part of a tensor an entry is."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor, as a file would hold it
    offset: tuple[int, ...]


class Entry(NamedTuple):
    """A tensor of a file, as the file holds it."""

    name: str
    dtype: str  # as the format calls it
    itemsize: int  # in bytes; 0 where it was read from a file and the tensor is empty
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
        return math.prod(self.shape) * self.itemsize


def laid_out(entries: Iterable[Entry], metadata: Mapping[str, str] | None = None) -> tuple[bytes, list[Entry]]:
    """Returns the header of a file, and its tensors in their order and with their places."""
    # The widest first: every tensor then begins where its type may.
    ordered = sorted(entries, key=lambda each: (-each.itemsize, each.name))
    pairs = sorted(each.name for each in ordered if each.pairs)
    pieces = {each.name: each.piece for each in ordered if each.piece is not None}
    beside = {
        **(metadata or {}),
        **({_COMPLEX: json.dumps(pairs)} if pairs else {}),
        **({_PIECES: json.dumps(pieces)} if pieces else {}),
    }
    found: dict[str, Any] = {_METADATA: beside} if beside else {}
    ends = list(itertools.accumulate((each.nbytes for each in ordered), initial=0))
    for each, begin, end in zip(ordered, ends, ends[1:], strict=False):
        found[each.name] = {"dtype": each.dtype, "shape": list(each.shape), "data_offsets": [begin, end]}
    text = json.dumps(found, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return header, [each._replace(begin=len(header) + begin) for each, begin in zip(ordered, ends, strict=False)]


def read_header(file: BinaryIO, size: int) -> list[Entry]:
    """Returns the tensors in a file of so many bytes, in the order of their bytes.

    Raises ValueError, KeyError or TypeError where the bytes are not those of such a file.
    """
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if length > min(_LONGEST_HEADER, size - _LENGTH_BYTES):
        raise ValueError(f"its header would have {length} bytes; the file has {size}, the format allows 100,000,000")
    header = _parsed(file.read(length))
    metadata = dict(header.pop(_METADATA, {}))
    entries = {each.name: each for each in _entries(header, _LENGTH_BYTES + length, size)}
    for name in _parsed(metadata.pop(_COMPLEX, "[]")):
        if entries[name].shape[-1:] != (2,) or entries[name].dtype not in _PAIRS:
            raise ValueError(f"{name!r} has no pairs of numbers")
        entries[name] = entries[name]._replace(pairs=True)
    for name, (whole, shape, offset) in _parsed(metadata.pop(_PIECES, "{}")).items():
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


def check_pieces(entries: Iterable[Entry]) -> None:
    """Makes sure that the pieces of all files make up their tensors; raises ValueError."""
    found: dict[str, list[tuple[Entry, Piece]]] = {}
    for each in entries:
        if each.piece is not None:
            found.setdefault(each.piece.name, []).append((each, each.piece))
    for name, pieces in found.items():
        forms = {(each.dtype, each.pairs, piece.shape) for each, piece in pieces}
        places = {piece.offset for _, piece in pieces}
        count = sum(math.prod(each.shape) for each, _ in pieces)
        if len(forms) != 1 or len(places) != len(pieces) or count != math.prod(pieces[0][1].shape):
            raise ValueError(f"the pieces of {name!r} do not make it up")


def _entries(header: dict[str, Any], start: int, size: int) -> list[Entry]:
    entries, position = [], 0
    for name, entry in sorted(header.items(), key=lambda each: each[1]["data_offsets"]):
        dtype, shape, (begin, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
        sizes = (*shape, begin, end)
        if len(shape) > _DIMENSIONS or not all(type(each) is int and 0 <= each <= _LARGEST for each in sizes):
            raise ValueError(f"the shape or the place of {name!r} cannot be")
        count = math.prod(shape)
        itemsize = (end - begin) // max(count, 1)
        if begin != position or end - begin != count * itemsize or (count and not itemsize):
            raise ValueError(f"the place of {name!r} in the file does not fit its shape")
        entries.append(Entry(name, dtype, itemsize, shape, start + begin))
        position = end
    if start + position != size:
        raise ValueError(f"its tensors have {position} bytes, and the file has room for {size - start}")
    return entries


def _parsed(text: bytes | str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
