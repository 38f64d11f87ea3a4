"""Tensors to a file and back in the safetensors format, in one pass over the bytes.

The format is a length, a JSON header and the tensors' bytes. The library of that name writes and maps whole files by
itself: a digest would cost a second reading, and what it loads stays tied to the file. docs/decisions/015 says more.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
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
_COMPLEX = "complex"  # in the metadata: tensors of pairs that are complex numbers of a type that the format lacks


class _Entry(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: list[int]


def unsupported(tensor: torch.Tensor) -> str | None:
    """Why a file cannot hold this tensor; nothing where it can."""
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}; only dense tensors can be saved"
    if tensor.dtype not in _codes() and not tensor.is_complex():
        return f"its type is {tensor.dtype}, which the safetensors format does not have"
    return None


def write(
    send: Callable[[memoryview], Any], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Pass on the bytes of a file, in order. Tensors are on the host."""
    pairs = {name for name, each in tensors.items() if each.is_complex() and each.dtype not in _codes()}
    written = {name: torch.view_as_real(each) if name in pairs else each for name, each in tensors.items()}
    # The widest first: every tensor then begins where its type may.
    written = dict(sorted(written.items(), key=lambda item: (-item[1].itemsize, item[0])))
    more = {_COMPLEX: json.dumps(sorted(pairs))} if pairs else {}
    send(memoryview(_header(written, {**(metadata or {}), **more})))
    for each in written.values():
        send(memory(each.contiguous()))


def read(fill: Callable[[memoryview], None], size: int) -> dict[str, torch.Tensor]:
    """The tensors of a file of so many bytes, in memory of their own; `fill` fills memory with the next bytes.

    Raises ValueError, KeyError or TypeError where the bytes are not those of such a file.
    """
    length = int.from_bytes(_next(fill, _LENGTH_BYTES, size), "little")
    if length > _LONGEST_HEADER:
        raise ValueError(f"its header would have {length} bytes; the format allows {_LONGEST_HEADER}")
    header = _parsed(_next(fill, length, size - _LENGTH_BYTES))
    tensors = {}
    for name, dtype, shape in _entries(header, size - _LENGTH_BYTES - length):
        tensors[name] = torch.empty(shape, dtype=dtype)
        fill(memory(tensors[name]))
    for name in _parsed(header.get(_METADATA, {}).get(_COMPLEX, "[]")):
        if tensors[name].shape[-1:] != (2,) or tensors[name].dtype not in _PAIRS:
            raise ValueError(f"{name!r} has no pairs of numbers")
        tensors[name] = torch.view_as_complex(tensors[name])
    return tensors


def memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    told: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        told[name] = {"dtype": _codes()[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _entries(header: dict[str, Any], size: int) -> Iterator[_Entry]:
    """The tensors of a header in the order of their bytes, once it is known that these fill the file."""
    dtypes = {code: dtype for dtype, code in _codes().items()}  # a code that is not among them is a KeyError
    entries, position = [], 0
    told = {name: entry for name, entry in header.items() if name != _METADATA}
    for name, entry in sorted(told.items(), key=lambda each: each[1]["data_offsets"]):
        dtype, shape, (begin, end) = (
            dtypes[entry["dtype"]],
            list(entry["shape"]),
            entry["data_offsets"],
        )
        if (
            not all(type(each) is int and 0 <= each <= _LARGEST for each in (*shape, begin, end))
            or len(shape) > _DIMENSIONS
        ):
            raise ValueError(f"the shape or the place of {name!r} cannot be")
        if begin != position or end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"the place of {name!r} in the file does not fit its shape")
        entries.append(_Entry(name, dtype, shape))
        position = end
    if position != size:
        raise ValueError(f"its tensors have {position} bytes, and the file has room for {size}")
    yield from entries


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
