"""What a GPU does otherwise than the host, done on the host: where fake tensors have to stand for those of a GPU.

Autocast keeps other operations in float32, dropout keeps a mask of bytes, attention never makes its matrix, and
optimizers work on all parameters at once. For a process that does nothing but plan: nothing here is taken back.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

# Operations that autocast computes in float32 on CUDA and leaves as they are on the host (torch 2.9 to 2.13).
_FLOAT32 = [
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "group_norm", "cosine_similarity", "kl_div", "binary_cross_entropy_with_logits", "dist", "renorm", "logsumexp",
]  # fmt: skip
# The same, of operations that take the type of their result.
_FLOAT32_RESULT = ["prod", "prod.dim_int", "cumprod", "cumsum", "sum", "sum.dim_IntList"]

_tracing = False
_kept: list[Any] = []  # a library ends with the object


def _library() -> Any:
    made: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    _kept.append(made)
    return made


def install() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels of torch's are overridden is what is wanted
        _autocast()
        _dropout()
        _attention()
    _optimizers()


def _autocast() -> None:
    library = _library()
    for name in _FLOAT32:
        library.impl(name, _in_float32(_operation(name)), "AutocastCPU", allow_override=True)
    library.impl("cross_entropy_loss", torch.library.fallthrough_kernel, "AutocastCPU")  # its parts decide, on GPUs
    for name in _FLOAT32_RESULT:
        library.impl(name, _to_float32(_operation(name)), "AutocastCPU", allow_override=True)
    for name in ("softmax.int", "log_softmax.int"):
        library.impl(name, _softmax(_operation(name)), "AutocastCPU", allow_override=True)


def _operation(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _in_float32(operation: Any) -> Any:
    def kernel(*arguments: Any, **named: Any) -> Any:
        with _without_autocast():
            return operation(*map(_wide, arguments), **named)

    return kernel


def _to_float32(operation: Any) -> Any:
    def kernel(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
        with _without_autocast():
            if _is_short(tensor) and named.get("dtype") is None:
                named["dtype"] = torch.float32
            return operation(tensor, *arguments, **named)

    return kernel


def _softmax(operation: Any) -> Any:
    def kernel(tensor: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        with _without_autocast():
            if not _is_short(tensor) or dtype is not None:
                return operation(tensor, dim, dtype)
            if _tracing:
                return operation(tensor, dim, torch.float32)
            return _Wider.apply(tensor)  # type: ignore[no-untyped-call]

    return kernel


class _Wider(torch.autograd.Function):
    """A softmax in float32 of shorter numbers: one kernel, without a copy of them on the way, there and back.

    Only sizes matter here: fake tensors have no values.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.dtype = tensor.dtype
        made = tensor.new_empty(tensor.shape, dtype=torch.float32)
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _ = ctx.saved_tensors
        return gradient.new_empty(gradient.shape, dtype=ctx.dtype)


@contextlib.contextmanager
def for_kernels() -> Iterator[None]:
    """While torch traces what is to be compiled, operations are what they are: kernels are made of their parts."""
    global _tracing
    _tracing = True
    try:
        yield
    finally:
        _tracing = False


def _without_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def _wide(value: Any) -> Any:
    return value.float() if _is_short(value) else value


def _is_short(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _dropout() -> None:
    """By the operation that GPUs have for it, which keeps a mask of one byte per number."""
    library = _library()

    def dropout(tensor: Tensor, p: float, train: bool) -> Tensor:
        return torch.ops.aten.native_dropout(tensor, p, True)[0] if train and p > 0 else tensor

    library.impl("dropout", dropout, "AutogradCPU", allow_override=True)


def _attention() -> None:
    """Always by a kernel that keeps what it was given, its result and a number per row."""
    library = _library()

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        given = [each.unsqueeze(0) if each.dim() == 3 else each for each in (query, key, value)]
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *given, 0.0, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
        return out.squeeze(0) if query.dim() == 3 else out

    library.impl("scaled_dot_product_attention", attention, "AutogradCPU", allow_override=True)
    from torch.utils import flop_counter

    forward: Any = flop_counter.sdpa_flop_count
    backward: Any = flop_counter.sdpa_backward_flop_count
    flop_counter.flop_registry |= {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
            lambda query, key, value, *_, out_val=None, **__: forward(query.shape, key.shape, value.shape)
        ),
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            lambda grad, query, key, value, *_, out_val=None, **__: backward(
                grad.shape, query.shape, key.shape, value.shape
            )
        ),
    }


def _optimizers() -> None:
    """Torch's optimizers take all parameters at once on GPUs, which needs room for a copy of them on the way."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for module in (optimizer, _foreach_utils):
        if hasattr(module, "_get_foreach_kernels_supported_devices"):
            setattr(module, "_get_foreach_kernels_supported_devices", lambda: ["cuda", "cpu"])  # noqa: B010
    optimizer._foreach_supported_types.append(FakeTensor)
