"""Parameters by name pattern: groups for the optimizer, and frozen ones."""

from __future__ import annotations

import difflib
import fnmatch
import logging
from collections.abc import Collection, Mapping, Sequence
from types import MethodType
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lockstep.config.plain import columns
from lockstep.config.training import ParameterGroup
from lockstep.engine.models import MATCH
from lockstep.errors import ConfigError
from lockstep.record.logs import file_only
from lockstep.shown import brief
from lockstep.strategy.blocks import find_blocks
from lockstep.strategy.parameters import named_parameters, prefixed

logger = logging.getLogger(__name__)

OTHERS = "optimizer.others"
_MOST_CHILDREN = 12


def parameter_groups(
    models: Mapping[str, nn.Module], groups: Sequence[ParameterGroup]
) -> dict[str, list[dict[str, Any]]]:
    """Returns the param groups of every model for its optimizer: the rest first, then those of the config.

    A parameter is in the group of the first pattern that matches. A pattern that matches in no model is refused.
    """
    named = parameters_of(models)
    chosen = _chosen(named, groups)
    found: dict[str, list[dict[str, Any]]] = {}
    for model_name, model in models.items():
        own = {id(each) for each in model.parameters()}
        mine = [[named[name] for name in names if id(named[name]) in own] for names in chosen]
        taken = {id(each) for part in mine for each in part}
        rest = [each for each in model.parameters() if each.requires_grad and id(each) not in taken]
        found[model_name] = [
            {"params": parameters, **arguments}
            for parameters, arguments in [
                (rest, {}),
                *((part, {MATCH: text(group), **group.arguments}) for part, group in zip(mine, groups, strict=True)),
            ]
            if parameters
        ]
    _log(found)
    return found


def matrices_and_others(
    models: Mapping[str, nn.Module], match: Sequence[str] | None
) -> dict[str, tuple[list[nn.Parameter], list[nn.Parameter]]]:
    """Returns for every model the matrices for an optimizer such as Muon, and what is trained by the other one.

    The other one gets what is no matrix, and what its patterns match. Without patterns, it gets embeddings and, in a
    model with repeated blocks, all that is outside of them (the head); else the weights of the last linear layer.
    """
    named = parameters_of(models)
    chosen = {id(named[name]) for pattern in match or () for name in matching(f"{OTHERS}.match", pattern, named)}
    found = {}
    for model_name, model in models.items():
        left = chosen if match is not None else _not_hidden(model)
        trained = [each for each in model.parameters() if each.requires_grad]
        matrices = [each for each in trained if each.dim() == 2 and id(each) not in left]
        if trained and not matrices:
            of = f" of {model_name}" if len(models) > 1 else ""
            raise ConfigError(
                f"{OTHERS}: all parameters{of} would be for this optimizer, and none for the first: name those that it "
                f"gets by {OTHERS}.match, such as [embed.*, head.*] (what is no matrix is added), or use one optimizer"
            )
        mine = set(map(id, matrices))
        found[model_name] = matrices, [each for each in trained if id(each) not in mine]
        names = {id(each): name for name, each in named.items()}
        logger.info("optimizer: %d matrices; others: %s", len(matrices),
                    brief(", ".join(names[id(each)] for each in found[model_name][1]) or "none", 300))  # fmt: skip
    return found


def _not_hidden(model: nn.Module) -> set[int]:
    """Returns the parameters that are no hidden layer's, by identity."""
    embeddings = [each for each in model.modules() if isinstance(each, (nn.Embedding, nn.EmbeddingBag))]
    found = {id(each.weight) for each in embeddings}
    blocks = find_blocks(model, None)
    if blocks:
        inside = {id(each) for block in blocks.values() for each in block.parameters()}
        return found | {id(each) for each in model.parameters() if id(each) not in inside}
    linear = [each for each in model.modules() if isinstance(each, nn.Linear)]
    return found | {id(each.weight) for each in linear[-1:]}


def text(group: ParameterGroup) -> str:
    return ", ".join(group.match)


def _chosen(named: Mapping[str, nn.Parameter], groups: Sequence[ParameterGroup]) -> list[list[str]]:
    """Returns the names of the trained parameters of each group."""
    free = [name for name, each in named.items() if each.requires_grad]
    chosen: list[list[str]] = []
    for number, group in enumerate(groups):
        setting = f"optimizer.groups[{number}].match"
        wanted = {name for pattern in group.match for name in matching(setting, pattern, named)}
        mine = [name for name in free if name in wanted]
        if not mine:
            raise ConfigError(
                f"{setting}: {text(group)}: what it matches ({', '.join(sorted(wanted)[:3])}) is frozen, or in a group "
                "before it, where the first that matches counts: remove the group, or put it first"
            )
        free = [name for name in free if name not in wanted]
        chosen.append(mine)
    return chosen


def _log(found: Mapping[str, list[dict[str, Any]]]) -> None:
    for name, groups in found.items():
        of = f" of {name}" if len(found) > 1 else ""
        for group in groups:
            count = f"{sum(each.numel() for each in group['params']):,} numbers"
            settings = {key: value for key, value in group.items() if key not in ("params", MATCH)}
            given = ", ".join(f"{key} {value}" for key, value in settings.items()) or "the optimizer's arguments"
            match = group.get(MATCH, "the rest")
            logger.info("parameter group%s: %s: %d parameters, %s, %s", of, match, len(group["params"]), count, given)


def matching(setting: str, pattern: str, names: Collection[str], others: Collection[str] = ()) -> list[str]:
    """Returns the names that a pattern matches; refuses one that matches none, nor one of the `others`."""
    found = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    if not found and not any(fnmatch.fnmatchcase(name, pattern) for name in others):
        listed = list(names)
        nearest = difflib.get_close_matches(pattern, listed, n=3, cutoff=0.3) or listed[:3]
        raise ConfigError(
            f"{setting}: {pattern}: no parameter has a name like that; the nearest are {', '.join(nearest)} "
            "(patterns are matched as file names are: * stands for anything)"
        )
    return found


def parameters_of(models: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Returns every parameter by its name, `generator.fc.weight` where there is more than one model."""
    return {name: each for name, each in named_parameters(models).items() if isinstance(each, nn.Parameter)}


SETTING = "train.freeze"


def freeze(models: Mapping[str, nn.Module], patterns: Sequence[str]) -> None:
    """Freezes parameters, before optimizers are made and models are placed.

    A layer whose running statistics match as well (`encoder.*` matches `encoder.norm.running_mean`) stays in evaluation
    mode, so that it computes the same at the end of the run as at its start. Dropout is not changed.
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
    return {
        name: layer
        for model_name, model in models.items()
        for own, layer in model.named_modules()
        if isinstance(layer, _NormBase) and layer.running_mean is not None
        for name in [prefixed(models, model_name, own)]
        if any(fnmatch.fnmatchcase(f"{name}.running_mean", pattern) for pattern in patterns)
    }


def _stay_in_evaluation(layer: nn.Module) -> None:
    """Keeps a layer in evaluation mode, also where train() is called on its model."""

    def evaluation(self: nn.Module, mode: bool = True) -> nn.Module:
        return nn.Module.train(self, False)

    layer.train = MethodType(evaluation, layer)  # type: ignore[method-assign]
    layer.train()


def log_summary(models: Mapping[str, nn.Module], strategy: str) -> None:
    """Logs how many parameters every model has, as a whole, and where they are; its children in the log file alone."""
    for name, model in models.items():
        rows = [("", "type", "parameters", "trained", "dtype", "on")]
        for child, module in list(model.named_children())[:_MOST_CHILDREN]:
            rows.append((prefixed(models, name, child), type(module).__name__.removeprefix("FSDP"), *_counts(module)))
        total, trained, dtypes, places = _counts(model)
        logger.info("model%s: %s, %s parameters, %s of them trained, %s, on %s (%s)", f" {name}" * (len(models) > 1),
                    type(model).__name__.removeprefix("FSDP"), total, trained, dtypes, places, strategy)  # fmt: skip
        more = len(list(model.children())) - _MOST_CHILDREN
        for line in [*columns(rows), *([f"and {more} more"] if more > 0 else [])] if len(rows) > 1 else ():
            file_only.info("  %s", line)


def _counts(module: nn.Module) -> tuple[str, str, str, str]:
    """Returns the numbers of all parameters and of trained ones, over all ranks; their types and places."""
    own = list(module.parameters())
    total, trained = (
        sum(each.numel() for each in some) for some in (own, [each for each in own if each.requires_grad])
    )
    dtypes = ", ".join(sorted({str(each.dtype).removeprefix("torch.") for each in own}))
    split = any(any(place.is_shard() for place in getattr(each, "placements", ())) for each in own)
    places = ", ".join(sorted({str(each.device) for each in own})) + (", split between ranks" if split else "")
    return f"{total:,}", f"{trained:,}", dtypes, places
