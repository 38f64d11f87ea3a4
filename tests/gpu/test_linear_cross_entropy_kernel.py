"""The Triton kernel of lockstep.nn.linear_cross_entropy, in a model that is compiled and in one that is not."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.nn import linear_cross_entropy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def found(loss: Any, dtype: torch.dtype, classes: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(3, 100, 64, device="cuda", generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(classes, 64, device="cuda", generator=generator).to(dtype).requires_grad_()
    target = torch.randint(0, classes, (3, 100), device="cuda", generator=generator)
    target[1, ::3] = -100
    value = loss(hidden, weight, target)
    return [value.detach(), *(each.float() for each in torch.autograd.grad(value * 2, [hidden, weight]))]


def in_parts(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, weight, target, rows=128)


def whole(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float().flatten(0, 1), target.flatten())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("classes", [11, 50_304])
def test_as_torch_computes_it(dtype: torch.dtype, classes: int) -> None:
    expected = found(whole, dtype, classes)
    for loss in (in_parts, torch.compile(in_parts, fullgraph=True)):
        for one, other in zip(found(loss, dtype, classes), expected, strict=True):
            assert (one - other).norm() <= 1e-2 * other.norm()
        assert found(loss, dtype, classes)[0].item() == pytest.approx(expected[0].item(), rel=1e-5)


def test_an_ignored_row_that_overflows_changes_nothing() -> None:
    hidden = torch.ones(2, 64, device="cuda", dtype=torch.float16)
    hidden[0] *= 60_000
    hidden.requires_grad_()
    weight = torch.ones(11, 64, device="cuda", dtype=torch.float16, requires_grad=True)
    linear_cross_entropy(hidden, weight, torch.tensor([-100, 3], device="cuda")).backward()
    assert weight.grad is not None and weight.grad.isfinite().all()
    assert hidden.grad is not None and not hidden.grad[0].any()


def test_a_target_that_is_no_class_is_refused() -> None:
    """In a process of its own, which cannot use the GPU after that."""
    program = (
        "import torch, lockstep; ones = torch.ones(4, 8, device='cuda', dtype=torch.bfloat16, requires_grad=True);"
        "lockstep.nn.linear_cross_entropy(ones, ones, torch.tensor([0, 1, 2, 4], device='cuda')).item()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1 and "device-side assert" in ended.stderr
