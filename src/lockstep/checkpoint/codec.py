"""Turns state into tensors and JSON, and back. Types that JSON lacks are tagged, anything unknown is refused by
path."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lockstep.checkpoint import tensor_file
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
        if tag in ("$array", "$scalar"):
            found = tensors[body]
            array = (found.whole() if isinstance(found, Stored) else found).numpy()
            return array[()] if tag == "$scalar" else array
        if tag == "$bytes":
            return base64.b64decode(body)
        if tag == "$tuple":
            return tuple(unpack(value, tensors) for value in body)
        if tag in ("$map", "$counter"):
            pairs = {unpack(key, tensors): unpack(value, tensors) for key, value in body}
            return Counter(pairs) if tag == "$counter" else pairs
    return {key: unpack(value, tensors) for key, value in tree.items()}


def to_bytes(state: Any) -> bytes:
    """Encodes state for another rank."""
    tree, tensors = pack(state)
    tensor_file.check_types("state", tensors)
    text, parts = json.dumps(tree).encode(), list[memoryview]()
    tensor_file.write(parts.append, {name: each.cpu() for name, each in tensors.items()})
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def from_bytes(data: bytes) -> Any:
    end = 8 + int.from_bytes(data[:8], "little")
    return unpack(json.loads(data[8:end]), tensor_file.read(memoryview(data)[end:]))


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
    dtype = value.dtype if isinstance(value, (np.ndarray, np.generic)) else None
    if dtype is not None and dtype.kind in "biuf" and dtype.isnative and dtype.itemsize <= 8:  # as torch has them
        tag = "$scalar" if isinstance(value, np.generic) else "$array"
        return {tag: _keep(torch.from_numpy(np.array(value)), path, tensors)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        return {"$tensor": _keep(value.detach(), path, tensors)}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, list):
        return [_pack(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return {"$tuple": [_pack(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]}
    if isinstance(value, Counter) or (isinstance(value, Mapping) and not hasattr(type(value), "__missing__")):
        return _pack_mapping(value, path, tensors)
    plain = "dict" if isinstance(value, Mapping) else "tuple" if isinstance(value, tuple) else None
    remedy = f". A {plain} would come back: return {plain}(...) of it" if plain else ""
    raise CheckpointError(
        f"{path or 'state'}: a value of type {type(value).__name__} cannot be saved: only tensors, numbers, text, "
        f"bytes, lists, tuples and mappings can (got {value!r}){remedy}"
    )


def _keep(tensor: torch.Tensor, path: str, tensors: Tensors) -> str:
    """Keeps a tensor under its path, or one like it: `a.b` may also be a key with a dot in it."""
    name = path
    while name in tensors or name == "__metadata__":  # which the format of files has for itself
        name += "'"
    tensors[name] = tensor
    return name


def _pack_mapping(value: Mapping[Any, Any], path: str, tensors: Tensors) -> Any:
    items = [(key, item, f"{path}.{key}" if path else str(key)) for key, item in value.items()]
    if isinstance(value, Counter) or not all(isinstance(key, str) and key[:1] != "$" for key in value):
        tag = "$counter" if isinstance(value, Counter) else "$map"
        return {tag: [[_pack(key, f"{below}#key", tensors), _pack(item, below, tensors)] for key, item, below in items]}
    return {key: _pack(item, below, tensors) for key, item, below in items}
