"""Sends what every rank has to rank 0, however much that is: tensors, and the plain data around them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load, save

from lockstep.checkpoint import codec
from lockstep.distributed.group import Group

# So much is sent at once: the limit of a wait is for a piece, not for all that a rank has.
_PIECE_BYTES = 64 * 2**20
_LENGTH_BYTES = 8


def at_rank_zero(group: Group, value: Any, speaks: bool, name: str) -> list[Any]:
    """On rank 0 the values of all ranks that speak, in rank order; nothing on the others.

    Every rank must call it. Values are what a checkpoint could hold: no pickles travel.
    """
    if group.world_size == 1:
        return [value]
    mine = _encoded(value) if speaks and group.rank != 0 else b""
    sizes = group.gather(len(mine), f"how much of {name} every rank has")
    if group.rank == 0:
        received = [_decoded(_receive(group, rank, size, name)) for rank, size in enumerate(sizes) if size]
        return [value, *received] if speaks else received
    for start in range(0, len(mine), _PIECE_BYTES):
        piece = bytearray(mine[start : start + _PIECE_BYTES])
        group.send(torch.frombuffer(piece, dtype=torch.uint8), 0, f"{name} of rank {group.rank}")
    return []


def _receive(group: Group, rank: int, size: int, name: str) -> bytes:
    whole = torch.empty(size, dtype=torch.uint8)
    for start in range(0, size, _PIECE_BYTES):
        group.receive(whole[start : start + _PIECE_BYTES], rank, f"{name} of rank {rank}")
    return whole.numpy().tobytes()


def _encoded(value: Any) -> bytes:
    tree, tensors = codec.pack(value)
    header = json.dumps(tree).encode()
    # Copies, since what shares memory is refused there; under numbers, since a name may be anything here.
    names = {str(index): each for index, each in enumerate(tensors)}
    body = save({number: tensors[name].detach().cpu().contiguous().clone() for number, name in names.items()})
    known = json.dumps(names).encode()
    return b"".join(
        part for each in (header, known, body) for part in (len(each).to_bytes(_LENGTH_BYTES, "little"), each)
    )


def _decoded(message: bytes) -> Any:
    parts, at = [], 0
    while at < len(message):
        size = int.from_bytes(message[at : at + _LENGTH_BYTES], "little")
        parts.append(message[at + _LENGTH_BYTES : at + _LENGTH_BYTES + size])
        at += _LENGTH_BYTES + size
    header, known, body = parts
    found = load(body)
    names: Mapping[str, str] = json.loads(known)
    return codec.unpack(json.loads(header), {name: found[number] for number, name in names.items()})
