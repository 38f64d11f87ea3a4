"""What torch.compile leaves of a step: which tensors are kept for the backward pass, and which are never made at all.

Torch's own tracing, decompositions and partitioning run here, on fake tensors, and decide what is kept and what is
computed again. Instead of being turned into kernels, the graphs are walked: operations on single numbers that only feed
others of their kind (or a reduction) are parts of one kernel, and what they make is in no memory. Inductor decides a
few of these otherwise, so that the peak is an estimate here; docs/planning.md has how far it was off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import stateless
from torch.utils import _pytree
from torch.utils.flop_counter import flop_registry

from lockstep.config.optimizing import Compile
from lockstep.engine import setup
from lockstep.planner import gpu_rules
from lockstep.planner.ledger import Ledger
from lockstep.strategy import activation_checkpointing
from lockstep.strategy.blocks import Forward, find_blocks, wrap_forward

_ATEN = torch.ops.aten
# Not of single numbers, and yet read where they are needed: inductor makes them parts of other kernels.
_READ_IN_PLACE = {
    _ATEN.embedding.default, _ATEN.full.default, _ATEN.arange.start_step, _ATEN.gather.default,
    _ATEN.index.Tensor, _ATEN.clone.default, torch.ops.prims.convert_element_type.default, torch.ops.prims.iota.default,
    _ATEN.constant_pad_nd.default, _ATEN.scatter.value,
}  # fmt: skip


def install(ledger: Ledger) -> None:
    """From now on, what `run.setup` is told to compile is walked in this way. Nothing here is taken back."""
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
            with ledger.looking_away(), gpu_rules.for_kernels(), _keeping_apart():
                made[key](*tensors)
        return made[key](*tensors)

    return instead


def _keeping_apart() -> Any:
    """What is kept here for a backward pass that never comes is not counted among what a recomputed block keeps."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


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
    """Runs a graph, and tells the ledger which of its nodes make nothing."""

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
        with self._ledger.inside_a_kernel(node in self._inside):
            return super().run_node(node)


def _is_inlined(node: fx.Node) -> bool:
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or target in _READ_IN_PLACE


def _needs_memory(node: fx.Node) -> bool:
    """Whether what a node makes is read by something that is no kernel of inductor's, or leaves the graph."""
    for user in node.users:
        if user.op == "output" or _takes_memory(user):
            return True
        if _is_view(user) and _needs_memory(user):
            return True
    return False


def _takes_memory(node: fx.Node) -> bool:
    """Products of matrices, convolutions, attention: kernels of others, that want their inputs in memory."""
    packet = getattr(node.target, "_overloadpacket", None)
    return packet in flop_registry


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    returns = schema.returns if schema is not None else []
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
