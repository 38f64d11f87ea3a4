"""How DDP exchanges buckets of gradients, where that is not by adding them up as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
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


def register(replica: DistributedDataParallel, settings: CommHook, own: Hook | None) -> None:
    """Have DDP exchange gradients by a hook: `own` where the config names a function."""
    hook = own or (_power_sgd(settings) if settings.type == "powerSGD" else _COMPRESSING[settings.type])
    # Without annotations, which DDP compares with types that a module may name as text. What it refuses besides is
    # bfloat16 without NCCL, which gloo has by now.
    replica.register_comm_hook(None, lambda state, bucket: hook(state, bucket))


def _power_sgd(settings: CommHook) -> Hook:
    """Torch's powerSGD. Its error feedback is not saved: a resume begins without it."""
    kept = PowerSGDState(
        process_group=None, matrix_approximation_rank=settings.rank, start_powerSGD_iter=settings.start
    )

    def exchange(_: None, bucket: Any) -> Any:
        found = powerSGD_hook(kept, bucket)
        if dist.get_backend() != "nccl":
            # It exchanges three times per bucket, from the threads of the backend: of two buckets at once, each rank
            # might begin with another.
            found.wait()
        return found

    return exchange
