"""What a GPU does otherwise than the host, done on the host: where fake tensors have to stand for those of a GPU.

Autocast keeps other operations in float32, dropout keeps a mask of bytes, attention never makes its matrix, and
optimizers work on all parameters at once. For a process that does nothing but plan: nothing here is taken back.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.nn.utils import stateless
from torch.utils import _pytree
from torch.utils.flop_counter import flop_registry

from lockstep.config.training import Compile
from lockstep.engine import setup
from lockstep.planner.ledger import Ledger
from lockstep.strategy import activation_checkpointing
from lockstep.strategy.blocks import Forward, find_blocks, wrap_forward

# Operations that autocast computes in float32 on CUDA and leaves as they are on the host (torch 2.9 to 2.13).
_FLOAT32 = [
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "group_norm", "cosine_similarity", "kl_div", "binary_cross_entropy_with_logits", "dist", "renorm", "logsumexp",
]  # fmt: skip
# The same, of operations that take the type of their result.
_FLOAT32_RESULT = ["prod", "prod.dim_int", "cumprod", "cumsum", "sum", "sum.dim_IntList"]

_kept: list[Any] = []  # a library ends with the object


def install() -> None:
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    _kept.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels of torch's are overridden is what is wanted
        _autocast(library)
        _dropout(library)
        _attention(library)
    _loss_in_parts()
    _optimizers()


def _autocast(library: Any) -> None:
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
            return operation(*(each.float() if _is_short(each) else each for each in arguments), **named)

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
            return operation(tensor, dim, torch.float32 if dtype is None and _is_short(tensor) else dtype)

    return kernel


def _without_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def _is_short(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _dropout(library: Any) -> None:
    """The GPU operation, which keeps a mask of one byte per number."""

    def dropout(tensor: Tensor, p: float, train: bool) -> Tensor:
        return torch.ops.aten.native_dropout(tensor, p, True)[0] if train and p > 0 else tensor

    library.impl("dropout", dropout, "AutogradCPU", allow_override=True)


def _attention(library: Any) -> None:
    """A kernel that keeps its inputs, its result and a number per row."""

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


def _loss_in_parts() -> None:
    """The kernel of lockstep.nn.linear_cross_entropy, which turns logits into their gradients where they are."""
    module = importlib.import_module("lockstep.nn.linear_cross_entropy")
    setattr(module, "_kernel", lambda flat: _losses if _is_short(flat) else None)  # noqa: B010


def _losses(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    return torch.empty(len(labels), dtype=torch.float32, device=logits.device)


def _optimizers() -> None:
    """On GPUs torch's optimizers use foreach, which needs a temporary copy of the parameters."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for module in (optimizer, _foreach_utils):
        if hasattr(module, "_get_foreach_kernels_supported_devices"):
            setattr(module, "_get_foreach_kernels_supported_devices", lambda: ["cuda", "cpu"])  # noqa: B010
    optimizer._foreach_supported_types.append(FakeTensor)


def install_masks(ledger: Ledger) -> None:
    """Lets models of transformers do without a mask where the batch has no positions, which they look for by values."""
    masking: Any = sys.modules.get("transformers.masking_utils")
    find = getattr(masking, "find_packed_sequence_indices", None)
    if find is not None:
        masking.find_packed_sequence_indices = lambda positions: (
            find(positions) if ledger.is_of_batch(positions) else None
        )


_ATEN = torch.ops.aten
# Not of single numbers, and yet read where they are needed: inductor makes them parts of other kernels.
_READ_IN_PLACE = {
    _ATEN.embedding.default, _ATEN.full.default, _ATEN.arange.start_step, _ATEN.gather.default,
    _ATEN.index.Tensor, _ATEN.clone.default, torch.ops.prims.convert_element_type.default, torch.ops.prims.iota.default,
    _ATEN.constant_pad_nd.default, _ATEN.scatter.value,
}  # fmt: skip


def install_compile(ledger: Ledger) -> None:
    """Makes `run.setup` walk the graphs of what it would compile. This cannot be undone."""
    left: list[tuple[nn.Module, str, str | None, Any]] = []

    def checkpoint_activations(model: nn.Module, which: str, pattern: str | None, runtime: Any, compiled: bool) -> None:
        if compiled:  # around what is compiled: the other way round, the two passes would be taken for one
            left.append((model, which, pattern, runtime))
        else:
            activation_checkpointing.checkpoint_activations(model, which, pattern, runtime, compiled)

    def compile_blocks(model: nn.Module, pattern: str | None, how: Compile, apart: bool = True) -> None:
        blocks = find_blocks(model, pattern) if apart else {}
        wrap_forward(blocks.values() if blocks else [model], lambda forward: _walked(forward, ledger))
        while left:
            activation_checkpointing.checkpoint_activations(*left.pop(), False)

    def compile_whole(model: nn.Module, recomputed: bool, how: Compile) -> None:
        compile_blocks(model, None, how) if recomputed else wrap_forward(
            [model], lambda forward: _walked(forward, ledger)
        )

    names = {
        "checkpoint_activations": checkpoint_activations,
        "compile_blocks": compile_blocks,
        "compile_whole": compile_whole,
    }
    for name, instead in names.items():
        setattr(setup, name, instead)


def _walked(forward: Forward, ledger: Ledger) -> Forward:
    made: dict[Any, Callable[..., Any]] = {}

    def instead(module: nn.Module, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(module, *inputs, **named)
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        leaves, structure = _pytree.tree_flatten((inputs, named))
        at = [number for number, each in enumerate(leaves) if isinstance(each, Tensor)]
        tensors = [*state.values(), *(leaves[number] for number in at)]
        key = (
            tuple(state),
            tuple((tuple(each.shape), each.dtype, each.requires_grad) for each in tensors),
            str(structure),
        )
        if key not in made:
            made[key] = _traced(forward, module, list(state), leaves, at, structure, ledger)
            # Hooks, so that what is saved for a backward pass that never comes is kept out of a checkpointed block.
            with ledger.during("paused"), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
                made[key](*tensors)
        return made[key](*tensors)

    return instead


def _traced(
    forward: Forward, module: nn.Module, names: list[str], leaves: list[Any], at: list[int], structure: Any,
    ledger: Ledger,
) -> Callable[..., Any]:  # fmt: skip
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor import lowering  # noqa: F401  # some decompositions ask it, and do not import it
    from torch._inductor.decomposition import select_decomp_table

    others = [None if number in set(at) else each for number, each in enumerate(leaves)]

    def functional(*tensors: Tensor) -> Any:
        state = dict(zip(names, tensors, strict=False))
        given = list(others)
        for number, each in zip(at, tensors[len(names) :], strict=True):
            given[number] = each
        inputs, named = _pytree.tree_unflatten(given, structure)
        with stateless._reparametrize_module(module, state, tie_weights=True):
            return forward(module, *inputs, **named)

    def compiler(graph: fx.GraphModule, _: Any) -> Any:
        walk = _Walk(graph, ledger)

        def run(arguments: list[Any]) -> Any:
            return walk.boxed_run(arguments)

        run._boxed_call = True  # type: ignore[attr-defined]  # it empties the list, so that inputs can go one by one
        return run

    made: Callable[..., Any] = aot_function(
        functional,
        fw_compiler=compiler,  # type: ignore[arg-type]
        bw_compiler=compiler,  # type: ignore[arg-type]
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    return made


class _Walk(fx.Interpreter):
    """Runs a graph and reports to the ledger which nodes allocate nothing."""

    def __init__(self, graph: fx.GraphModule, ledger: Ledger) -> None:
        super().__init__(graph, garbage_collect_values=True)
        self._ledger = ledger
        self._inside = {node for node in graph.graph.nodes if _is_inlined(node) and not _needs_memory(node)}

    def run(self, *inputs: Any, **named: Any) -> Any:
        try:
            return super().run(*inputs, **named)
        finally:
            self.env = {}  # which would keep what the graph returned until its next run

    def run_node(self, node: fx.Node) -> Any:
        with self._ledger.during("inside", node in self._inside):
            return super().run_node(node)


def _is_inlined(node: fx.Node) -> bool:
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or target in _READ_IN_PLACE


def _needs_memory(node: fx.Node) -> bool:
    """Whether a result is read by a kernel that is not generated by inductor, or leaves the graph."""
    for user in node.users:
        # Matrix products, convolutions and attention read their inputs from memory.
        if user.op == "output" or getattr(user.target, "_overloadpacket", None) in flop_registry:
            return True
        if _is_view(user) and _needs_memory(user):
            return True
    return False


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    returns = schema.returns if schema is not None else []
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def copy_offloaded() -> None:
    """Makes `strategy.offload` copy on fake tensors, whose device is the host to torch.

    This cannot be undone.
    """
    of_the_host: Any = FSDPParam.all_gather_inputs

    def copied(parameter: FSDPParam) -> list[Tensor]:
        return [each.clone() for each in of_the_host.fget(parameter)]

    FSDPParam.all_gather_inputs = property(copied)  # type: ignore[assignment]
