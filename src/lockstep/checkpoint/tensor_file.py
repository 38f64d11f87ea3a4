"""Writes tensors in the safetensors format, in one pass over the bytes.

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

from lockstep.checkpoint.header import Entry, laid_out
from lockstep.strategy.slices import Stored


def unsupported(tensor: Tensor) -> str | None:
    """Returns why a file cannot hold this tensor, or None."""
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}; only dense tensors can be saved"
    if tensor.dtype not in _codes() and not tensor.is_complex():
        return f"its type is {tensor.dtype}, which the safetensors format does not have"
    return None


def stored_form(tensor: Tensor) -> Tensor:
    """A tensor as a file holds it: the same memory, and pairs for complex numbers of a type that the format lacks."""
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


def dtype_of(entry: Entry) -> torch.dtype:
    """The type of an entry's numbers; raises KeyError or ValueError where there is none."""
    dtype = {code: dtype for dtype, code in _codes().items()}[entry.dtype]
    if entry.itemsize not in (0, dtype.itemsize):
        raise ValueError(f"the place of {entry.name!r} in the file does not fit its shape")
    return dtype


def memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


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
