"""Which parts of a model are its blocks: the layers that repeat, by which it is sharded, recomputed and compiled."""

from __future__ import annotations

import difflib
import fnmatch
from collections import Counter
from collections.abc import Iterator, Mapping

from torch import nn

from lockstep.errors import ConfigError

BLOCKS = "blocks"  # in a setting: those that are found here
_STACKS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# They only hold their children: nobody calls them, so nothing can be done around their forward pass.
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def find_blocks(model: nn.Module, pattern: str | None, setting: str = "strategy.blocks") -> dict[str, nn.Module]:
    """The blocks of a model by their names, in its own order, none inside of another; none: the model is one block.

    By a pattern over the names of modules, where `setting` is what it was given as; else those that are found.
    """
    if pattern is None:
        return _outermost(dict(_repeated(model, "")))
    callable_ones = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if name and not isinstance(module, _NEVER_CALLED)
    }
    matching = {name: module for name, module in callable_ones.items() if fnmatch.fnmatchcase(name, pattern)}
    if not matching:
        raise ConfigError(_matches_nothing(setting, pattern, list(callable_ones)))
    return _outermost(matching)


def _repeated(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Children of a list, dictionary or sequence of modules of which there are at least two of one class.

    A block has parameters and layers of its own. A single layer is none: it would be a poor unit for anything that is
    done per block, and the layers of an MLP or of a small CNN repeat as well.
    """
    counts: Counter[type[nn.Module]] = Counter()
    if isinstance(module, _STACKS):
        counts.update(type(child) for child in module._modules.values() if child is not None and _is_compound(child))
    for name, child in module._modules.items():  # not named_children(), which leaves out what is there twice
        if child is None:
            continue
        if counts[type(child)] > 1 and _is_compound(child):
            yield prefix + name, child
        else:
            yield from _repeated(child, f"{prefix}{name}.")


def _is_compound(module: nn.Module) -> bool:
    return bool(module._modules) and next(module.parameters(), None) is not None


def _outermost(found: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Each module once, under its first name, and none that is part of another."""
    parts = {id(part) for module in found.values() for part in module.modules() if part is not module}
    once: dict[int, str] = {}
    for name, module in found.items():
        once.setdefault(id(module), name)
    return {name: found[name] for identity, name in once.items() if identity not in parts}


def _matches_nothing(setting: str, pattern: str, names: list[str]) -> str:
    nearest = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
    there = f"the nearest are {', '.join(nearest)}" if nearest else "it has no modules inside"
    return (
        f"{setting}: {pattern}: no module of the model has a name like that; {there} (patterns are matched as file "
        "names are: * stands for anything, so that layers.* is every module in layers)"
    )
