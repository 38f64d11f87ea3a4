"""A linear layer and the cross entropy of what it returns, some rows at a time.

With a large vocabulary the logits are by far the largest tensor of a step, and their gradient is as large. Here neither
is ever there as a whole: the gradients of a few rows are worked out while their logits are there. Torch has the same
from 2.13 on, but not for compiled models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK_BYTES = 2**30  # what the logits of the current rows may take
_SHORT = (torch.bfloat16, torch.float16)  # whose gradients a product takes in the same type
_REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    rows: int | None = None,
) -> Tensor:
    """`F.cross_entropy(F.linear(input, linear_weight, linear_bias), target, ...)`, without the logits in memory.

    `input` is [..., features] and `target` [...] has classes. `rows` are worked on at a time; where it is not given, as
    many as keep their logits within a gigabyte. With `reduction="none"` the logits are computed again in the backward
    pass; a sum or a mean needs no second time.
    """
    if reduction not in _REDUCTIONS:
        raise ValueError(f"linear_cross_entropy: reduction must be mean, sum or none, got {reduction!r}")
    if input.shape[:-1] != target.shape or target.is_floating_point():
        raise ValueError(
            f"linear_cross_entropy: for an input of shape {list(input.shape)} the target must be classes of shape "
            f"{list(input.shape[:-1])}, got {str(target.dtype).removeprefix('torch.')}{list(target.shape)}"
        )
    if rows is not None and rows < 1:
        raise ValueError(f"linear_cross_entropy: rows must be at least 1, got {rows}")
    kind = input.device.type
    if torch.is_autocast_enabled(kind):  # as F.linear does it
        short = torch.get_autocast_dtype(kind)
        input, linear_weight = input.to(short), linear_weight.to(short)
        linear_bias = None if linear_bias is None else linear_bias.to(short)
    flat, labels = input.reshape(-1, input.shape[-1]), target.reshape(-1)
    with torch.autocast(kind, enabled=False):
        if reduction == "none":
            losses: Tensor = _Losses.apply(  # type: ignore[no-untyped-call]
                flat, linear_weight, linear_bias, labels, ignore_index, label_smoothing, rows or 0
            )
            return losses.view(target.shape)
        total: Tensor = _Total.apply(  # type: ignore[no-untyped-call]
            flat, linear_weight, linear_bias, labels, ignore_index, label_smoothing, rows or 0, torch.is_grad_enabled()
        )
        return total / (labels != ignore_index).sum() if reduction == "mean" else total


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What sums of many numbers of a type are kept in."""
    return torch.promote_types(dtype, torch.float32)


def _log_probabilities(flat: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = F.linear(flat, weight, bias)
    return torch.log_softmax(logits, dim=1, dtype=_wide(logits.dtype))


def _losses(log_probabilities: Tensor, labels: Tensor, ignore_index: int, smoothing: float) -> Tensor:
    losses = F.nll_loss(log_probabilities, labels, reduction="none", ignore_index=ignore_index)
    if not smoothing:
        return losses
    spread = torch.where(labels == ignore_index, 0.0, log_probabilities.mean(dim=1))
    return (1 - smoothing) * losses - smoothing * spread


def _slope(log_probabilities: Tensor, labels: Tensor, ignore_index: int, smoothing: float) -> Tensor:
    """Returns each row's gradient with respect to its logits, in the memory of the argument; ignored rows have any."""
    places = torch.where(labels == ignore_index, 0, labels).unsqueeze(1)
    slope = log_probabilities.exp_()
    if smoothing:
        slope.sub_(smoothing / slope.shape[1])
    return slope.scatter_add_(1, places, torch.full_like(places, smoothing - 1.0, dtype=slope.dtype))


class _Gradients:
    """The gradients of the layer's input, weight and bias, as rows are added; None where nobody asks."""

    def __init__(self, flat: Tensor, weight: Tensor, bias: Tensor | None, wanted: Sequence[bool]) -> None:
        self._flat, self._weight, self._bias = flat, weight, bias
        self._of_input: list[Tensor] = []
        self._wants_input = wanted[0]
        # Sums of many short numbers: in float32, as a single product would have it.
        self._of_weight = torch.zeros_like(weight, dtype=_wide(weight.dtype)) if wanted[1] else None
        self._of_bias = torch.zeros_like(bias, dtype=_wide(bias.dtype)) if bias is not None and wanted[2] else None

    def add(self, rows: slice, slope: Tensor, factors: Tensor) -> None:
        """Adds some rows. Their factors go to the narrow sides of the products, not to the wide slope."""
        short, columns = slope.to(self._flat.dtype), factors.unsqueeze(1)
        if self._wants_input:
            self._of_input.append((short @ self._weight * columns).to(self._flat.dtype))
        if self._of_weight is not None:
            inputs = (self._flat[rows] * columns).to(self._flat.dtype)
            if short.is_cuda and short.dtype in _SHORT and not torch.compiler.is_compiling():
                # Added up by the product itself.
                torch.addmm(self._of_weight, short.t(), inputs, out_dtype=torch.float32, out=self._of_weight)
            else:
                self._of_weight += short.t() @ inputs
        if self._of_bias is not None:
            self._of_bias += factors @ slope

    def read(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        of_input = torch.cat([self._flat[:0], *self._of_input]) if self._wants_input else None
        of_weight = None if self._of_weight is None else self._of_weight.to(self._weight.dtype)
        of_bias = None if self._of_bias is None or self._bias is None else self._of_bias.to(self._bias.dtype)
        return of_input, of_weight, of_bias


def _chunks(flat: Tensor, weight: Tensor, rows: int, number_bytes: int = 4) -> list[slice]:
    """Returns which rows are worked on together: so many or, for 0, as many as keep their logits within a gigabyte."""
    length, rows = len(flat), rows or max(_CHUNK_BYTES // (number_bytes * len(weight)), 1)
    return [slice(start, min(start + rows, length)) for start in range(0, length, rows)]


def _sum(
    flat: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignore_index: int, smoothing: float, rows: int,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Returns the sum of all losses, and its gradients as far as they are wanted."""
    gradients = _Gradients(flat, weight, bias, wanted)
    total = torch.zeros((), dtype=_wide(flat.dtype), device=flat.device)
    kernel = _kernel(flat) if any(wanted) and not smoothing and bias is None else None
    for chunk in _chunks(flat, weight, rows, 4 if kernel is None else flat.element_size()):
        targets = labels[chunk]
        if kernel is not None:
            slope = F.linear(flat[chunk], weight)
            losses = kernel(slope, targets, ignore_index)
        else:
            log_probabilities = _log_probabilities(flat[chunk], weight, bias)
            losses = _losses(log_probabilities, targets, ignore_index, smoothing)
            slope = _slope(log_probabilities, targets, ignore_index, smoothing) if any(wanted) else log_probabilities
        total = total + losses.sum()
        if any(wanted):
            gradients.add(chunk, slope, (targets != ignore_index).to(total.dtype))
    return total, *gradients.read()


def _kernel(flat: Tensor) -> Callable[[Tensor, Tensor, int], Tensor] | None:
    """Returns the kernel for tensors of a GPU; for none that only have a shape (`lockstep plan`)."""
    if flat.device.type != "cuda" or type(flat) is not Tensor or flat.dtype not in _SHORT:
        return None
    try:
        from lockstep.nn.cross_entropy_kernel import losses_and_slopes
    except ImportError:  # torch for a GPU comes with Triton on Linux alone
        return None
    return losses_and_slopes


@torch.library.custom_op("lockstep::linear_cross_entropy_sum", mutates_args=())
def _compiled_sum(
    flat: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignore_index: int, smoothing: float, rows: int,
    wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    """One operation in a compiled graph. Inductor would keep the products of all chunks until it adds them up."""
    found = _sum(flat, weight, bias, labels, ignore_index, smoothing, rows, wanted)
    return [flat.new_empty(0) if each is None else each for each in found]


@_compiled_sum.register_fake
def _(
    flat: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignore_index: int, smoothing: float, rows: int,
    wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    total, nothing = flat.new_empty((), dtype=_wide(flat.dtype)), flat.new_empty(0)
    return [
        total,
        flat.new_empty(flat.shape) if wanted[0] else nothing,
        torch.empty_like(weight) if wanted[1] else nothing,
        torch.empty_like(bias) if bias is not None and wanted[2] else nothing,
    ]


def _refuse_second_derivatives() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "linear_cross_entropy has no second derivatives (create_graph=True): use "
            "torch.nn.functional.cross_entropy(torch.nn.functional.linear(...), ...) there"
        )


class _Total(torch.autograd.Function):
    """The sum of all losses. Its gradient is known up to a factor as soon as it is: it is worked out at once."""

    @staticmethod
    def forward(
        ctx: Any, flat: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignore_index: int,
        smoothing: float, rows: int, learns: bool,
    ) -> Tensor:  # fmt: skip
        ctx.wanted = [learns and each for each in ctx.needs_input_grad[:3]]
        work = _compiled_sum if torch.compiler.is_compiling() else _sum
        total, *gradients = work(flat, weight, bias, labels, ignore_index, smoothing, rows, ctx.wanted)
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        _refuse_second_derivatives()
        (factor,) = given
        gradients = (
            each * factor.to(each.dtype) if wants else None
            for each, wants in zip(ctx.saved_tensors, ctx.wanted, strict=True)
        )
        return *gradients, None, None, None, None, None


class _Losses(torch.autograd.Function):
    """Every row's own loss: what each counts for is known in the backward pass only, which computes its logits anew."""

    @staticmethod
    def forward(
        ctx: Any, flat: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignore_index: int,
        smoothing: float, rows: int,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(flat, weight, bias, labels)
        ctx.how = (ignore_index, smoothing, rows)
        losses = [
            _losses(_log_probabilities(flat[chunk], weight, bias), labels[chunk], ignore_index, smoothing)
            for chunk in _chunks(flat, weight, rows)
        ]
        return torch.cat(losses) if losses else flat.new_zeros(0, dtype=_wide(flat.dtype))

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        _refuse_second_derivatives()
        (factors,) = given
        flat, weight, bias, labels = ctx.saved_tensors
        ignore_index, smoothing, rows = ctx.how
        gradients = _Gradients(flat, weight, bias, ctx.needs_input_grad[:3])
        for chunk in _chunks(flat, weight, rows):
            slope = _slope(_log_probabilities(flat[chunk], weight, bias), labels[chunk], ignore_index, smoothing)
            gradients.add(chunk, slope, torch.where(labels[chunk] == ignore_index, 0.0, factors[chunk]))
        return *gradients.read(), None, None, None, None
