"""Nested batches: mapping over their tensors, and finding them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

Change = Callable[[torch.Tensor], torch.Tensor]


def map_tensors(change: Change, batch: Any, other: Callable[[Any], Any] = lambda value: value) -> Any:
    """Returns a batch of the same structure with every tensor changed.

    Knows mappings, lists, tuples, dataclasses and packed sequences; anything else goes to `other`.
    """
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, PackedSequence):
        return _packed(change, batch)
    if isinstance(batch, Mapping):
        return _mapping({key: map_tensors(change, value, other) for key, value in batch.items()}, batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(change, value, other) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_tensors(change, value, other) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        changed = copy.copy(batch)  # not dataclasses.replace: fields may be left out of __init__
        for field in dataclasses.fields(batch):
            value = map_tensors(change, getattr(batch, field.name), other)
            object.__setattr__(changed, field.name, value)  # a frozen one is still being made
        return changed
    return other(batch)


def moved(batch: Any, device: torch.device) -> Any:
    """Returns a batch on a device; objects with a `.to()` method are moved by it."""

    def move(value: Any) -> Any:
        to = getattr(value, "to", None)
        return to(device) if callable(to) and not isinstance(value, type) else value

    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch, move)


def pinned(batch: Any) -> Any:
    """Returns a batch in page-locked memory, as far as it is on the host."""

    def pin(value: Any) -> Any:
        method = getattr(value, "pin_memory", None)
        return method() if callable(method) and not isinstance(value, type) else value

    return map_tensors(lambda tensor: tensor.pin_memory() if tensor.device.type == "cpu" else tensor, batch, pin)


def tensors_of(batch: Any, path: str = "batch") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields every tensor of a batch with its place: `batch[0]`, `batch['inputs']`, `batch.mask`."""
    if isinstance(batch, torch.Tensor):
        yield path, batch
    elif isinstance(batch, PackedSequence):
        yield f"{path}.data", batch.data
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from tensors_of(value, f"{path}[{key!r}]")
    elif isinstance(batch, (list, tuple)):
        for index, value in enumerate(batch):
            yield from tensors_of(value, f"{path}[{index}]")
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from tensors_of(getattr(batch, field.name), f"{path}.{field.name}")


def _packed(change: Change, batch: PackedSequence) -> PackedSequence:
    def order(indices: torch.Tensor | None) -> torch.Tensor | None:
        return None if indices is None else change(indices)

    # The sizes of its batches are read by the host, wherever the data is.
    return PackedSequence(
        change(batch.data), batch.batch_sizes, order(batch.sorted_indices), order(batch.unsorted_indices)
    )


def _mapping(changed: dict[Any, Any], batch: Mapping[Any, Any]) -> Any:
    if type(batch) is dict:
        return changed
    if isinstance(batch, MutableMapping):
        with contextlib.suppress(Exception):  # not every mapping can be copied; a dict then has to do
            same = copy.copy(batch)  # keeps what a subclass has beside its items
            for key, value in changed.items():
                same[key] = value
            return same
    return changed
