"""CUDA GPUs: one process per device, chosen by the local rank among the visible devices.

Ranks that share a GPU use gloo through host memory, since NCCL refuses two ranks on one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.futures import Future

from lockstep.runtime.base import Copy, Runtime
from lockstep.runtime.deterministic import start_cublas
from lockstep.runtime.gpus import check_devices
from lockstep.runtime.moving import map_tensors, moved


class Arriving:
    """A batch being copied to a GPU on a separate stream.

    `arrive` hands it to the computing stream without blocking the host.
    """

    def __init__(self, batch: Any, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        self._copies: list[torch.Tensor] = []
        with torch.cuda.stream(stream):
            self._batch = map_tensors(self._begin, batch)
            self._event = stream.record_event()

    def _begin(self, tensor: torch.Tensor) -> torch.Tensor:
        # What is no plain tensor may keep others that nobody here knows of, and whose memory would be given away while
        # the GPU still reads it: such go the usual way, on arrival.
        if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return tensor
        copy = tensor.to(self._device, non_blocking=True)
        self._copies.append(copy)
        return copy

    def arrive(self) -> Any:
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(self._event)
        for copy in self._copies:
            # It was made on another stream, to which its memory goes back only once this one is done with it.
            copy.record_stream(computing)
        return moved(self._batch, self._device)


class CudaRuntime(Runtime):
    name: ClassVar[str] = "cuda"
    reads_later = True
    copies_ahead = True
    fuses_optimizers = True

    def __init__(self, local_rank: int = 0, share: bool = False) -> None:
        present = torch.cuda.device_count()
        super().__init__(torch.device("cuda", local_rank % max(present, 1) if share else local_rank))
        # NCCL refuses two ranks on one device; gloo carries their tensors through the host.
        self.backend = "gloo" if share else "nccl"
        self._copying: torch.cuda.Stream | None = None

    @property
    def mesh_backend(self) -> str:
        if self.backend == "nccl":
            return "nccl"

        return register_through_host()

    def prepare(self) -> None:
        check_devices(self.device.index + 1, torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        if torch.are_deterministic_algorithms_enabled():
            start_cublas()

    def use_precision(self, precision: str) -> None:
        if precision == "tf32":  # for the whole process: matrix products, and convolutions
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.allow_tf32 = True

    def rng_state(self) -> dict[str, torch.Tensor]:
        return {**super().rng_state(), "cuda": torch.cuda.get_rng_state(self.device)}

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        super().set_rng_state(state)
        if "cuda" in state:  # absent where the checkpoint was written on another device family
            torch.cuda.set_rng_state(state["cuda"], self.device)

    def move(self, batch: Any) -> Any:
        """The copy does not wait for the current step of the GPU."""
        begun: Arriving = batch if isinstance(batch, Arriving) else self.begin_move(batch)
        return begun.arrive()

    def begin_move(self, batch: Any) -> Arriving:
        if self._copying is None:
            self._copying = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return Arriving(batch, self.device, self._copying)

    def copy_to_host(self, values: list[torch.Tensor]) -> Copy | None:
        return _CopyToHost(values)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def identity(self) -> str:
        return f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"

    def memory(self) -> dict[str, int]:
        return {
            "allocated": torch.cuda.memory_allocated(self.device),
            "peak": torch.cuda.max_memory_allocated(self.device),
        }


class _CopyToHost:
    """Reading values at once would stall the GPU for about a millisecond."""

    def __init__(self, values: list[torch.Tensor]) -> None:
        together = torch.stack([each.reshape(()).double() for each in values])
        self._on_host = torch.empty(together.shape, dtype=together.dtype, pin_memory=True)
        self._on_host.copy_(together, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def arrived(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def read(self) -> list[float]:
        self._event.synchronize()
        return [float(each) for each in self._on_host.tolist()]


THROUGH_HOST = "lockstep_through_host"


def register_through_host() -> str:
    """Registers the backend with torch and returns its name."""
    if THROUGH_HOST.upper() not in vars(dist.Backend):
        dist.Backend.register_backend(THROUGH_HOST, _create, devices=["cuda", "cpu"])
    return THROUGH_HOST


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> ThroughHost:
    return ThroughHost(rank, size, dist.ProcessGroupGloo(store, rank, size, timeout))


class ThroughHost(dist.ProcessGroup):
    """The collectives that fully_shard and DTensor use, through host memory. Each has ended when its call returns."""

    def __init__(self, rank: int, size: int, gloo: Any) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo = gloo

    def getBackendName(self) -> str:
        return THROUGH_HOST

    @property
    def pg_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    @property
    def group_name(self) -> Any:
        return self.pg_name

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        return self._in_place(tensors, lambda each: self._gloo.allreduce(each, _operation(opts, dist.AllreduceOptions)))

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        return self._in_place(tensors, lambda each: self._gloo.broadcast(each, opts or dist.BroadcastOptions()))

    def barrier(self, opts: Any = None) -> Any:
        self._gloo.barrier().wait()
        return _done([])

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        for parts, mine in zip(outputs, inputs, strict=True):
            on_host = [torch.empty_like(each, device="cpu") for each in parts]
            self._gloo.allgather([on_host], [_on_host(mine)]).wait()
            for part, each in zip(parts, on_host, strict=True):
                part.copy_(each)
        return _done(outputs)

    def _allgather_base(self, output: Tensor, mine: Tensor, opts: Any = None) -> Any:
        parts = list(output.view(-1).chunk(self.size()))
        return self.allgather([parts], [mine.reshape(-1)])

    all_gather_single = _allgather_base  # type: ignore[assignment]  # as torch calls it up to 2.12

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        for output, mine in zip(outputs, inputs, strict=True):
            self._allgather_base(output, mine)
        return _done(outputs)

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Any:  # type: ignore[override]
        for output, parts in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, torch.cat([each.reshape(-1) for each in parts]), opts)
        return _done(outputs)

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: Any = None) -> Any:
        on_host = _on_host(whole).clone()
        self._gloo.allreduce([on_host], _operation(opts, dist.AllreduceOptions)).wait()
        output.copy_(on_host.view(-1).chunk(self.size())[self.rank()].view(output.shape))
        return _done([output])

    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        for output, whole in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, whole, opts)
        return _done(outputs)

    def _in_place(self, tensors: Sequence[Tensor], exchange: Any) -> Any:
        for tensor in tensors:
            on_host = _on_host(tensor).contiguous()
            exchange([on_host]).wait()
            if on_host.data_ptr() != tensor.data_ptr():
                tensor.copy_(on_host)
        return _done(tensors)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu")


def _operation(opts: Any, kind: Any) -> Any:
    found = kind()
    if opts is not None:
        found.reduceOp = opts.reduceOp
    return found


def _done(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return _create_work_from_future(future)
