"""Batches on their way to the device before they are asked for: the same batches, and none is counted early."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # torch's first optimizer imports it, and it sets an environment variable
from torch import nn
from torch.utils.data import Dataset

from lockstep.config.schema import RunSettings
from lockstep.data.batches import GlobalBatches
from lockstep.data.loader import one_ahead
from lockstep.distributed.group import Group
from lockstep.distributed.topology import Topology
from lockstep.engine.engine import Engine
from lockstep.engine.run import Run
from lockstep.engine.stop_requests import StopRequests
from lockstep.record.display import Display
from lockstep.runtime.base import Runtime
from lockstep.runtime.cpu import CpuRuntime
from lockstep.runtime.cuda import CudaRuntime


def test_a_batch_begins_when_the_one_before_is_handed_out_and_the_first_waits_for_none() -> None:
    fetched: list[int] = []
    begun: list[int] = []

    def micros() -> Any:
        for number, micro in enumerate(GlobalBatches(10, 2, shuffle=False).micro_batches(0)):
            fetched.append(number)
            yield micro, number

    def begin(batch: int) -> str:
        begun.append(batch)
        return f"begun {batch}"

    ahead = one_ahead(micros(), begin)
    assert (next(ahead)[1], fetched) == ("begun 0", [0])
    assert (next(ahead)[1], begun) == ("begun 1", [0, 1, 2])
    rest = list(ahead)
    assert [batch for _, batch in rest] == ["begun 2", "begun 3", "begun 4"]
    assert [micro.batch for micro, _ in rest] == [2, 3, 4]
    assert list(one_ahead(iter(()), begin)) == []


class Begun:
    def __init__(self, batch: Any) -> None:
        self.batch = batch


class CopyingCpu(CpuRuntime):
    """The CPU, as if it had to be copied to: what was begun is not the batch yet."""

    copies_ahead = True

    def begin_move(self, batch: Any) -> Any:
        return Begun(batch)

    def move(self, batch: Any) -> Any:
        return batch.batch if isinstance(batch, Begun) else batch


class Rows(Dataset[Any]):
    """Rows that are large enough for a copy of them to take its time."""

    def __init__(self, width: int = 4) -> None:
        self.width = width

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.full((self.width,), float(index)), {"index": torch.tensor(index)}


def walk(run: Run, data: Rows, stop_at: int | None = None) -> list[tuple[list[int], bool]]:
    """The examples of every micro-batch, and whether they are what they should be where they were computed with."""
    model = nn.Linear(1, 1)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=1e-9))
    run.restore()
    seen = []
    for _ in run.epochs(2):
        for rows, more in run.batches(data, 8, accumulate=2):
            assert rows.device == more["index"].device == run.device
            same = (rows * 2 - 2 * more["index"].reshape(-1, 1)).abs().max()  # on the device, after the copy
            run.backward(run.model(rows[:, :1]).mean())
            seen.append((more["index"].tolist(), same))
            del rows, more  # the next copy may be made in the same memory
            run.step()
            if run.progress.step == stop_at and run.completes_batch:
                run.checkpoint()
                return [(each, not same.item()) for each, same in seen]
    return [(each, not same.item()) for each, same in seen]


def new(runtime: Runtime, folder: Path, workers: int) -> Run:
    folder.mkdir(exist_ok=True)
    settings = RunSettings.model_validate({"data": {"workers": workers}, "log": {"every": "1000 steps"}})
    return Run(Engine(Topology(), runtime, Group(0, 1, 10.0), settings, folder, Display(), StopRequests()))


def runtimes() -> list[Any]:
    gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    return [pytest.param(CopyingCpu, 4, id="cpu"), pytest.param(CudaRuntime, 1 << 20, id="cuda", marks=gpu)]


@pytest.mark.parametrize(("runtime", "width"), runtimes())
@pytest.mark.parametrize("workers", [0, 1])
def test_nothing_changes_by_beginning_early_and_a_restart_goes_on_with_the_next_batch(
    runtime: Any, width: int, workers: int, tmp_path: Path
) -> None:
    usual = new(CpuRuntime(), tmp_path / "usual", 0)
    expected = walk(usual, Rows())
    usual._engine.finish()
    found = []
    for stop_at in (3, None):
        made = runtime()
        made.prepare()
        run = new(made, tmp_path / "ahead", workers)
        found += walk(run, Rows(width), stop_at)
        run._engine.finish()
    assert found == expected
    assert all(same for _, same in found)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_is_no_plain_tensor_arrives_too() -> None:
    runtime = CudaRuntime()
    runtime.prepare()
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.zeros(2)])
    given = {
        "pinned": torch.arange(9.0).pin_memory(), "packed": packed, "sparse": torch.eye(3).to_sparse(),
        "there": torch.ones(2, device="cuda"), "text": "as it is", "array": np.ones(2),
    }  # fmt: skip
    found = runtime.move(runtime.begin_move(given))
    assert all(found[name].device.type == "cuda" for name in ("pinned", "sparse", "there"))
    assert found["packed"].data.device.type == "cuda" and found["text"] == "as it is"
    assert torch.equal(found["pinned"].cpu(), given["pinned"]) and found["there"] is given["there"]
