"""The interface of a device family, and the random generators of a process."""

from __future__ import annotations

import abc
import base64
import contextlib
import logging
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from lockstep.errors import ConfigError
from lockstep.runtime.moving import moved

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

_ALIGNMENT = 16  # of a tensor in what is broadcast: more than any type of number needs
_PIECE_BYTES = 64 * 2**20  # that is broadcast at once


class Copy(Protocol):
    """Values being copied from the device to the host."""

    def arrived(self) -> bool: ...

    def read(self) -> list[float]:
        """Waits for the values and returns them."""
        ...


class Runtime(abc.ABC):
    """One device family as seen by one process."""

    name: ClassVar[str]
    # The torch.distributed backend that carries tensors between devices of this family.
    backend: str

    @property
    def mesh_backend(self) -> str:
        """The backend for the axes of a mesh."""
        return self.backend

    # Whether every new shape costs a compilation, so that short batches are better filled up.
    fixed_shapes: bool = False
    # Whether everything is compiled anyway, so that torch.compile has nothing to add.
    compiles_everything: bool = False
    # Whether reading a value at once would hold up what the device is doing, so that it is better read later.
    reads_later: bool = False
    # Whether a copy to the device can go on beside what the device computes.
    copies_ahead: bool = False
    # Whether an optimizer that can step by one kernel is faster so.
    fuses_optimizers: bool = False
    # What examples or tokens are counted in: exact for any number that a batch can have.
    count_dtype: torch.dtype = torch.float64

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def prepare(self) -> None:  # noqa: B027  not every family has something to do
        """Prepares this thread to use its device; may be called again."""

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def rng_state(self) -> dict[str, torch.Tensor]:
        """Returns the state of torch's generators."""
        return {"torch": torch.get_rng_state()}

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        torch.set_rng_state(state["torch"])

    def autocast(self, precision: str) -> contextlib.AbstractContextManager[Any]:
        if precision in ("float32", "tf32"):
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.float16 if precision == "fp16" else torch.bfloat16)

    def use_precision(self, precision: str) -> None:
        """Prepares for a precision, or refuses it."""
        if precision == "fp16":
            raise ConfigError(
                f"train.precision: fp16 is for CUDA GPUs, but the runtime is {self.name}: use bf16, which needs no "
                "scaled loss"
            )
        if precision == "tf32":
            logger.info("train.precision: tf32 is a way of GPUs to multiply; with runtime: %s it is float32", self.name)

    def recomputed(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Calls a function with activation checkpointing."""
        return checkpoint(function, *inputs, use_reentrant=False)

    def synchronize(self) -> None:  # noqa: B027
        """Waits for the device to finish."""

    def end_of_program(self, device: torch.device | None = None) -> None:  # noqa: B027
        """Ends a program that is compiled as one; does nothing in eager mode."""

    def compilations(self) -> int | None:
        """Returns the number of compiled programs, or None."""
        return None

    def program_text(self, tensor: torch.Tensor) -> str:
        """Returns the program that computes a tensor, with source lines, if it is pending."""
        return ""

    def to_host(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [each.cpu() for each in tensors]

    def fetch(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns tensors that can be copied without compiling a program for each."""
        return tensors

    def copy_to_host(self, values: list[torch.Tensor]) -> Copy | None:
        """Starts copying values to the host; returns None if there is nothing to gain."""
        return None

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        """Sums a tensor over all ranks in place and returns a handle to wait for."""
        return dist.all_reduce(tensor, async_op=True)

    @torch.no_grad()
    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        """Gives tensors the values that rank 0 has."""
        own = [_without_repetition(each) for each in tensors]
        for tensor, value in zip(own, from_rank_0(self.fetch(own), self.device), strict=True):
            if dist.get_rank() != 0:
                tensor.copy_(value)
        self.end_of_program()

    def addressable_device_count(self) -> int:
        return 1

    def global_device_count(self) -> int | None:
        """Returns the devices of all processes, or None if it is one per process."""
        return None

    def move(self, batch: Any) -> Any:
        """Returns a batch with all tensors on the device; also takes what `begin_move` returned."""
        return moved(batch, self.device)

    def begin_move(self, batch: Any) -> Any:
        """Starts copying a batch to the device."""
        return batch

    def identity(self) -> str:
        """Returns a name of the physical device that is unique over all hosts."""
        raise NotImplementedError

    def world_size(self) -> int | None:
        """Returns the device runtime's number of ranks, or None."""
        return None

    def memory(self) -> dict[str, int]:
        """Returns the bytes in use by kind, if known."""
        return {}


def meeting_place(device: torch.device) -> torch.device:
    """Returns where ranks exchange what is on a device: gloo does so in host memory alone."""
    return torch.device("cpu") if dist.get_backend() == "gloo" else device


def from_rank_0(tensors: Sequence[torch.Tensor], device: torch.device) -> Iterator[torch.Tensor]:
    """Yields rank 0's values, where ranks meet; on other ranks only shape and type of the tensors count.

    They travel as bytes, some together: a backend does not know every type. What is kept has to be copied.
    """
    for bucket in in_buckets(tensors, lambda each: each.nbytes, _PIECE_BYTES):
        sizes = [math.ceil(each.nbytes / _ALIGNMENT) * _ALIGNMENT for each in bucket]
        together = torch.zeros(sum(sizes), dtype=torch.uint8, device=meeting_place(device))
        parts = [
            part[: each.nbytes].view(each.dtype).view(each.shape)
            for part, each in zip(torch.split(together, sizes), bucket, strict=True)
        ]
        if dist.get_rank() == 0:
            for part, each in zip(parts, bucket, strict=True):
                part.copy_(each)
        dist.broadcast(together, src=0)
        yield from parts


def in_buckets(
    items: Iterable[Item], size: Callable[[Item], float], limit: float, kind: Callable[[Item], Any] = lambda item: None
) -> list[list[Item]]:
    """Groups items in their order, each kind by itself, with no more than `limit` bytes in a bucket of several."""
    found: list[list[Item]] = []
    begun: dict[Any, tuple[list[Item], float]] = {}
    for item in items:
        bucket, taken = begun.get(kind(item), ([], 0))
        if not bucket or taken + size(item) > limit:
            bucket, taken = [], 0
            found.append(bucket)
        bucket.append(item)
        begun[kind(item)] = bucket, taken + size(item)
    return found


def _without_repetition(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the part of an expanded view that is in memory."""
    for dimension, stride in enumerate(tensor.stride()):
        tensor = tensor.narrow(dimension, 0, min(1, tensor.size(dimension))) if stride == 0 else tensor
    return tensor


def seed_generators(runtime: Runtime, seed: int, *place: int) -> None:
    """Seeds all generators, equally on all ranks or differently with a rank, or another place."""
    words = np.random.SeedSequence([seed, *(each + 1 for each in place)]).generate_state(3, np.uint64)
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


def restore_generators(
    runtime: Runtime, states: Sequence[Mapping[str, Any]], place: Sequence[int], places: int, seed: int
) -> None:
    """Restores the generators of a rank, by its place among those that draw differently. Where there were others, all
    ranks get new ones, from a seed and the place."""
    by_place = {tuple(each["place"]): each for each in states}
    if len(by_place) == places and tuple(place) in by_place:
        set_generator_states(runtime, dict(by_place[tuple(place)]))
    else:
        seed_generators(runtime, seed, *place)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
