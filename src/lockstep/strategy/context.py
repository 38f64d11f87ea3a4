"""Context parallel: ranks along the axis `context` each compute a part of every sequence.

Blocks see a part of it; what is outside of them sees all of it, on every one of these ranks. Attention within a block
gathers keys and values. Everything else must work on each position by itself, which is tried before a block of each
kind is computed for the first time.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode

from lockstep.distributed.activity import Activity
from lockstep.errors import ConfigError
from lockstep.runtime.moving import map_tensors
from lockstep.strategy.blocks import Forward, first_line, wrap_forward
from lockstep.strategy.slices import local_part

_AXIS = "strategy.mesh: context"
# How far the outputs of a block may be apart, relative to the largest: rounding.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_TOLERANCE_OF_HALF = 5e-2
_CONTIGUOUS = torch.contiguous_format
_NO_GRAPH = (torch.Tag.cudagraph_unsafe,)  # a recorded CUDA graph would not exchange anything
_numbers = itertools.count()
CONTEXTS: weakref.WeakValueDictionary[int, Context] = weakref.WeakValueDictionary()


def split_sequences(model: nn.Module, blocks: Mapping[str, nn.Module], mesh: DeviceMesh, activity: Activity) -> None:
    """Lets the blocks of a model compute this rank's part of every sequence."""
    stacks = {(name.rpartition(".")[0], type(block)) for name, block in blocks.items()}
    if len(stacks) != 1:
        found = ", ".join(sorted(f"{name} ({kind.__name__})" for name, kind in stacks)) or "none"
        raise ConfigError(
            f"{_AXIS}: sequences are split within one stack of blocks of one class, and {type(model).__name__} has "
            f"{found}. Name its blocks by strategy.blocks, or remove the axis"
        )
    wrap_forward(blocks.values(), functools.partial(_split, Context(blocks, mesh, activity)))


class Context:
    """The ranks that have the parts of a sequence, in order, and the blocks that compute them."""

    def __init__(self, blocks: Mapping[str, nn.Module], mesh: DeviceMesh, activity: Activity) -> None:
        self.group, self.size, self.rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()
        self.names = {id(block): f"{name} ({type(block).__name__})" for name, block in blocks.items()}
        self.first, self.last = next(iter(self.names)), next(reversed(self.names))
        self._activity = activity
        self.number = next(_numbers)
        CONTEXTS[self.number] = self
        self.length = 0  # of a whole sequence
        self._kinds = {id(block): _kind_of(block, number) for number, block in enumerate(blocks.values())}
        self._tried: set[tuple[str, bool]] = set()
        self.attends = False

    def is_untried(self, module: nn.Module) -> bool:
        """Whether no block of this kind was tried in training, or in evaluation: dropout shows in training alone."""
        before = len(self._tried)
        self._tried.add((self._kinds[id(module)], module.training))
        return len(self._tried) > before

    def begin(self, whole: Tensor) -> None:
        self.length = whole.size(1)
        if self.length % self.size:
            raise ConfigError(
                f"{_AXIS} {self.size}: sequences of {self.length} tokens cannot be divided among {self.size} ranks: "
                f"pad them, or cut them to {self.length - self.length % self.size}"
            )

    def part_of(self, tensor: Tensor, dim: int) -> Tensor:
        """Returns this rank's part of the sequence."""
        length = tensor.size(dim) // self.size
        return tensor.narrow(dim, self.rank * length, length)

    def gather(self, part: Tensor, dim: int) -> Tensor:
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.size)]
        with self._activity.within("the parts of a sequence", waits=True):
            dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim)

    def causal_mask(self, length: int, end: int, device: torch.device) -> Any:
        """Returns the mask of the last of so many positions."""
        if device.type == "cuda" and not torch.compiler.is_compiling():
            return causal_lower_right(length, end)  # no mask in memory; torch cannot compile it
        return torch.ones(length, end, dtype=torch.bool, device=device).tril(end - length)

    def add_up(self, tensor: Tensor) -> Tensor:
        with self._activity.within("the gradients of keys and values", waits=True):
            dist.all_reduce(tensor := tensor.contiguous(), group=self.group)
        return tensor


def _kind_of(block: nn.Module, number: int) -> str:
    """Returns the layers and settings of a block as text; without numbers that count blocks, which tell nothing."""
    settings = [
        (name, key, value) for name, part in block.named_modules() for key, value in sorted(vars(part).items())
        if isinstance(value, (bool, int, float, str)) and key != "training"
        and not (type(value) is int and value in (number, number + 1))
    ]  # fmt: skip
    return f"{block!r} {settings}"


# Gradients are averaged over all ranks afterwards, as those of ranks with other rows are. So within blocks they are so
# many times as large as there are ranks along the axis: the sum over parts of the sequence is what the mean returns.


class _Part(torch.autograd.Function):
    """A whole sequence, the same on all ranks, becomes this rank's part."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, context: Context) -> Tensor:
        ctx.context = context
        return context.part_of(whole, 1).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.context.gather(gradient, 1) / ctx.context.size, None


class _Whole(torch.autograd.Function):
    """This rank's part becomes the whole sequence, the same on all ranks, which compute the same gradient of it."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, context: Context) -> Tensor:
        ctx.context = context
        return context.gather(part, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.context.part_of(gradient, 1) * ctx.context.size, None


# Keys or values of all parts, of which every rank computes another gradient. As operators of torch, its compiler calls
# them as they are. It looks up what they return by their arguments, which therefore have the number of ranks.


@torch.library.custom_op("lockstep::gather_parts", mutates_args=(), tags=_NO_GRAPH)
def _gather(part: Tensor, context: int, size: int) -> Tensor:
    return CONTEXTS[context].gather(part, -2)


@torch.library.custom_op("lockstep::add_up_parts", mutates_args=(), tags=_NO_GRAPH)
def _add_up(gradient: Tensor, context: int, size: int) -> Tensor:
    return CONTEXTS[context].part_of(CONTEXTS[context].add_up(gradient), -2).clone(memory_format=_CONTIGUOUS)


@_gather.register_fake
def _like_whole(part: Tensor, context: int, size: int) -> Tensor:
    return torch.cat([part.contiguous()] * size, -2)


@_add_up.register_fake
def _like_part(gradient: Tensor, context: int, size: int) -> Tensor:
    return gradient.narrow(-2, 0, gradient.size(-2) // size).clone(memory_format=_CONTIGUOUS)


def _keep(ctx: Any, inputs: tuple[Tensor, int, int], output: Tensor) -> None:
    ctx.context = inputs[1:]


_gather.register_autograd(lambda ctx, gradient: (_add_up(gradient, *ctx.context), None, None), setup_context=_keep)


class _Attention(TorchFunctionMode):
    """Within, attention is over the whole sequence."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context, self.was_used = context, False

    def __torch_function__(
        self, function: Any, types: Any, inputs: Any = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        if function is not F.scaled_dot_product_attention:
            return function(*inputs, **(named or {}))
        self.was_used = True
        return self._attend(*inputs, **(named or {}))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, **options: Any,
    ) -> Tensor:  # fmt: skip
        if dropout_p:
            raise ConfigError(f"{_AXIS}: attention with dropout ({dropout_p}) cannot be split: set it to 0")
        context, length = self._context, query.size(-2)
        key, value = (_gather(each, context.number, context.size) for each in (key, value))
        if is_causal:
            end = (context.rank + 1) * length  # later ones are not looked at
            key, value = key[..., :end, :], value[..., :end, :]
            attn_mask = context.causal_mask(length, end, query.device)
        elif attn_mask is not None and attn_mask.size(-2) == context.length:
            attn_mask = context.part_of(attn_mask, -2)
        elif attn_mask is not None and attn_mask.size(-2) not in (1, length):  # the latter if it is cut already
            raise ConfigError(
                f"{_AXIS}: an attention mask of shape {list(attn_mask.shape)} does not fit sequences of "
                f"{context.length} tokens: it needs that many rows, or one"
            )
        return F.scaled_dot_product_attention(query, key, value, attn_mask, **options)


def _split(context: Context, forward: Forward) -> Forward:
    @functools.wraps(forward)
    def computed(module: nn.Module, hidden: Tensor, *inputs: Any, **named: Any) -> Any:
        named = {name: None if name.startswith("past_key_value") else each for name, each in named.items()}
        is_first = id(module) == context.first
        if is_first:
            context.begin(hidden)
        if not isinstance(hidden, FakeTensor) and context.is_untried(module):
            whole = hidden.detach() if is_first else context.gather(hidden.detach(), 1)
            _try(context, forward, module, whole, inputs, named)
        if is_first:
            hidden = _Part.apply(hidden, context)  # type: ignore[no-untyped-call]
        output = _on_part(context, forward, module, hidden, inputs, named)
        return _first_of(output, lambda each: _Whole.apply(each, context)) if id(module) == context.last else output  # type: ignore[no-untyped-call]

    return computed


def _on_part(
    context: Context, forward: Forward, module: nn.Module, hidden: Tensor, inputs: Any, named: Mapping[str, Any]
) -> Any:
    if hidden.size(1) * context.size != context.length:
        raise ConfigError(
            f"{_AXIS}: {context.names[id(module)]} got {hidden.size(1)} positions, where a part of the sequence has "
            f"{context.length // context.size}: blocks have to be called one after the other, the first one first"
        )

    def part(each: Tensor) -> Tensor:  # positions, their sines and cosines, a mask of tokens: what has a row for each
        if each.dim() == 2 and each.size(0) == each.size(1) and (each.dtype == torch.bool or each.is_floating_point()):
            return each  # a mask, whose rows are cut where attention gets it
        return context.part_of(each, 1) if 1 < each.dim() < 4 and each.size(1) == context.length else each

    with _Attention(context) as attention:
        output = forward(module, hidden, *map_tensors(part, inputs), **map_tensors(part, dict(named)))
    context.attends = context.attends or attention.was_used
    is_planned = isinstance(hidden, FakeTensor)  # which traces blocks that are alike once
    if not attention.was_used and not (is_planned and context.attends):
        raise ConfigError(
            f"{_AXIS}: {context.names[id(module)]} does not call "
            "torch.nn.functional.scaled_dot_product_attention, so its positions would see a part of the sequence "
            'alone. Use that function for attention (attn_implementation="sdpa" in transformers)'
        )
    return output


def _tolerance(output: Tensor) -> float:
    """How far outputs of a block may be apart by rounding: autocast rounds more than their type shows."""
    kind, dtype = output.device.type, output.dtype
    if torch.is_autocast_enabled(kind) and dtype == torch.float32:
        dtype = torch.get_autocast_dtype(kind)
    return _TOLERANCE.get(dtype, _TOLERANCE_OF_HALF)


def _try(
    context: Context, forward: Forward, module: nn.Module, hidden: Tensor, inputs: Any, named: Mapping[str, Any]
) -> None:
    """Refuses a block whose output is another one where sequences are split, or which draws random numbers."""
    name = context.names[id(module)]
    gpu = [hidden.device] if hidden.device.type == "cuda" else []

    def random_states() -> list[list[int]]:
        return [torch.get_rng_state().tolist(), *(torch.cuda.get_rng_state(each).tolist() for each in gpu)]

    def computed_on_part() -> Any:
        try:
            return _on_part(context, forward, module, context.part_of(hidden, 1), inputs, named)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, AssertionError, ValueError, IndexError) as error:
            raise ConfigError(
                f"{_AXIS}: {name} cannot be computed on a part of a sequence: {first_line(error)}. "
                "What it is given for each position needs shape [batch, positions, ...], which is cut; a mask of "
                "keys shape [batch, 1, 1, positions], which is not"
            ) from error

    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        if module.training:
            with torch.random.fork_rng(gpu):
                before = random_states()
                computed_on_part()
                drew = random_states() != before
            if drew or any(isinstance(each, nn.Dropout) and each.p and each.training for each in module.modules()):
                raise ConfigError(
                    f"{_AXIS}: {name} draws random numbers (dropout), of which each rank would have "
                    "the same for its part of the sequence: set dropout to 0, or remove the axis"
                )
        with _in_evaluation(module), _nothing_hidden(module):
            part = computed_on_part()
            joined = context.gather(part[0] if isinstance(part, tuple) else part, 1)
            whole = forward(module, hidden, *inputs, **named)
            whole = whole[0] if isinstance(whole, tuple) else whole
    apart = float((joined - whole).abs().max() / whole.abs().max().clamp_min(1e-30))
    if not apart <= _tolerance(whole):
        raise ConfigError(
            f"{_AXIS}: {name} computes something else from parts of a sequence than from all of it "
            f"(by {apart:.1e} of the largest value): besides attention, each position must be computed by itself. A "
            "convolution over positions, or positions counted within the block, cannot be split"
        )


@contextlib.contextmanager
def _nothing_hidden(module: nn.Module) -> Iterator[None]:
    """Where a layer begins with zeros, what comes before it would not show: within, it has other weights."""
    zeros = [part for each in module.parameters() if (part := local_part(each)).numel() and not part.any()]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for each in zeros:
            each.copy_(torch.randn(each.shape, dtype=torch.float32) * 0.1)
    try:
        yield
    finally:
        for each in zeros:
            each.zero_()


@contextlib.contextmanager
def _in_evaluation(module: nn.Module) -> Iterator[None]:
    trained = [each for each in module.modules() if each.training]
    module.eval()
    try:
        yield
    finally:
        for each in trained:
            each.training = True


def _first_of(output: Any, change: Callable[[Tensor], Any]) -> Any:
    """Changes an output, or the first of several: what flows from block to block."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)
