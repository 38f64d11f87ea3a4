"""Finds the blocks of a model: the layers that repeat, by which it is sharded, recomputed and compiled; wraps
modules."""

from __future__ import annotations

import difflib
import fnmatch
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.runtime.moving import map_tensors

BLOCKS = "blocks"  # in a setting: those that are found here
_STACKS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# They only hold their children: nobody calls them, so nothing can be done around their forward pass.
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

Forward = Callable[..., Any]  # with the module as its first argument


def find_blocks(model: nn.Module, pattern: str | None, setting: str = "strategy.blocks") -> dict[str, nn.Module]:
    """Returns the blocks of a model by name, none inside of another: those that match a pattern, else those that
    repeat.

    `setting` is the config key of the pattern. An empty result means that the model is one block.
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
    """Yields children of a container of modules of which there are at least two of one class.

    A block has parameters and layers. A single layer is none: the layers of an MLP or of a small CNN repeat as well.
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
    """Returns each module once, under its first name, and none that is part of another."""
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


def wrap_forward(modules: Iterable[nn.Module], wrap: Callable[[Forward], Forward]) -> None:
    """Replaces the forward function of modules by what `wrap` makes of it, once for all modules of a class.

    Hooks of a module stay outside. It is a method of the module, so that a deep copy calls its own.
    """
    made: dict[Forward, Forward] = {}
    for module in modules:
        forward = _forward_of(module)
        if forward not in made:
            made[forward] = wrap(forward)
        module.forward = MethodType(made[forward], module)


def _forward_of(module: nn.Module) -> Forward:
    own = vars(module).get("forward")  # where somebody has put something around it before
    if own is None:
        return type(module).forward
    if inspect.ismethod(own) and own.__self__ is module:
        return own.__func__
    return lambda _, *inputs, **keywords: own(*inputs, **keywords)


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def without_views(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Torch loses its hook where a view is changed in place; and the output of a split layer is a view of a DTensor."""
    return map_tensors(lambda each: _own(each) if each._is_view() else each, output)


def _own(tensor: Tensor) -> Tensor:
    own: Tensor = _NoView.apply(tensor)  # type: ignore[no-untyped-call]
    return own


class _NoView(torch.autograd.Function):
    """Shares the memory of its input: a copy of the logits may not fit on the device."""

    @staticmethod
    def forward(context: Any, tensor: Tensor) -> Tensor:
        return tensor.new_empty(0).set_(tensor)  # type: ignore[call-overload, no-any-return]

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]
