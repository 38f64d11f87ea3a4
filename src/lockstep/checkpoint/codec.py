"""Turns state into tensors and JSON, and back. Types that JSON lacks are tagged, anything unknown is refused by
path."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lockstep.errors import CheckpointError
from lockstep.strategy.slices import Stored

Tensors = dict[str, torch.Tensor]


def pack(state: Any) -> tuple[Any, Tensors]:
    """Returns a JSON tree, and the tensors that it refers to by their path."""
    tensors: Tensors = {}
    return _pack(state, "", tensors), tensors


def unpack(tree: Any, tensors: Mapping[str, torch.Tensor | Stored]) -> Any:
    """Returns the state that `pack` was given, with Stored tensors where they are not read yet."""
    if isinstance(tree, list):
        return [unpack(value, tensors) for value in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        tag, body = next(iter(tree.items()))
        if tag == "$tensor":
            return tensors[body]
        if tag == "$array":
            found = tensors[body]
            return (found.whole() if isinstance(found, Stored) else found).numpy()
        if tag == "$bytes":
            return base64.b64decode(body)
        if tag == "$tuple":
            return tuple(unpack(value, tensors) for value in body)
        if tag in ("$map", "$counter"):
            pairs = {unpack(key, tensors): unpack(value, tensors) for key, value in body}
            return Counter(pairs) if tag == "$counter" else pairs
    return {key: unpack(value, tensors) for key, value in tree.items()}


def shared_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Returns later name -> first name for names of the very same tensor (tied weights)."""
    first: dict[tuple[Any, ...], str] = {}
    shared = {}
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            continue
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if place in first:
            shared[name] = first[place]
        else:
            first[place] = name
    return shared


def _pack(value: Any, path: str, tensors: Tensors) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        return {"$tensor": _keep(value.detach(), path, tensors)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.dtype.isnative:
        return {"$array": _keep(torch.from_numpy(value.copy()), path, tensors)}
    if isinstance(value, np.generic) and isinstance(value.item(), (bool, int, float, str, bytes)):
        return _pack(value.item(), path, tensors)
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, list):
        return [_pack(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [_pack(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]}
    if isinstance(value, Mapping):
        return _pack_mapping(value, path, tensors)
    raise CheckpointError(
        f"{path or 'state'}: a value of type {type(value).__name__} cannot be saved: only tensors, numbers, text, "
        f"bytes, lists, tuples and mappings can (got {value!r})"
    )


def _keep(tensor: torch.Tensor, path: str, tensors: Tensors) -> str:
    """Keeps a tensor under its path, or one like it: `a.b` may also be a key with a dot in it."""
    name = path
    while name in tensors:
        name += "'"
    tensors[name] = tensor
    return name


def _pack_mapping(value: Mapping[Any, Any], path: str, tensors: Tensors) -> Any:
    items = [(key, item, f"{path}.{key}" if path else str(key)) for key, item in value.items()]
    if isinstance(value, Counter) or not all(isinstance(key, str) and key[:1] != "$" for key in value):
        tag = "$counter" if isinstance(value, Counter) else "$map"
        return {tag: [[_pack(key, f"{below}#key", tensors), _pack(item, below, tensors)] for key, item, below in items]}
    return {key: _pack(item, below, tensors) for key, item, below in items}
