"""Seeds the generators that data code draws from: Python's, numpy's and torch's. Those of training stay as they were.

A seed is a function of a key: the seed of the run, the source, the epoch and the position of an example. No rank and no
worker is part of it, so that random augmentation is the same on any number of processes and after a restart.
"""

from __future__ import annotations

import _random
import contextlib
import ctypes
import hashlib
import random
import sys
import threading
from array import array
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import mtrand

Key = tuple[int | str, ...]

# The first word of a key; the order of examples, the split and the batches of run.stream have others.
FETCHING, READING, SHUFFLING, SHARDS, COLLATING, SAMPLING = 3, 4, 5, 6, 7, 8
GENERATORS = ("python", "numpy", "torch")

_one_at_a_time = threading.RLock()  # ranks that are threads share the generators of their process

_SIZE = 624 * 4 + 4  # the words of a Mersenne twister, and the position among them


def seed_by(key: Key, generators: Iterable[str] = GENERATORS) -> None:
    """Seeds generators of the host. Those of devices are not for data code."""
    number = int.from_bytes(hashlib.blake2b(",".join(map(str, key)).encode(), digest_size=20).digest(), "big")
    if "python" in generators:
        random.seed(number & (2**64 - 1))
    if "numpy" in generators:
        if type(mtrand.get_bit_generator()) is not np.random.MT19937:  # no other can be seeded
            mtrand.set_bit_generator(np.random.MT19937())
        np.random.seed((number >> 64) & (2**32 - 1))
    if "torch" in generators:
        # Not torch.manual_seed, which records a stack trace for every device that is not initialized yet.
        torch.default_generator.manual_seed(number >> 97)


@contextlib.contextmanager
def generators_kept() -> Iterator[States]:
    """Restores the generators at its end: data code in the training process draws nothing from them."""
    with _one_at_a_time:
        before = States.now()
        try:
            yield before
        finally:
            before.restore()


class States(NamedTuple):
    """The state of every generator, read as bytes: the public interfaces for it take as long as fetching a batch."""

    python: tuple[Any, Any]
    numpy: tuple[Any, bytes, bool]
    torch: torch.Tensor
    whole: Any  # numpy's, where the words of its generator are not all of it

    @classmethod
    def now(cls) -> States:
        bits = mtrand.get_bit_generator()
        words = bytes(_numpy.words(bits))
        spare = _numpy.has_spare()
        whole = np.random.get_state(legacy=False) if spare or not words else None
        return cls(_python.state(), (bits, words, spare), torch.default_generator.get_state(), whole)

    def moved(self) -> list[str]:
        """Returns the generators that something was drawn from, or that were seeded, since then."""
        now = States.now()
        same = (
            now.python == self.python,
            now.numpy == self.numpy and (self.numpy[1] != b"" or repr(now.whole) == repr(self.whole)),
            _bytes(now.torch) == _bytes(self.torch),
        )
        return [name for name, unmoved in zip(GENERATORS, same, strict=True) if not unmoved]

    def restore(self) -> None:
        torch.default_generator.set_state(self.torch)
        _python.restore(self.python)
        bits, words, _ = self.numpy
        if mtrand.get_bit_generator() is not bits:
            mtrand.set_bit_generator(bits)
        if self.whole is not None:
            np.random.set_state(self.whole)
        elif bytes(_numpy.words(bits)) != words or _numpy.has_spare():
            key, position = np.frombuffer(words[:-4], np.uint32), int.from_bytes(words[-4:], sys.byteorder)
            np.random.set_state(("MT19937", key, position, 0, 0.0))


def saved_generators() -> list[Any]:
    numpy: Any = np.random.get_state()
    python = random.getstate()
    return [[python[0], list(python[1]), python[2]], [numpy[0], numpy[1].tolist(), *numpy[2:]],
            _bytes(torch.default_generator.get_state()).hex()]  # fmt: skip


def load_generators(saved: list[Any]) -> None:
    python, numpy, torchs = saved
    random.setstate((python[0], tuple(python[1]), python[2]))
    np.random.set_state(tuple(numpy))
    torch.default_generator.set_state(torch.frombuffer(bytearray.fromhex(torchs), dtype=torch.uint8))


def _bytes(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.nbytes)  # not by an operation: tensors may be fake (lockstep plan)


def _memory(address: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * _SIZE).from_address(address)).cast("B")


class _Python:
    """The generator of Python's `random`: an object head, the position and the words."""

    def __init__(self) -> None:
        self._generator: Any = random.random.__self__  # type: ignore[attr-defined]
        known: Any = random.Random(1)
        *words, position = known.getstate()[1]
        laid_out = array("i", [position]).tobytes() + array("I", words).tobytes()
        fits = _random.Random.__basicsize__ >= object.__basicsize__ + _SIZE
        as_expected = fits and _memory(id(known) + object.__basicsize__) == laid_out
        self._words = _memory(id(self._generator) + object.__basicsize__) if as_expected else None

    def state(self) -> tuple[Any, Any]:
        return (random.getstate(), None) if self._words is None else (bytes(self._words), self._generator.gauss_next)

    def restore(self, state: tuple[Any, Any]) -> None:
        if self._words is None:
            random.setstate(state[0])
        elif self.state() != state:
            position, *words = array("I", state[0])
            random.setstate((random.Random.VERSION, (*words, position), state[1]))


class _Numpy:
    """numpy's global generator: the words and the position, and beside them the second of two normal numbers."""

    def __init__(self) -> None:
        self._bits: Any = None
        self._words = memoryview(b"")
        self._spare: ctypes.c_int | None = None  # whether there is one; None where it is not where we look for it
        known: Any = np.random.RandomState(1)
        known.standard_normal()
        held = np.float64(known.get_state(legacy=False)["gauss"]).tobytes()
        place = ctypes.string_at(id(known), np.random.RandomState.__basicsize__).find(held) - len(held)
        if place > 0:
            flag = ctypes.c_int.from_address(id(known) + place)
            if (flag.value, known.standard_normal(), flag.value)[::2] == (1, 0):
                self._spare = ctypes.c_int.from_address(id(mtrand._rand) + place)

    def words(self, bits: Any) -> memoryview:
        """Returns the memory of a Mersenne twister; of any other bit generator, nothing."""
        if bits is not self._bits:
            twister = type(bits) is np.random.MT19937
            self._bits, self._words = bits, _memory(bits.ctypes.state_address) if twister else memoryview(b"")
        return self._words

    def has_spare(self) -> bool:
        """Whether it holds a number: the words do not tell, since a generator may be seeded anew in between."""
        return bool(np.random.get_state(legacy=False)["has_gauss"] if self._spare is None else self._spare.value)


_python, _numpy = _Python(), _Numpy()
