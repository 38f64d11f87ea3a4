"""lockstep.nn.linear_cross_entropy is the linear layer and the loss that it stands for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lockstep

ROWS = [1, 3, 7, 14, 100]  # of 14: one by one, with a rest, in halves, all, more than there are


def parts(dtype: torch.dtype = torch.float64, bias: bool = True) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 7, 5), (11, 5), *([(11,)] if bias else [])]
    tensors = [torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True) for shape in shapes]
    target = torch.randint(0, 11, (2, 7), generator=generator)
    target[0, 2] = target[1, 5] = -100
    return tensors, target


def both(given: list[Tensor], target: Tensor, rows: int | None, **how: Any) -> list[list[Tensor]]:
    """Loss and gradients by torch's own functions, and by ours."""
    factor = torch.linspace(0.5, 2, target.numel(), dtype=given[0].dtype).view(target.shape)
    found = []
    bias = given[2] if len(given) > 2 else None
    logits = F.linear(given[0], given[1], bias)
    plain = F.cross_entropy(logits.flatten(0, 1), target.flatten(), **how)
    ours = lockstep.nn.linear_cross_entropy(given[0], given[1], target, linear_bias=bias, rows=rows, **how)
    for loss in (plain.view_as(ours), ours):
        total = (loss * factor).sum() if loss.dim() else loss * 3
        found.append([loss.detach(), *torch.autograd.grad(total, given)])
    return found


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_same_loss_and_gradients_as_torch(rows: int, reduction: str) -> None:
    for bias in (True, False):
        for smoothing in (0.0, 0.1):
            expected, found = both(*parts(bias=bias), rows, reduction=reduction, label_smoothing=smoothing)
            for one, other in zip(expected, found, strict=True):
                torch.testing.assert_close(other, one)


def test_has_the_same_bits_in_a_compiled_model() -> None:
    (input, weight), target = parts(bias=False)

    def loss(input: Tensor, weight: Tensor) -> Tensor:
        return lockstep.nn.linear_cross_entropy(input, weight, target, rows=3)

    expected = loss(input, weight)
    found = torch.compile(loss, backend="aot_eager", fullgraph=True)(input, weight)
    assert torch.equal(found, expected)
    for one, other in zip(
        torch.autograd.grad(found * 3, [input, weight]), torch.autograd.grad(expected * 3, [input, weight]), strict=True
    ):
        assert torch.equal(one, other)


def test_under_autocast_products_are_short_and_sums_are_not() -> None:
    given, target = parts(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = both(given, target, 3)
    assert found[0].dtype == torch.float32 and all(each.dtype == torch.float32 for each in found[1:])
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=3e-2, atol=3e-2)
    exact = both(*parts(torch.float64), None)[0]
    assert any(not torch.equal(one.double(), other) for one, other in zip(found, exact, strict=True))


def test_without_gradients_and_with_some_frozen() -> None:
    (input, weight, bias), target = parts()
    with torch.no_grad():
        loss = lockstep.nn.linear_cross_entropy(input, weight, target, linear_bias=bias, rows=4)
    assert not loss.requires_grad
    frozen = weight.detach()
    loss = lockstep.nn.linear_cross_entropy(input, frozen, target, linear_bias=bias, rows=4)
    expected = F.cross_entropy(F.linear(input, frozen, bias).flatten(0, 1), target.flatten())
    torch.testing.assert_close(torch.autograd.grad(loss, input), torch.autograd.grad(expected, input))


def test_never_makes_all_logits() -> None:
    made: list[int] = []

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            made.extend(each.numel() for each in (out if isinstance(out, (tuple, list)) else [out])
                        if isinstance(each, Tensor))  # fmt: skip
            return out

    hidden, weight = torch.randn(64, 4, requires_grad=True), torch.randn(500, 4, requires_grad=True)
    for reduction in ("mean", "none"):
        made.clear()
        with Largest():
            lockstep.nn.linear_cross_entropy(
                hidden, weight, torch.zeros(64, dtype=torch.long), rows=8, reduction=reduction
            ).sum().backward()
        assert max(made) == 8 * 500


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivatives_are_refused(reduction: str) -> None:
    given, target = parts(bias=False)
    loss = lockstep.nn.linear_cross_entropy(*given, target, reduction=reduction).sum()
    with pytest.raises(RuntimeError, match="has no second derivatives"):
        torch.autograd.grad(loss, given, create_graph=True)


@pytest.mark.parametrize(
    ("target", "how", "told"),
    [
        (torch.zeros(3, dtype=torch.long), {}, r"the target must be classes of shape \[2, 7\], got int64\[3\]"),
        (torch.zeros(2, 7), {}, r"got float32\[2, 7\]"),
        (torch.zeros(2, 7, dtype=torch.long), {"reduction": "median"}, "got 'median'"),
        (torch.zeros(2, 7, dtype=torch.long), {"rows": 0}, "at least 1, got 0"),
    ],
)
def test_what_is_refused(target: Tensor, how: dict[str, Any], told: str) -> None:
    (input, weight, _), _ = parts()
    with pytest.raises(ValueError, match=told):
        lockstep.nn.linear_cross_entropy(input, weight, target, **how)
