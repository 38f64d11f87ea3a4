"""Where the ranks are in their shares of a stream: told to each other before they are saved."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import safetensors.torch

from lockstep.checkpoint import codec
from lockstep.distributed.group import Group
from lockstep.errors import CheckpointError, ConfigError

_LENGTH_BYTES = 8


def gathered(group: Group, dp_rank: int, dp_size: int, places: Sequence[Any], names: Sequence[str]) -> list[list[Any]]:
    """For each of several streams, where each of its shares is: plain data, and tensors where a state has any."""
    payload = _packed(dp_rank, places, names)
    found: list[list[Any]] = [[None] * dp_size for _ in places]
    for message in group.rendezvous("where every rank is in its streams", payload):
        theirs, told = _unpacked(message)
        for stream, place in enumerate(told):
            if found[stream][theirs] is None:  # ranks with the same share are at the same place
                found[stream][theirs] = place
    return found


def require_plain(place: Any, name: str) -> None:
    """Refuse a state that cannot be saved before there is anything to save."""
    try:
        codec.pack(place)
    except CheckpointError as error:
        raise ConfigError(
            f"{name}: what its state_dict() returns cannot be saved: {error}. Return plain data, from which "
            "load_state_dict finds the place again"
        ) from None


def _packed(dp_rank: int, places: Sequence[Any], names: Sequence[str]) -> bytes:
    for place, name in zip(places, names, strict=True):
        require_plain(place, name)
    tree, tensors = codec.pack([dp_rank, list(places)])
    text = json.dumps(tree).encode()
    stored = safetensors.torch.save({name: each.contiguous() for name, each in tensors.items()}) if tensors else b""
    return len(text).to_bytes(_LENGTH_BYTES, "big") + text + stored


def _unpacked(message: bytes) -> tuple[int, list[Any]]:
    length = int.from_bytes(message[:_LENGTH_BYTES], "big")
    text, stored = message[_LENGTH_BYTES : _LENGTH_BYTES + length], message[_LENGTH_BYTES + length :]
    dp_rank, places = codec.unpack(json.loads(text), safetensors.torch.load(stored) if stored else {})
    return dp_rank, places
