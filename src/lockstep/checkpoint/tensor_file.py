"""Writes and reads tensors in the safetensors format, in one pass over the bytes.

The library of that name writes and maps whole files by itself: a digest would cost a second reading, and what it loads
stays tied to the file. docs/decisions/015 says more.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from lockstep.checkpoint.header import Entry, Fill, laid_out, read_header


def unsupported(tensor: Tensor) -> str | None:
    """Returns why a file cannot hold this tensor, or None."""
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}; only dense tensors can be saved"
    if tensor.dtype not in _codes() and not tensor.is_complex():
        return f"its type is {tensor.dtype}, which the safetensors format does not have"
    return None


def stored_form(tensor: Tensor) -> Tensor:
    """A tensor as a file holds it: the same memory, and pairs for complex numbers of a type that the format lacks."""
    return torch.view_as_real(tensor) if _needs_pairs(tensor) else tensor


def entry_of(name: str, tensor: Tensor, shape: Sequence[int] | None = None) -> Entry:
    """What a header says of a tensor, or of one of its type and another shape."""
    pairs, stored = _needs_pairs(tensor), stored_form(tensor)
    whole = tuple(tensor.shape if shape is None else shape)
    return Entry(name, _codes()[stored.dtype], stored.itemsize, (*whole, 2) if pairs else whole, pairs=pairs)


def write(
    send: Callable[[memoryview], Any], tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Passes on the bytes of a file, in order. Tensors are on the host."""
    header, entries = laid_out([entry_of(name, each) for name, each in tensors.items()], metadata)
    send(memoryview(header))
    for each in entries:
        send(memory(stored_form(tensors[each.name]).contiguous()))


def read(fill: Fill, size: int) -> list[tuple[Entry, Tensor]]:
    """Returns the tensors and pieces of tensors in a file of so many bytes, in memory of their own.

    Raises ValueError, KeyError or TypeError where the bytes are not those of such a file.
    """
    entries, _ = read_header(fill, size)
    types = [dtype_of(each) for each in entries]
    found = []
    for each, dtype in zip(entries, types, strict=True):
        stored = torch.empty(each.shape, dtype=dtype)
        fill(memory(stored))
        found.append((each, torch.view_as_complex(stored) if each.pairs else stored))
    return found


def dtype_of(entry: Entry) -> torch.dtype:
    """The type of an entry's numbers; raises KeyError or ValueError where there is none."""
    dtype = {code: dtype for dtype, code in _codes().items()}[entry.dtype]
    if entry.itemsize not in (0, dtype.itemsize):
        raise ValueError(f"the place of {entry.name!r} in the file does not fit its shape")
    return dtype


def memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _needs_pairs(tensor: Tensor) -> bool:
    return tensor.is_complex() and tensor.dtype not in _codes()


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
