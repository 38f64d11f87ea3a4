"""Compiles models with torch.compile: as a whole, or block by block; and keeps compiled code in a cache."""

from __future__ import annotations

import functools
import itertools
import logging
import operator
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map, tree_map_only

from lockstep.config.plain import in_home
from lockstep.config.training import Compile
from lockstep.errors import ConfigError
from lockstep.strategy.blocks import BLOCKS, Forward, find_blocks, wrap_forward
from lockstep.strategy.collectives import SyncedForward

logger = logging.getLogger(__name__)

RECORDED = ("reduce-overhead", "max-autotune")

_in_use = False

# Where torch's compiler and Triton's keep compiled code.
_INDUCTOR, _TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
Compiled = Callable[..., Any]
Backend = Callable[[fx.GraphModule, Sequence[Any]], Compiled]

# Changes of state that hold until they are taken back: a graph with one of them cannot be cut just anywhere.
_STATE = {
    "_enter_autocast", "_exit_autocast", "_set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode",
    "_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable", "push_torch_function", "pop_torch_function",
}  # fmt: skip


def returns_copies(compile: Callable[[Forward], Forward]) -> Callable[[Forward], Forward]:
    """Wraps a compiler that records CUDA graphs: a replay overwrites its outputs, so they are copied."""
    global _in_use
    _in_use = True

    def compiled(forward: Forward) -> Forward:
        recorded = compile(forward)

        def copied(*inputs: Any, **keywords: Any) -> Any:
            return tree_map_only(torch.Tensor, torch.Tensor.clone, recorded(*inputs, **keywords))

        return copied

    return compiled


def next_pass() -> None:
    """Marks a new step: what the models returned for the batch before may be overwritten."""
    if _in_use:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]


def how_to_compile(wanted: Any) -> Compile | None:
    """Parses `train.compile` and `run.setup(compile=...)`: True, False, "blocks", or a mapping."""
    if isinstance(wanted, Compile):
        return wanted
    if isinstance(wanted, bool):
        return Compile() if wanted else None
    try:
        return Compile(blocks=True) if wanted == BLOCKS else Compile.model_validate(wanted)
    except ValidationError as problems:
        raise ConfigError(
            f"run.setup: compile must be True, False, {BLOCKS!r}, or a mapping with mode, dynamic, blocks and cache, "
            f"got {wanted!r}: {problems.errors()[0]['msg']}"
        ) from None


def compile_whole(model: nn.Module, recomputed: bool, how: Compile) -> None:
    _leave_out_what_meets_others(model)
    if recomputed:
        _dont_cut_for_ddp()
    # The function: of an nn.Sequential, Module.compile() would compile nothing, and not say so.
    wrap_forward([model], _compiler(how))


def compile_blocks(model: nn.Module, pattern: str | None, how: Compile, apart: bool = False) -> None:
    """Compiles each kind of block once, which takes as long as one block takes, however many there are.

    The rest of the model (embeddings, head, a loss) is compiled too, unless blocks stay `apart`: then hooks around a
    block run between the programs, and what is outside of blocks runs eagerly. A model without blocks is compiled as a
    whole.
    """
    import torch._dynamo.config as settings

    _leave_out_what_meets_others(model)
    blocks = find_blocks(model, pattern)
    if not blocks:
        logger.info("compile: %s has no stack of blocks that are alike: compiled as a whole", type(model).__name__)
        wrap_forward([model], _compiler(how))
        return
    _dont_cut_for_ddp()
    # Torch's limit is meant for one function that is compiled again and again. Blocks that are not quite alike (every
    # other one with another attention) have one forward function, and may need a program each, twice with evaluation.
    settings.recompile_limit = max(settings.recompile_limit, 2 * len(blocks) + 8)
    if apart or how.mode in RECORDED:
        # The function, not the module's call: hooks by which parameters and gradients are exchanged stay outside.
        wrap_forward(blocks.values(), _compiler(how))
    else:
        backend = by_block(blocks.values(), _inductor(how))
        wrap_forward([model], functools.partial(torch.compile, backend=backend, dynamic=how.dynamic))
    logger.info("compiled block by block: %d blocks, from %s on", len(blocks), next(iter(blocks)))


def _compiler(how: Compile) -> Callable[[Forward], Forward]:
    compiler = functools.partial(torch.compile, mode=None if how.mode == "default" else how.mode, dynamic=how.dynamic)
    return returns_copies(compiler) if how.mode in RECORDED else compiler


def _inductor(how: Compile) -> Backend:
    def compile(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx

        compiled: Any = compile_fx(graph, inputs, config_patches=list_mode_options(how.mode, how.dynamic))
        return compiled  # type: ignore[no-any-return]

    return compile


def _leave_out_what_meets_others(model: nn.Module) -> None:
    """Layers that exchange something with other ranks run as they are written."""
    synced = [each for each in model.modules() if isinstance(vars(each).get("forward"), SyncedForward)]
    wrap_forward(synced, lambda forward: torch.compiler.disable(forward))  # type: ignore[no-untyped-call]


def _dont_cut_for_ddp() -> None:
    """Has torch compile a model under DDP in one piece.

    It cuts programs where a bucket of gradients is full, so that they can be exchanged before the backward pass ends.
    Blocks are such pieces already, and what is recomputed cannot be cut.
    """
    import torch._dynamo.config as settings

    settings.optimize_ddp = False


def keep_compiled_code(asked: str | None) -> None:
    """Has torch keep compiled code in a folder that outlives the run: by default in the user's cache.

    Torch itself uses the folder for temporary files, which is empty after a restart and new in every container.
    """
    if asked is None and _INDUCTOR in os.environ:
        return
    folder: Path | None = None
    try:
        folder = Path(in_home(asked)).absolute() if asked is not None else _default()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        problem = _problem(found) if os.access(folder, os.W_OK) else "it cannot be written to"
    except (OSError, ValueError, RuntimeError) as error:  # no home
        problem = getattr(error, "strerror", None) or str(error)
    if folder and problem is None:
        os.environ[_INDUCTOR] = str(folder)
        # Torch would give every GPU of a host a folder of its own, and so each of its ranks the same work.
        os.environ.setdefault(_TRITON, str(folder / "triton"))
    elif asked is not None:
        raise ConfigError(f"train.compile.cache: {folder or asked}: {problem}. Name a folder of your own")
    else:
        where = f" in {folder}" if folder else ""
        logger.info("compiled code is not kept%s: %s; torch keeps it where it does by itself", where, problem)


def _default() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or ""
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "lockstep" / "compiled"


def _problem(found: os.stat_result) -> str | None:
    """What is in the folder is run: whoever can write there can run code as this user."""
    if not stat.S_ISDIR(found.st_mode):
        return "it is not a folder"
    if found.st_uid != os.geteuid():
        return f"it belongs to another user (number {found.st_uid}), and what is in it would be run"
    if found.st_mode & 0o022:
        return "others may write to it, and what is in it would be run (chmod go-w)"
    return None


def by_block(blocks: Iterable[nn.Module], backend: Backend) -> Backend:
    """Returns a backend that compiles a graph piece by piece: each kind of block once, and what is around them.

    Dynamo traces the whole forward pass into one graph. It is cut where a block begins or ends. Blocks that compute the
    same are one piece, called with the parameters of each block. So head and loss are compiled too, and twelve blocks
    take as long to compile as one.
    """
    identities = {str(id(block)) for block in blocks}

    def compile(graph: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        pieces = [_piece(graph, run) for run in _runs(graph, identities)]
        if len(pieces) < 2 or not _can_be_cut(graph, pieces):
            return backend(graph, inputs)
        return _stitched(graph, pieces, backend)

    return compile


@dataclass(frozen=True)
class _Piece:
    """Consecutive operations of a graph, as a graph."""

    graph: fx.GraphModule
    inputs: list[fx.Node]  # of the original graph
    outputs: list[fx.Node]


def _runs(graph: fx.GraphModule, blocks: set[str]) -> list[list[fx.Node]]:
    """Returns consecutive operations that belong to the same call of a block, or to none."""
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
    """Returns the same function as the graph, by compiled pieces."""
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
    """Returns what is equal for pieces that compute the same function of inputs that look the same."""
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
    """Returns the operations of a graph, with numbers instead of names."""
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
    """Dynamo makes some functions anew for every call: the same code on the same objects is the same function."""
    if not isinstance(target, FunctionType) or target.__defaults__ or target.__kwdefaults__:
        return target
    cells = tuple(id(cell.cell_contents) for cell in target.__closure__ or ())
    return target.__code__, cells, id(target.__globals__)


def _exact(value: Any) -> Any:
    """Compares values by their type and text, and anything else by its identity."""
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
