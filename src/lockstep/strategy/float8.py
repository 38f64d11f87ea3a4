"""`precision: fp8`: linear layers whose products are computed in eight bits, by torchao, where that pays."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from lockstep.errors import ConfigError
from lockstep.strategy.blocks import find_blocks

logger = logging.getLogger(__name__)

# What the kernels need of both sides of a layer.
_MULTIPLE = 16
# Below some size, casting to eight bits takes longer than the shorter products save; where that is was not measured.
_LEAST_WEIGHTS = 2048 * 2048
# The first GPUs that multiply in eight bits: Ada and Hopper.
_CAPABILITY = (8, 9)


def use_float8(model: nn.Module, pattern: str | None, device: torch.device) -> None:
    """Exchange the large linear layers of a model's blocks; parameters stay the same objects under the same names.

    What is outside of the blocks stays as it is: that is the layer that the loss is computed of, where eight bits are
    felt most. A model without blocks has all of its large layers exchanged.
    """
    _check(device)
    torchao = _torchao()
    blocks = find_blocks(model, pattern)
    inside = [(name, block) for name, block in blocks.items()] or [("", model)]
    layers = {
        f"{prefix}.{name}".strip(".")
        for prefix, block in inside
        for name, module in block.named_modules()
        if type(module) is nn.Linear and module is not model
    }
    large = {name for name in layers if _pays(model.get_submodule(name))}
    if not large:
        logger.warning(
            "precision: fp8: none of the %d linear layers is large enough for it to pay (both sides multiples of %d, "
            "%d weights): the model is trained in bf16", len(layers), _MULTIPLE, _LEAST_WEIGHTS,
        )  # fmt: skip
        return
    config = torchao.Float8LinearConfig(emulate=device.type != "cuda")
    torchao.convert_to_float8_training(model, module_filter_fn=lambda _, name: name in large, config=config)
    logger.info(
        "precision: fp8: %d of %d linear layers multiply in eight bits%s", len(large), len(layers),
        "" if device.type == "cuda" else ", which this device imitates: slower than bf16, and only good for trying",
    )  # fmt: skip


def _pays(layer: nn.Module) -> bool:
    assert isinstance(layer, nn.Linear)
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


def _torchao() -> Any:
    try:
        import torchao.float8 as float8
    except ImportError as error:
        raise ConfigError(
            f"train.precision: fp8 needs torchao ({error}): pip install 'lockstep-train[fp8]', or use bf16"
        ) from None
    return float8
