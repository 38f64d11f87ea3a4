"""A group for ranks that share a GPU: what they exchange goes through the memory of the host, by gloo.

NCCL refuses two ranks on one device, and gloo itself can only sum and broadcast what is on one. For trying things out:
copying everything twice is slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.futures import Future

NAME = "lockstep_through_host"


def register() -> str:
    """Make the backend known to torch, once; its name."""
    if NAME.upper() not in vars(dist.Backend):
        dist.Backend.register_backend(NAME, _create, devices=["cuda", "cpu"])
    return NAME


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> ThroughHost:
    return ThroughHost(rank, size, dist.ProcessGroupGloo(store, rank, size, timeout))


class ThroughHost(dist.ProcessGroup):
    """The collectives that fully_shard and DTensor use. Each has ended when its call returns."""

    def __init__(self, rank: int, size: int, gloo: Any) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo = gloo

    def getBackendName(self) -> str:
        return NAME

    @property
    def pg_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    @property
    def group_name(self) -> Any:
        return self.pg_name

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        return self._in_place(tensors, lambda each: self._gloo.allreduce(each, _operation(opts, dist.AllreduceOptions)))

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

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

    def all_gather_single(self, output: Tensor, mine: Tensor, opts: Any = None) -> Any:
        return self._allgather_base(output, mine, opts)  # which is what torch calls it up to 2.12

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

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> Any:
        return self._reduce_scatter_base(output, whole, opts)

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
    """The same operation in the options of another collective."""
    found = kind()
    if opts is not None:
        found.reduceOp = opts.reduceOp
    return found


def _done(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return _create_work_from_future(future)
