"""The ddp strategy gives torch's wrapper what it needs, on the CPU and on a GPU."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import bodies
import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.config.strategy import Strategy
from lockstep.runtime.cuda import CudaRuntime
from lockstep.strategy.ddp import DdpStrategy


@pytest.mark.requirement("D02")
def test_on_the_cpu_no_device_is_named_and_options_are_honoured(tmp_path: Path) -> None:
    strategy = {"type": "ddp", "find_unused_parameters": True, "bucket_mb": 7}
    found = lockstep.launch(bodies.half_used, processes=2, runtime="cpu", out=tmp_path, strategy=strategy)
    for each in found:
        assert each["device_ids"] is None
        assert each["find_unused_parameters"] is True
        assert each["bucket_bytes"] == 7 * 1024 * 1024
        assert each["parameter_devices"] == ["cpu"]
        assert each["steps"] == 5


@pytest.mark.requirement("D02")
def test_a_parameter_without_a_gradient_is_an_error_unless_it_is_looked_for(tmp_path: Path) -> None:
    with pytest.raises(
        lockstep.WorkerFailed, match=r"unused\.weight, unused\.bias: no gradient on rank \d in the step before"
    ):
        lockstep.launch(bodies.half_used, processes=2, runtime="cpu", out=tmp_path)


@pytest.fixture
def one_rank_of_nccl() -> Iterator[None]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.requirement("D02")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_device_is_named_by_its_number(one_rank_of_nccl: None) -> None:
    runtime = CudaRuntime(0)
    runtime.prepare()
    wrapped = DdpStrategy(runtime, Strategy(type="ddp", output_device=0)).place(nn.Linear(2, 2))
    assert wrapped.device_ids == [0]
    assert wrapped.output_device == 0
    assert next(wrapped.parameters()).device == torch.device("cuda", 0)
