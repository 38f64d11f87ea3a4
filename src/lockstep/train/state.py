"""Where a run is: the position in the data, the generators, and when something is due."""

from __future__ import annotations

import base64
import random
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch

from lockstep.config.values import Interval
from lockstep.runtime.base import Runtime


@dataclass
class Progress:
    """How far training has come. Equal on all ranks at every step boundary."""

    epoch: int = 0  # whole epochs done
    step: int = 0  # optimizer steps done
    batch: int = 0  # global batches done in the epoch that is under way
    examples: int = 0  # examples trained on, over all ranks
    epoch_ended: bool = False  # whether the last step was the last of its epoch

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


class Stateful(Protocol):
    """Anything whose state belongs into a checkpoint."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class Due:
    """Says when an interval has passed. Steps and epochs are counted; seconds are read off a clock that ranks share."""

    def __init__(self, interval: Interval | None) -> None:
        self._interval = interval
        self._last = 0.0

    def now(self, progress: Progress, clock: float) -> bool:
        if self._interval is None:
            return False
        count = self._interval.count
        if self._interval.unit == "step":
            return progress.step % count == 0
        if self._interval.unit == "epoch":
            return progress.epoch_ended and progress.epoch % count == 0
        if clock - self._last < count:
            return False
        self._last = clock
        return True


def seed_generators(runtime: Runtime, seed: int, rank: int | None = None) -> None:
    """Seed every generator alike on all ranks, or (with a rank) differently on each."""
    words = np.random.SeedSequence([seed] if rank is None else [seed, rank + 1]).generate_state(3, np.uint64)
    runtime.seed(int(words[0] >> np.uint64(1)))
    random.seed(int(words[1]))
    np.random.seed(int(words[2] & np.uint64(0xFFFFFFFF)))


def generator_states(runtime: Runtime) -> dict[str, Any]:
    """The state of all generators of this process as plain data."""
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
