"""Sends states and outputs between ranks as JSON and safetensors: no pickle travels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lockstep.checkpoint import codec
from lockstep.distributed.group import Group
from lockstep.errors import CheckpointError, ConfigError

# The limit of a wait is for one piece, not for everything that a rank has.
_PIECE_BYTES = 64 * 2**20


def gather_to_rank_0(group: Group, value: Any, is_dp_leader: bool, name: str) -> list[Any]:
    """Returns the values of all dp leaders in rank order on rank 0, and nothing on other ranks. All ranks call it."""
    if group.world_size == 1:
        return [value]
    mine = codec.to_bytes(value) if is_dp_leader and group.rank != 0 else b""
    sizes = group.gather(len(mine), f"how much of {name} every rank has")
    if group.rank == 0:
        received = [codec.from_bytes(_receive(group, rank, size, name)) for rank, size in enumerate(sizes) if size]
        return [value, *received] if is_dp_leader else received
    for start in range(0, len(mine), _PIECE_BYTES):
        piece = bytearray(mine[start : start + _PIECE_BYTES])
        group.send(torch.frombuffer(piece, dtype=torch.uint8), 0, f"{name} of rank {group.rank}")
    return []


def _receive(group: Group, rank: int, size: int, name: str) -> bytes:
    whole = torch.empty(size, dtype=torch.uint8)
    for start in range(0, size, _PIECE_BYTES):
        group.receive(whole[start : start + _PIECE_BYTES], rank, f"{name} of rank {rank}")
    return whole.numpy().tobytes()


def gather_places(
    group: Group, dp_rank: int, dp_size: int, places: Sequence[Any], names: Sequence[str]
) -> list[list[Any]]:
    """Returns, for each of several streams, the position of every dp rank in it."""
    for place, name in zip(places, names, strict=True):
        require_plain(place, name)
    found: list[list[Any]] = [[None] * dp_size for _ in places]
    for message in group.rendezvous("where every rank is in its streams", codec.to_bytes([dp_rank, list(places)])):
        sender, sent = codec.from_bytes(message)
        for stream, place in enumerate(sent):
            if found[stream][sender] is None:  # ranks with the same dp rank are at the same place
                found[stream][sender] = place
    return found


def require_plain(place: Any, name: str) -> None:
    """Refuses the state of a stream that no checkpoint can hold."""
    try:
        codec.pack(place)
    except CheckpointError as error:
        raise ConfigError(
            f"{name}: what its state_dict() returns cannot be saved: {error}. Return plain data, from which "
            "load_state_dict finds the place again"
        ) from None
