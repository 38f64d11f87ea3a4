"""`strategy.offload` on fake tensors: what is kept by the host comes to the device for as long as it is needed there.

To torch a device that is pretended is the host (pretend.py), so that it copies nothing. Copies are made here.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


def install() -> None:
    """For a process that does nothing but plan: it is not taken back."""
    of_the_host: Any = FSDPParam.all_gather_inputs

    def copied(parameter: FSDPParam) -> list[Tensor]:
        return [each.clone() for each in of_the_host.fget(parameter)]

    FSDPParam.all_gather_inputs = property(copied)  # type: ignore[assignment]
