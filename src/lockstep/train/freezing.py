"""Parts of a model that are not trained, by the names of their parameters."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Mapping, Sequence
from types import MethodType

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lockstep.errors import ConfigError
from lockstep.strategy.base import prefixed
from lockstep.train.matching import matching, parameters_of

logger = logging.getLogger(__name__)

SETTING = "train.freeze"


def freeze(models: Mapping[str, nn.Module], patterns: Sequence[str]) -> None:
    """Take parameters out of training, before optimizers are made and models are placed.

    A layer whose running statistics match as well (`encoder.*` matches `encoder.norm.running_mean`) stays in evaluation
    mode: what is frozen computes the same at the end of the run as at its start. Dropout goes on as it is.
    """
    parameters = parameters_of(models)
    kept = _with_statistics(models, patterns)
    frozen: set[str] = set()
    for pattern in patterns:
        frozen.update(matching(SETTING, pattern, parameters, [f"{name}.running_mean" for name in kept]))
    for name in frozen:
        parameters[name].requires_grad_(False)
    for layer in kept.values():
        _stay_in_evaluation(layer)
    for name, model in models.items():
        if not any(each.requires_grad for each in model.parameters()):
            of = f" of {name}" if len(models) > 1 else ""
            raise ConfigError(
                f"{SETTING}: {', '.join(patterns)}: matches all parameters{of}, so that nothing is left to train: "
                "leave some out, such as the last layer"
            )
    statistics = f" and the statistics of {len(kept)} layers" if kept else ""
    numbers = sum(each.numel() for each in parameters.values() if each.requires_grad)
    logger.info("frozen: %d of %d parameters%s; trained: %s numbers", len(frozen), len(parameters), statistics,
                f"{numbers:,}")  # fmt: skip


def _with_statistics(models: Mapping[str, nn.Module], patterns: Sequence[str]) -> dict[str, _NormBase]:
    """Layers that keep running statistics whose names match."""
    return {
        name: layer
        for model_name, model in models.items()
        for own, layer in model.named_modules()
        if isinstance(layer, _NormBase) and layer.running_mean is not None
        for name in [prefixed(models, model_name, own)]
        if any(fnmatch.fnmatchcase(f"{name}.running_mean", pattern) for pattern in patterns)
    }


def _stay_in_evaluation(layer: nn.Module) -> None:
    """Also where somebody calls train() on the model that it is in."""

    def evaluation(self: nn.Module, mode: bool = True) -> nn.Module:
        return nn.Module.train(self, False)

    layer.train = MethodType(evaluation, layer)  # type: ignore[method-assign]
    layer.train()
