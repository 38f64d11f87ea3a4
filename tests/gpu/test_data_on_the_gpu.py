"""Data that is on the GPU already: tensors, and examples that a dataset makes there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import lockstep

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def epoch_of_each(run: Any) -> list[list[float]]:
    rows = torch.arange(8.0, device=run.device)
    batches = [batch for (batch,) in run.batches(TensorDataset(rows), 4, shuffle=False)]
    batches += list(run.batches(list(rows), 4, shuffle=False))
    return [batch.tolist() for batch in batches if batch.is_cuda]


def test_data_on_the_gpu_stays_there(tmp_path: Any) -> None:
    (found,) = lockstep.launch(epoch_of_each, processes=1, runtime="cuda", out=str(tmp_path))
    assert found == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]] * 2
