"""How DDP exchanges buckets of gradients, where that is not by adding them up as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lockstep.config.strategy import CommHook

# Of DDP: called with a state of its own and a bucket, returns a future of the exchanged gradients.
Hook = Callable[[Any, Any], Any]

_COMPRESSING: dict[str, Hook] = {
    "bf16_compress": default_hooks.bf16_compress_hook,
    "fp16_compress": default_hooks.fp16_compress_hook,
}


def register(replica: DistributedDataParallel, settings: CommHook, own: Hook | None) -> PowerSgd | None:
    """Have DDP exchange gradients by a hook, `own` where the config names a function; the state it keeps, if any."""
    power = PowerSgd(settings) if own is None and settings.type == "powerSGD" else None
    hook = own or (power.exchange if power is not None else _COMPRESSING[settings.type])
    # Without annotations, which DDP compares with types that a module may name as text. What it refuses besides is
    # bfloat16 without NCCL, which gloo has by now.
    replica.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
    return power


class PowerSgd:
    """Torch's powerSGD: gradients travel as products of thin matrices; what that leaves out joins the next step's.

    Every rank has an error of its own to add, which belongs into a checkpoint like everything that goes on.
    """

    def __init__(self, settings: CommHook) -> None:
        self.state = PowerSGDState(
            process_group=None, matrix_approximation_rank=settings.rank, start_powerSGD_iter=settings.start
        )

    def exchange(self, state: None, bucket: Any) -> Any:
        found = powerSGD_hook(self.state, bucket)
        if dist.get_backend() != "nccl":
            # It exchanges three times per bucket, from the threads of the backend: of two buckets at once, each rank
            # might begin with another.
            found.wait()
        return found

    def gathered(self) -> dict[str, Any] | None:
        """All that is to be saved, on rank 0; called by all ranks, one bucket after the other."""
        state = self.state
        everyone: list[list[Tensor]] = [[] for _ in range(dist.get_world_size())]
        for bucket in sorted(state.error_dict):
            mine = state.error_dict[bucket].contiguous()
            for rank in range(len(everyone)):
                # Not a gather, which gloo has no way to do for tensors of a GPU.
                theirs = mine.clone() if rank == dist.get_rank() else torch.empty_like(mine)
                dist.broadcast(theirs, src=rank)
                if dist.get_rank() == 0:
                    everyone[rank].append(theirs.cpu())
        if dist.get_rank() != 0:
            return None
        return {
            "iter": state.iter,
            "rng": state.rng.get_state(),
            "buckets": sorted(state.error_dict),
            "errors": everyone,
            "p": [state.p_memory_dict[bucket].cpu() for bucket in sorted(state.error_dict)],
            "q": [state.q_memory_dict[bucket].cpu() for bucket in sorted(state.error_dict)],
        }

    def load(self, saved: Mapping[str, Any], device: torch.device) -> None:
        """On as many ranks as saved it, each goes on with its own error; on others, all begin without one."""
        state, buckets = self.state, saved["buckets"]
        state.iter = saved["iter"]
        state.rng.set_state(tuple(saved["rng"]))
        if len(saved["errors"]) == dist.get_world_size():
            mine = saved["errors"][dist.get_rank()]
            state.error_dict = {bucket: each.to(device) for bucket, each in zip(buckets, mine, strict=True)}
            state.p_memory_dict = {bucket: each.to(device) for bucket, each in zip(buckets, saved["p"], strict=True)}
            state.q_memory_dict = {bucket: each.to(device) for bucket, each in zip(buckets, saved["q"], strict=True)}
