"""The generators of random numbers that a process draws from: seeding them, and their states as plain data."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch

from lockstep.runtime.base import Runtime


def seed_generators(runtime: Runtime, seed: int, rank: int | None = None) -> None:
    """Seed every generator alike on all ranks, or (with a rank) differently on each."""
    words = np.random.SeedSequence([seed] if rank is None else [seed, rank + 1]).generate_state(3, np.uint64)
    runtime.seed(int(words[0] >> np.uint64(1)))
    random.seed(int(words[1]))
    np.random.seed(int(words[2] & np.uint64(0xFFFFFFFF)))


def generator_states(runtime: Runtime) -> dict[str, Any]:
    kind, words, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, state, following = random.getstate()
    return {
        "torch": {name: _text(each.numpy().tobytes()) for name, each in runtime.rng_state().items()},
        "numpy": [kind, _text(np.asarray(words, dtype=np.uint32).tobytes()), position, has_gauss, gauss],
        "python": [version, _text(np.array(state, dtype=np.uint32).tobytes()), following],
    }


def set_generator_states(runtime: Runtime, states: dict[str, Any]) -> None:
    runtime.set_rng_state(
        {name: torch.frombuffer(bytearray(_bytes(text)), dtype=torch.uint8) for name, text in states["torch"].items()}
    )
    kind, words, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, np.frombuffer(_bytes(words), dtype=np.uint32), position, has_gauss, gauss))
    version, state, following = states["python"]
    random.setstate((version, tuple(np.frombuffer(_bytes(state), dtype=np.uint32).tolist()), following))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
