"""`precision: fp8`: linear layers whose products are computed in eight bits, where that pays."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.strategy.blocks import find_blocks

logger = logging.getLogger(__name__)

# What the kernels need of both sides of a layer, and of the number of rows that it multiplies.
_MULTIPLE = 16
# With 16,384 rows on an H200, the kernels of such a layer take 0.85 of their time in bf16; of 768 x 3072 weights, 0.95.
_LEAST_WEIGHTS = 2048 * 2048
# The first GPUs that multiply in eight bits: Ada and Hopper.
_CAPABILITY = (8, 9)
# Activations and weights need precision, gradients range.
_VALUES, _SLOPES = torch.float8_e4m3fn, torch.float8_e5m2


def use_float8(model: nn.Module, pattern: str | None, device: torch.device) -> None:
    """Exchanges the large linear layers of a model's blocks; parameters stay the same objects under the same names.

    What is outside of the blocks stays as it is: eight bits cost most in the layer that the loss is computed of. A
    model without blocks has all of its large layers exchanged.
    """
    _check(device)
    blocks = find_blocks(model, pattern)
    layers = [
        module
        for block in list(blocks.values()) or [model]
        for module in block.modules()
        if type(module) is nn.Linear and module is not model
    ]
    large = [layer for layer in layers if _pays(layer)]
    if not large:
        logger.warning(
            "precision: fp8: none of the %d linear layers is large enough for it to pay (both sides multiples of %d, "
            "%d weights): the model is trained in bf16", len(layers), _MULTIPLE, _LEAST_WEIGHTS,
        )  # fmt: skip
        return
    for layer in large:
        layer.__class__ = Float8Linear
    torch.compiler.allow_in_graph(_Product)  # type: ignore[no-untyped-call]
    logger.info(
        "precision: fp8: %d of %d linear layers multiply in eight bits%s", len(large), len(layers),
        "" if device.type == "cuda" else ", which this device imitates: slower than bf16, and only good for trying",
    )  # fmt: skip


class Float8Linear(nn.Linear):
    """A linear layer whose three products, one forward and two backward, have operands of eight bits."""

    def forward(self, input: Tensor) -> Tensor:
        kind = input.device.type
        if torch.is_autocast_enabled(kind):  # as F.linear does it
            input = input.to(torch.get_autocast_dtype(kind))
        rows = input.reshape(-1, input.shape[-1])
        if not len(rows) or len(rows) % _MULTIPLE:  # a batch of another size, as the last one may be
            return F.linear(input, self.weight, self.bias)
        output: Tensor = _Product.apply(rows, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return output.view(*input.shape[:-1], output.shape[-1])


class _Product(torch.autograd.Function):
    """The product with one scale per tensor, computed from the tensor itself: nothing is kept between steps."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        scale, unscale = _scales(rows, _VALUES)
        weight_scale, weight_unscale = _scales(weight, _VALUES)
        short, transposed = _cast_both(rows, scale, _VALUES)
        columns = (weight.float() * weight_scale).to(_VALUES).t()
        output = _multiply(short, columns, unscale, weight_unscale, rows.dtype, fast=True, bias=bias)
        # The weight itself, not its copy in eight bits: fsdp frees the weight until the backward pass.
        ctx.save_for_backward(transposed, unscale, weight, weight_scale, weight_unscale)
        ctx.has_bias = bias is not None
        return output

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise ConfigError("train.precision: fp8 has no second derivatives (create_graph=True): use bf16")
        (slope,) = given
        transposed, unscale, weight, weight_scale, weight_unscale = ctx.saved_tensors
        slope_scale, slope_unscale = _scales(slope, _SLOPES)
        short, short_transposed = _cast_both(slope, slope_scale, _SLOPES)
        of_input = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            columns = _cast_transposed(weight, weight_scale, _VALUES).t()
            of_input = _multiply(short, columns, slope_unscale, weight_unscale, slope.dtype, fast=False)
        if ctx.needs_input_grad[1]:
            of_weight = _multiply(short_transposed, transposed.t(), slope_unscale, unscale, weight.dtype, fast=False)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            of_bias = slope.sum(0)
        return of_input, of_weight, of_bias


def _scales(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the factor that scales the largest value to the largest number of a type, and its inverse.

    The maximum of each row comes first: the compiler fuses it into the kernel that computes the rows.
    """
    largest = values.abs().amax(dim=-1).amax().float().clamp(min=1e-12)
    unscale = largest / torch.finfo(dtype).max
    return unscale.reciprocal(), unscale


def _cast_both(values: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns a matrix in eight bits, and its transpose: the kernels sum along rows that are contiguous."""
    if _is_on_one_gpu(values):
        from lockstep.strategy.float8_kernel import cast_both

        both: tuple[Tensor, Tensor] = cast_both(values.contiguous(), scale, dtype)
        return both
    short = (values.float() * scale).to(dtype)
    return short, short.t().contiguous()


def _cast_transposed(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    if _is_on_one_gpu(values):
        from lockstep.strategy.float8_kernel import cast_transposed

        transposed: Tensor = cast_transposed(values.contiguous(), scale, dtype)
        return transposed
    return (values.float() * scale).to(dtype).t().contiguous()


def _is_on_one_gpu(values: Tensor) -> bool:
    """Returns whether the Triton kernel can cast the tensor: it does not know DTensors."""
    if not values.is_cuda:
        return False
    from torch.distributed.tensor import DTensor

    return not isinstance(values, DTensor)


def _multiply(
    left: Tensor, right: Tensor, left_unscale: Tensor, right_unscale: Tensor, dtype: torch.dtype, fast: bool,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Multiplies two matrices of eight bits. Fast sums have fewer bits, which is good enough in the forward pass."""
    if left.is_cuda:
        added = bias.to(dtype) if bias is not None and dtype != torch.float32 else None
        product = torch._scaled_mm(
            left, right, left_unscale, right_unscale, bias=added, out_dtype=dtype, use_fast_accum=fast
        )
        return product if bias is None or added is not None else product + bias
    with torch.autocast(left.device.type, enabled=False):
        product = ((left.float() @ right.float()) * (left_unscale * right_unscale)).to(dtype)
    return product if bias is None else product + bias.to(dtype)


def _pays(layer: nn.Linear) -> bool:
    sides = (layer.in_features, layer.out_features)
    return sides[0] * sides[1] >= _LEAST_WEIGHTS and all(side % _MULTIPLE == 0 for side in sides)


def _check(device: torch.device) -> None:
    if device.type == "xla":
        raise ConfigError("train.precision: fp8 is for CUDA GPUs, but the runtime is xla: use bf16")
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < _CAPABILITY:
        raise ConfigError(
            f"train.precision: fp8 needs a GPU that multiplies in eight bits (Ada, Hopper or newer, compute capability "
            f"8.9), but {torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}: use bf16"
        )
