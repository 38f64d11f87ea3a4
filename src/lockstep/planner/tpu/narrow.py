"""Integers of 64 bits as such of 32: a TPU has no others, and libtpu 0.0.21 crashes where an embedding gets them."""

from __future__ import annotations

from typing import Any

_LOWEST, _HIGHEST = -(2**31), 2**31 - 1


def narrow(ir: Any, module: Any) -> None:
    """In place, in a program that was just read: every value, every constant, every function's type."""
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
