"""`python -m lockstep.planner.tpu.compile FOLDER SLICE`: compiles a traced step with libtpu.

It runs in a separate process, which libtpu may abort. It needs jax and libtpu, no TPU and no torch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from lockstep.planner.devices import slice_of, topology
from lockstep.planner.tpu.program import parsed
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
    import numpy as np

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
    import numpy as np
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
