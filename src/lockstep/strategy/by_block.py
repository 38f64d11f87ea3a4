"""A backend for torch.compile that compiles a model piece by piece: each kind of block once, and what is around them.

Dynamo traces the whole forward pass into one graph. The graph is cut where a block begins or ends, and every piece is
compiled for itself. Blocks that compute the same are one piece: it is compiled once and called with the parameters of
each block. So head and loss are compiled too, and twelve blocks take as long to compile as one.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

Compiled = Callable[..., Any]
Backend = Callable[[fx.GraphModule, Sequence[Any]], Compiled]

# Changes of state that hold until they are taken back: a graph with one of them cannot be cut just anywhere.
_STATE = {
    "_enter_autocast", "_exit_autocast", "_set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode",
    "_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable", "push_torch_function", "pop_torch_function",
}  # fmt: skip


def by_block(blocks: Iterable[nn.Module], backend: Backend) -> Backend:
    """Returns a backend that hands pieces of a graph to another one."""
    identities = {str(id(block)) for block in blocks}

    def compile(graph: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        pieces = [_piece(graph, run) for run in _runs(graph, identities)]
        if len(pieces) < 2 or not _can_be_cut(graph, pieces):
            return backend(graph, inputs)
        return _stitched(graph, pieces, backend)

    return compile


@dataclass(frozen=True)
class _Piece:
    """Consecutive operations of a graph as a graph of their own."""

    graph: fx.GraphModule
    inputs: list[fx.Node]  # of the original graph
    outputs: list[fx.Node]


def _runs(graph: fx.GraphModule, blocks: set[str]) -> list[list[fx.Node]]:
    """Consecutive operations that belong to the same call of a block, or to none."""
    nodes = [each for each in graph.graph.nodes if each.op in ("call_function", "call_method", "call_module")]
    calls = [_block_of(node, blocks) for node in nodes]
    last = {call: place for place, call in enumerate(calls)}
    place = 0
    while place < len(nodes):  # what a block does without a note of it lies between its other operations
        if (call := calls[place]) is not None:
            calls[place : last[call] + 1] = [call] * (last[call] + 1 - place)
            place = last[call]
        place += 1
    return [[node for node, _ in run] for _, run in itertools.groupby(zip(nodes, calls, strict=True), lambda it: it[1])]


def _block_of(node: fx.Node, blocks: set[str]) -> str | None:
    """Dynamo notes the modules that an operation is part of by their identity, and a number for a repeated call."""
    stack = node.meta.get("nn_module_stack") or {}
    return next((str(key) for key in stack if str(key).partition("@")[0] in blocks), None)


def _can_be_cut(graph: fx.GraphModule, pieces: list[_Piece]) -> bool:
    passed = {node for piece in pieces for node in (*piece.inputs, *piece.outputs)}
    return all(
        each.op != "call_module" and getattr(each.target, "__name__", each.target) not in _STATE
        for each in graph.graph.nodes
    ) and all(isinstance(each.meta.get("example_value"), (Tensor, int, torch.SymInt)) for each in passed)


def _stitched(graph: fx.GraphModule, pieces: list[_Piece], backend: Backend) -> fx.GraphModule:
    """The same function as the graph, by compiled pieces."""
    whole, made = fx.Graph(), {}
    root = nn.Module()
    compiled: dict[Any, nn.Module] = {}
    for node in graph.graph.find_nodes(op="placeholder"):
        made[node] = whole.node_copy(node)
    for number, piece in enumerate(pieces):
        key = _key(piece)
        if key not in compiled:
            compiled[key] = _compiled(piece, backend)
        root.add_module(f"piece_{number}", compiled[key])
        called = whole.call_module(f"piece_{number}", tuple(made[each] for each in piece.inputs))
        for index, each in enumerate(piece.outputs):
            made[each] = whole.call_function(operator.getitem, (called, index))
    (output,) = graph.graph.find_nodes(op="output")
    for constant in {each for each in output.all_input_nodes if each.op == "get_attr"}:
        setattr(root, str(constant.target), getattr(graph, str(constant.target)))
        made[constant] = whole.node_copy(constant)
    whole.output(fx.map_arg(output.args[0], made.__getitem__))
    return fx.GraphModule(root, whole)


def _piece(graph: fx.GraphModule, run: list[fx.Node]) -> _Piece:
    inside, made = set(run), {}
    piece = fx.Graph()
    inputs = list(dict.fromkeys(each for node in run for each in node.all_input_nodes if each not in inside))
    inputs = [each for each in inputs if each.op != "get_attr"]  # constants are part of the piece
    for each in inputs:
        made[each] = piece.placeholder(each.name)
        made[each].meta.update(each.meta)
    for node in run:
        for each in node.all_input_nodes:
            if each.op == "get_attr" and each not in made:
                made[each] = piece.node_copy(each)
        made[node] = piece.node_copy(node, made.__getitem__)
    outputs = [node for node in run if any(user not in inside for user in node.users)]
    piece.output(tuple(made[each] for each in outputs))
    return _Piece(fx.GraphModule(graph, piece), inputs, outputs)


def _key(piece: _Piece) -> Any:
    """Equal for pieces that compute the same function of inputs that look the same."""
    storages: dict[int, int] = {}
    look = tuple(_look(each.meta.get("example_value"), storages) for each in piece.inputs)
    return look, _text(piece.graph)


def _look(value: Any, storages: dict[int, int]) -> Any:
    if not isinstance(value, Tensor):
        return type(value), str(value)
    if (type(value).__name__ != "FakeTensor" and type(value) is not nn.Parameter) or value.layout != torch.strided:
        return object()  # a subclass may differ in what nobody sees here: equal to nothing
    shared = storages.setdefault(value.untyped_storage()._cdata, len(storages))
    numbers = (str(value.shape), str(value.stride()), str(value.storage_offset()), shared)
    return value.dtype, value.device, value.requires_grad, isinstance(value, nn.Parameter), *numbers


def _text(graph: fx.GraphModule) -> Any:
    """The operations of a graph, with numbers instead of names."""
    numbers: dict[fx.Node, str] = {}
    lines = []
    for number, node in enumerate(graph.graph.nodes):
        numbers[node] = f"%{number}"
        target: Any = _function(node.target)
        if node.op == "placeholder":
            target = ""
        elif node.op == "get_attr":
            constant = getattr(graph, str(node.target))
            target = _text(constant) if isinstance(constant, fx.GraphModule) else id(constant)
        arguments = fx.map_arg((node.args, node.kwargs), numbers.__getitem__)
        lines.append((node.op, target, repr(tree_map(_exact, arguments))))
    return tuple(lines)


def _function(target: Any) -> Any:
    """Dynamo makes some functions anew for every call: those are the same that run the same code on the same things."""
    if not isinstance(target, FunctionType) or target.__defaults__ or target.__kwdefaults__:
        return target
    cells = tuple(id(cell.cell_contents) for cell in target.__closure__ or ())
    return target.__code__, cells, id(target.__globals__)


def _exact(value: Any) -> Any:
    """What is told apart by its type and its text; anything else by its identity."""
    plain = (str, int, float, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
    symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool, slice, type(...))
    return value if isinstance(value, (*plain, *symbolic)) else (type(value).__name__, id(value))


class _Called(nn.Module):
    def __init__(self, compiled: Compiled) -> None:
        super().__init__()
        self._compiled = compiled

    def forward(self, *inputs: Any) -> Any:
        return self._compiled(*inputs)


def _compiled(piece: _Piece, backend: Backend) -> nn.Module:
    from torch._guards import TracingContext, detect_fake_mode, tracing

    inputs = [each.meta["example_value"] for each in piece.inputs]
    # What torch notes of a graph, it reads again when it compiles the backward pass: every piece has its own notes.
    with tracing(TracingContext(detect_fake_mode(inputs))):
        return _Called(backend(piece.graph, inputs))
