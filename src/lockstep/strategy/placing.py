"""Gives first weights to models made on the meta device, and splits models over ranks block by block.

Each module of a model on the meta device is initialised from its own seed: the same numbers on any number of ranks and
in any order. For a split model, rank 0 has the values. One unit after the other (a block, at last what is outside of
all blocks) gets its values from rank 0, and is split before the next: the model is never whole on more than one rank.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.distributed.group import Group
from lockstep.errors import ConfigError
from lockstep.runtime.base import from_rank_0

logger = logging.getLogger(__name__)

Initialise = Callable[[nn.Module], object]
Parallelize = Callable[[nn.Module, Any], nn.Module | None]

_STREAM = 4  # of random numbers; data/permutation.py and data/seeding.py have the others

# What a buffer holds until something sets it: any number would do that nobody takes for a result.
_UNSET = 0


def has_no_memory(model: nn.Module) -> bool:
    return any(each.is_meta for each in model.parameters())


def initialise(model: nn.Module, seed: int, by: Initialise | None = None) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Gives values to every parameter and buffer that has none, on the host; returns (before, after) of parameters."""
    replaced = []
    for name, module in model.named_modules():
        replaced += initialise_module(model, name, module, seed, by)
    return replaced


def initialise_module(
    model: nn.Module, name: str, module: nn.Module, seed: int, by: Initialise | None = None
) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Gives values to what this module itself has, also where others share it (tied weights)."""
    own = [(key, each) for key, each in module.named_parameters(recurse=False) if each.is_meta]
    replaced = []
    for _, parameter in own:
        fresh = nn.Parameter(torch.empty_like(parameter, device="cpu"), requires_grad=parameter.requires_grad)
        _replace(model.modules(), parameter, fresh)
        replaced.append((parameter, fresh))
    hollow = [key for key, each in module.named_buffers(recurse=False) if each.is_meta]
    for key in hollow:
        module._buffers[key] = torch.empty_like(module._buffers[key], device="cpu").fill_(_UNSET)  # type: ignore[arg-type]
    if not own and not hollow:
        return replaced
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_seed_of(name, seed))
        with torch.no_grad():
            _fill(name, module, [key for key, _ in own] + hollow, by)
    return replaced


def _fill(name: str, module: nn.Module, missing: list[str], by: Initialise | None) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if by is not None:
        by(module)
    elif callable(reset):
        reset()
    else:
        raise ConfigError(
            f"{name + '.' if name else ''}{missing[0]}: the model was made on the meta device, and "
            f"{type(module).__name__} does not say how it is initialised: give it a method reset_parameters(), or the "
            "task a method init_weights(module) (in a loop of your own: run.setup(..., init_weights=...))"
        )


def _replace(modules: Iterable[nn.Module], old: nn.Parameter, fresh: nn.Parameter) -> None:
    for module in modules:
        for key, each in module._parameters.items():
            if each is old:
                module._parameters[key] = fresh


def _seed_of(name: str, seed: int) -> int:
    words = np.random.SeedSequence([_STREAM, seed, zlib.crc32(name.encode())]).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))


def tensors_without_memory(module: nn.Module) -> dict[str, Tensor]:
    """Returns plain attributes of a module that are tensors without values: no parameter, no buffer."""
    return {key: each for key, each in vars(module).items() if isinstance(each, Tensor) and each.is_meta}


@dataclass(frozen=True)
class Owned:
    """A parameter as it was before, with all its names and places; the first name is the model's."""

    before: nn.Parameter
    names: tuple[str, ...]
    places: tuple[tuple[nn.Module, str], ...]

    @property
    def now(self) -> nn.Parameter:
        module, key = self.places[0]
        found = module._parameters[key]
        assert found is not None
        return found

    def put(self, fresh: nn.Parameter) -> None:
        for module, key in self.places:
            module._parameters[key] = fresh


def owned_by(model: nn.Module, taken: Iterable[nn.Parameter] = ()) -> dict[int, Owned]:
    """Returns every parameter once, with all its names, by its identity; none that is `taken` by another model."""
    found: dict[int, Owned] = {}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                known = found.get(id(parameter))
                names = (*(known.names if known else ()), f"{name}.{key}" if name else key)
                places = (*(known.places if known else ()), (module, key))
                found[id(parameter)] = Owned(parameter, names, places)
    if shared := [found[id(each)].names[0] for each in taken if id(each) in found]:
        raise ConfigError(
            f"run.setup: {', '.join(shared[:6])} belongs to a model that was set up before, too, and each model is "
            "split by itself: they would train two copies. Give run.setup one module that contains both, or use "
            "strategy: ddp"
        )
    if hooked := [each.names[0] for each in found.values() if each.before._post_accumulate_grad_hooks]:
        raise ConfigError(
            f"run.setup: {', '.join(hooked[:6])} has a hook (register_post_accumulate_grad_hook), which would be lost: "
            "the model is split into new parameters. Register it after run.setup"
        )
    return found


def units(model: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Returns what is split by itself, the whole model last. A block that shares a parameter with others is part of the
    rest: apart, each of them would train a copy of it."""
    inside = {id(module) for block in blocks.values() for module in block.modules()}
    outside = [p for each in model.modules() if id(each) not in inside for p in each.parameters(recurse=False)]
    holders: dict[int, set[str]] = {id(parameter): {""} for parameter in outside}
    for name, block in blocks.items():
        for parameter in block.parameters():
            holders.setdefault(id(parameter), set()).add(name)
    shared = {name for names in holders.values() if len(names) > 1 for name in names}
    for name in sorted(shared - {""}):
        logger.info("block %s shares a parameter with what is outside of it: it is not split by itself", name)
    return {**{name: block for name, block in blocks.items() if name not in shared}, "": model}


class Filling:
    """Gives every rank the values that rank 0 has, one unit at a time."""

    def __init__(
        self, model: nn.Module, group: Group, device: torch.device, seed: int = 0, by: Initialise | None = None
    ) -> None:
        self._model, self._group, self._device = model, group, device
        self._seed, self._by = seed, by
        self._names = {id(module): name for name, module in model.named_modules()}

    def fill(self, unit: nn.Module, owned: Sequence[Owned], part: Callable[[str, Tensor], Tensor]) -> None:
        """Fills the parameters of a unit, on the device; `part` takes this rank's part of a whole value.

        What an optimizer still holds of the parameters before gives its memory back.
        """
        if self._group.rank == 0:
            for module in unit.modules():
                initialise_module(self._model, self._names[id(module)], module, self._seed, self._by)
        sources = [each.now.detach() for each in owned]
        for each, value in zip(owned, self.from_rank_0(sources), strict=True):
            before = each.before
            each.put(nn.Parameter(part(each.names[0], value), requires_grad=before.requires_grad))
            if not before.is_meta:
                before.data = before.data.new_empty(0)

    def fill_buffers(self) -> None:
        """Fills buffers, and tensors that modules keep as plain attributes."""
        places = [
            (each, key) for each in self._model.modules() for key in each._buffers if each._buffers[key] is not None
        ]
        before: list[Tensor] = [module._buffers[key] for module, key in places]  # type: ignore[misc]
        unique = list({id(each): each for each in before}.values())
        now = dict(zip(map(id, unique), self.from_rank_0(unique), strict=True))
        for (module, key), each in zip(places, before, strict=True):
            module._buffers[key] = now[id(each)]
        self._fill_attributes()

    def _fill_attributes(self) -> None:
        """Ranks that made the model on the meta device miss them, all alike; rank 0 does not know which."""
        modules = dict(self._model.named_modules())
        mine = [[path, key] for path, module in modules.items() for key in tensors_without_memory(module)]
        names = self._group.gather(mine, "tensors of the model that are no parameters")[-1]
        found = [vars(modules[path])[key] for path, key in names]
        for (path, key), value in zip(names, self.from_rank_0(found), strict=True):
            if self._group.rank != 0:
                setattr(modules[path], key, value.cpu())  # where a model is before it is placed

    def from_rank_0(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns rank 0's values, on the device; on other ranks only shape and type of the tensors count."""
        if self._group.world_size == 1:
            return [each.to(self._device) for each in tensors]
        return [each.to(self._device, copy=True) for each in from_rank_0(tensors, self._device)]
