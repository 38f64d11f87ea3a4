"""`python -m lockstep.planner.tpu.compile FOLDER SLICE`: compiles a traced step with libtpu.

It runs in a separate process, which libtpu may abort. It needs jax and libtpu, no TPU and no torch.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from lockstep.planner.devices import slice_of, topology
from lockstep.planner.tpu.trace import PROGRAM, TRACED, Traced

COMPILED = "compiled.json"
_LOWEST, _HIGHEST = -(2**31), 2**31 - 1


def narrow(ir: Any, module: Any) -> None:
    """Makes 64-bit integers 32-bit in place: a TPU has no others, and libtpu 0.0.21 crashes on some."""
    wide = ir.IntegerType.get_signless(64)
    short = ir.IntegerType.get_signless(32)

    def narrowed(type: Any) -> Any:
        if ir.RankedTensorType.isinstance(type):
            tensor = ir.RankedTensorType(type)
            if tensor.element_type == wide:
                return ir.RankedTensorType.get(tensor.shape, short)
        return type

    def visit(operation: Any) -> None:
        for result in operation.results:
            if (other := narrowed(result.type)) != result.type:
                result.set_type(other)
        if operation.name == "stablehlo.constant":
            _narrow_constant(ir, operation, narrowed)
        for region in operation.regions:
            for block in region:
                for argument in block.arguments:
                    argument.set_type(narrowed(argument.type))
                for inner in block:
                    visit(inner.operation)
        if operation.name == "func.func":
            before = ir.FunctionType(ir.TypeAttr(operation.attributes["function_type"]).value)
            after = ir.FunctionType.get(
                [narrowed(each) for each in before.inputs], [narrowed(each) for each in before.results]
            )
            operation.attributes["function_type"] = ir.TypeAttr.get(after)

    visit(module.operation)


def _narrow_constant(ir: Any, operation: Any, narrowed: Any) -> None:
    value = operation.attributes["value"]
    wanted = narrowed(value.type)
    if wanted == value.type:
        return
    if value.is_splat:
        number = min(max(value.get_splat_value().value, _LOWEST), _HIGHEST)
        element = ir.IntegerAttr.get(ir.RankedTensorType(wanted).element_type, number)
        operation.attributes["value"] = ir.DenseElementsAttr.get_splat(wanted, element)
        return
    numbers = np.clip(np.array(value), _LOWEST, _HIGHEST).astype(np.int32)
    operation.attributes["value"] = ir.DenseElementsAttr.get(numbers, type=wanted)


_SIZES = {
    "arguments": "argument_size_in_bytes",
    "results": "output_size_in_bytes",
    "shared": "alias_size_in_bytes",
    "temporaries": "temp_size_in_bytes",
    "code": "generated_code_size_in_bytes",
}


def prepare() -> None:
    os.environ.update(
        JAX_PLATFORMS="cpu",
        TPU_SKIP_MDS_QUERY="1",  # else it asks the cloud who it is, and waits for an answer
        JAX_USE_SHARDY_PARTITIONER="0",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        TPU_LOG_DIR="disabled",
    )


def compiled(traced: Traced, program: bytes, target: str) -> dict[str, Any]:
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir
    from jax.experimental import topologies

    began = time.monotonic()
    asked = topology(slice_of(target))
    devices = topologies.get_topology_desc(platform="tpu", **asked).devices
    count = len(devices)
    if count != traced.devices:
        return {"error": f"libtpu has {count} devices for {asked['topology_name']}, and the step was traced for "
                         f"{traced.devices}"}  # fmt: skip
    replicas = traced.replicas
    partitions = count // replicas
    options = compiler.get_compile_options(
        num_replicas=replicas,
        num_partitions=partitions,
        device_assignment=np.arange(count).reshape(replicas, partitions),
        use_spmd_partitioning=partitions > 1,
    )
    options.executable_build_options.use_shardy_partitioner = False
    text = xla_client._xla.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(program))
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.parse(text)
        del text
        narrow(ir, module)
        _annotate(ir, module, traced, replicas, partitions)
        made = compiler.backend_compile(devices[0].client, module, xla_client.DeviceList(tuple(devices)), options)
    took = time.monotonic() - began
    memory = made.get_compiled_memory_stats()
    costs = made.cost_analysis()
    costs = costs[0] if isinstance(costs, list) else costs
    written = made.hlo_modules()[0].to_string()
    return {
        "sizes": {name: int(getattr(memory, field)) for name, field in _SIZES.items()},
        "flops": float(costs.get("flops", 0.0)),
        "bytes": float(costs.get("bytes accessed", 0.0)),
        "seconds": round(took, 1),
        **parsed(written, [each.kind for each in traced.arguments]),
    }


def _annotate(ir: Any, module: Any, traced: Traced, replicas: int, partitions: int) -> None:
    """Sets the shardings of arguments and results, and which results alias an argument."""
    main = next(each for each in module.body.operations if each.attributes["sym_name"].value == "main")
    number = ir.IntegerType.get_signless(32)
    arguments = []
    for each in traced.arguments:
        said = {}
        if partitions > 1:
            said["mhlo.sharding"] = ir.StringAttr.get(each.sharding)
        if each.result is not None:
            said["tf.aliasing_output"] = ir.IntegerAttr.get(number, each.result)
        arguments.append(ir.DictAttr.get(said))
    main.attributes["arg_attrs"] = ir.ArrayAttr.get(arguments)
    if partitions > 1:
        results = [ir.DictAttr.get({"mhlo.sharding": ir.StringAttr.get(each)}) for each in traced.results]
        main.attributes["res_attrs"] = ir.ArrayAttr.get(results)
    module.operation.attributes["mhlo.num_replicas"] = ir.IntegerAttr.get(number, replicas)
    module.operation.attributes["mhlo.num_partitions"] = ir.IntegerAttr.get(number, partitions)


# The compiled program: its collectives, and how large its arguments are. Its text has one instruction per line:
#     %fusion.7 = bf16[8,2048]{1,0:T(8,128)(2,1)} fusion(%p.1, %p.2), kind=kOutput, metadata={...}
# `T(8,128)` are the tiles of the layout.

_BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16, "s32": 32,
         "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "f8e4m3fn": 8, "f8e5m2": 8}  # fmt: skip
_LINE = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (?P<rest>.*)$")
_ARGUMENT = re.compile(r" parameter\((\d+)\)")
_ARRAY = re.compile(r"(?P<type>[a-z]\w*)\[(?P<dims>[\d,]*)\](?:\{(?P<layout>[^}]*)\})?")
_TILE = re.compile(r"T\((\d+(?:,\d+)*)\)")
_OPERATION = re.compile(r" (?P<name>[a-z][\w\-]*)\(")
_EXCHANGES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
_GROUPS = re.compile(r"replica_groups=(?P<groups>\{\{.*?\}\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PAIRS = re.compile(r"source_target_pairs=\{(?P<pairs>\{.*?\})\}")


def parsed(text: str, kinds: Sequence[str]) -> dict[str, Any]:
    """Returns the bytes of the arguments by kind, and the collectives; `kinds` are those of the arguments."""
    arguments: Counter[str] = Counter()
    exchanges: Counter[tuple[str, tuple[int, ...], int]] = Counter()
    within, entered = "", False
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")) and line.rstrip().endswith("{"):
            entered = line.startswith("ENTRY")
            within = line.split()[1 if entered else 0]
        elif entered and (match := _ARGUMENT.search(line)) is not None:
            number = int(match[1])
            arguments[kinds[number] if number < len(kinds) else "other"] += _instruction(line)[1]
        elif any(f" {name}" in line for name in _EXCHANGES):
            operation, size = _instruction(line)
            name, group = operation.removesuffix("-start"), group_of(line)
            if name == "reduce-scatter":
                size *= max(len(group), 1)
            elif name == "all-reduce" and "all-reduce-scatter" in within:
                name = "reduce-scatter"
            if name in _EXCHANGES:
                exchanges[(name, tuple(group), size)] += 1
    return {
        "by_argument": dict(arguments),
        "exchanges": [
            {"name": name, "group": list(group), "bytes": size, "count": count}
            for (name, group, size), count in exchanges.items()
        ],
    }


def _instruction(line: str) -> tuple[str, int]:
    """Returns the operation of a line, and the bytes of what it makes."""
    match = _LINE.match(line)
    shape, rest = _split_shape(match["rest"]) if match is not None else ("", "")
    operation = _OPERATION.match(rest)
    if operation is None:
        return "", 0
    arrays = _ARRAY.finditer(_made(shape, operation["name"]))
    return operation["name"], sum(
        padded_bytes(each["type"], _numbers(each["dims"]), each["layout"] or "") for each in arrays
    )


def _made(shape: str, operation: str) -> str:
    """The result of an asynchronous start includes its operands: (from, to, ...)."""
    if not operation.endswith("-start") or operation == "all-reduce-start" or not shape.startswith("("):
        return shape
    parts = _parts(shape[1:-1])
    return parts[0] if operation == "copy-start" else parts[1] if len(parts) > 1 else shape


def _parts(text: str) -> list[str]:
    """Splits at commas outside of brackets."""
    found, depth, begin = [], 0, 0
    for number, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            found.append(text[begin:number])
            begin = number + 1
    return [*found, text[begin:]]


def _split_shape(rest: str) -> tuple[str, str]:
    """A shape may be a tuple of shapes, with parentheses in their layouts."""
    if not rest.startswith("("):
        shape, space, after = rest.partition(" ")
        return shape, space + after
    end = _closing(rest[1:]) + 2
    return rest[:end], rest[end:]


def _closing(text: str) -> int:
    """Returns where the open parenthesis ends."""
    depth = 1
    for number, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return number
    return len(text)


def padded_bytes(type: str, dims: Sequence[int], layout: str = "") -> int:
    """Includes the padding of tiles: T(8,128) rounds the last two dimensions of the layout up."""
    order = [int(each) for each in layout.partition(":")[0].split(",") if each.strip().isdigit()]
    major = [dims[number] for number in reversed(order)] if len(order) == len(dims) else list(dims)
    if tiles := _TILE.findall(layout):
        tile = _numbers(tiles[0])
        major = [1] * (len(tile) - len(major)) + major
        for back in range(1, len(tile) + 1):
            major[-back] = -(-major[-back] // tile[-back]) * tile[-back]
    return math.prod(major) * _BITS.get(type, 32) // 8


def group_of(text: str) -> list[int]:
    """Returns the devices of the first group, from {{0,1},{2,3}} or [2,2]<=[4]T(1,0)."""
    match = _GROUPS.search(text)
    if match is None:
        pairs = _PAIRS.search(text)
        return _chain(pairs["pairs"]) if pairs else []
    groups = match["groups"]
    if groups.startswith("{"):
        return _numbers(groups[2:].partition("}")[0])
    shape, sizes, order = _IOTA.fullmatch(groups).groups()  # type: ignore[union-attr]
    numbers = np.arange(math.prod(_numbers(sizes))).reshape(_numbers(sizes))
    if order:
        numbers = numbers.transpose(_numbers(order))
    return [int(each) for each in numbers.ravel()[: _numbers(shape)[-1]]]


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",") if each]


def _chain(pairs: str) -> list[int]:
    """Returns the devices that device 0 reaches."""
    sends = {int(a): int(b) for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs)}
    found, at = [0], sends.get(0)
    while at is not None and at not in found:
        found.append(at)
        at = sends.get(at)
    return sorted(found)


def main(folder: str, target: str) -> int:
    prepare()
    traced = TypeAdapter(Traced).validate_json((Path(folder) / TRACED).read_text(encoding="utf-8"))
    program = (Path(folder) / PROGRAM).read_bytes()
    try:
        found = compiled(traced, program, target)
    except Exception as error:  # whatever XLA says of the program; it is read by who asked
        found = {"refused": str(error)}
    (Path(folder) / COMPILED).write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
