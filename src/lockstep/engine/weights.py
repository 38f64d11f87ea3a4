"""Initial weights (`init_from`) and frozen weights.

Rank 0 reads initial weights into its model before it is placed, one tensor after the other; placing gives them to the
others. A model that was made on the meta device is placed first: each rank reads its own parts.

Frozen weights are not saved again with every checkpoint, where `checkpoint.save` says so. They are known by a digest: a
run that resumes gets them from the task's model() or `init_from`, and is refused where they are others.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.checkpoint.sources import Source, open_source
from lockstep.checkpoint.tensor_file import memory, stored_form
from lockstep.config.plain import nearest
from lockstep.config.schema import InitFrom
from lockstep.distributed.activity import Activity
from lockstep.distributed.group import Group
from lockstep.errors import ConfigError
from lockstep.record.logs import file_only
from lockstep.strategy.base import Strategy
from lockstep.strategy.placing import has_no_memory
from lockstep.strategy.slices import Stored

logger = logging.getLogger(__name__)

_SHOWN = 6  # names in a line of the table

Given = str | Path | Mapping[str, Any] | InitFrom


@dataclass(frozen=True)
class Table:
    """Which of a model's weights a source has, by name."""

    source: str
    count: int  # of the model's weights
    loaded: list[str]
    missing: list[str]
    unexpected: list[str]
    other_shape: list[str]  # each with both shapes
    converted: int  # loaded from another type of number
    kept: int  # frozen, and left out of the source when it was saved; or of an adapter, and the source is of before
    hints: list[str]  # the nearest name of a few that are missing

    @property
    def fits(self) -> bool:
        return not (self.missing or self.unexpected or self.other_shape)

    def lines(self, shown: int = _SHOWN) -> list[str]:
        head = f"init_from: {self.source}: {len(self.loaded)} of the model's {self.count} weights loaded"
        if self.converted:
            head += f", {self.converted} of them from another type of number"
        if self.kept:
            head += f"; {self.kept} stay as they are, frozen ones or those of an adapter, which it has none of"
        rows = {"missing": self.missing, "unexpected": self.unexpected, "of another shape": self.other_shape}
        return [head] + [
            f"  {what:<17}{len(names):>5}  {'; '.join(names[:shown])}"
            + (f" and {len(names) - shown} more" if len(names) > shown else "")
            for what, names in rows.items()
            if names
        ]

    def problem(self) -> str:
        """Returns the message where it has to fit and does not."""
        head, *rest = self.lines()
        head = head.replace(" weights loaded", " weights are there, and they do not fit it all", 1)
        if not self.loaded:
            remedy = "These are the weights of another model: name one of the same kind"
        else:
            remedy = "Set init_from.strict: false to begin with what fits"
        remedy += "; init_from.map: {'encoder.': 'model.encoder.'} says what names begin with there and here"
        return "\n".join([head, *rest, *(f"  {each}" for each in self.hints), remedy])


def as_settings(given: Given) -> InitFrom:
    from lockstep.config.load import validate

    if isinstance(given, InitFrom):
        return given
    raw = dict(given) if isinstance(given, Mapping) else {"path": str(given)}
    return validate(InitFrom, raw, {}, "run.setup: init_from")


class Pretrained:
    """Loads initial weights into a model."""

    def __init__(self, given: Given, group: Group, strategy: Strategy) -> None:
        self._settings, self._group, self._strategy = as_settings(given), group, strategy

    def before_placing(self, model: nn.Module) -> bool:
        """Loads them, unless the model has to be placed first. Returns whether it did. All ranks call it."""
        hollow = self._group.agree(lambda: has_no_memory(model), "whether the model has memory")
        if hollow:
            return False
        if self._strategy.places_rank_0:
            self._log(self._group.agree(lambda: self._load_whole(model), "the weights of init_from"))
        else:
            self._log(self._each_loads(lambda: self._load_whole(model)))
        return True

    def after_placing(self, model: nn.Module) -> None:
        self._log(self._each_loads(lambda: self._load_parts(model)))

    def _load_whole(self, model: nn.Module) -> dict[str, Any]:
        state = _tensors(model)

        def fill(chosen: dict[str, Stored]) -> None:
            with torch.no_grad():
                for name, stored in chosen.items():
                    stored.fill(state[name], (0,) * len(stored.shape))
                    self._group.activity.progress()

        return self._load(state, is_of_peft(model), fill)

    def _load_parts(self, model: nn.Module) -> dict[str, Any]:
        def fill(chosen: dict[str, Stored]) -> None:
            self._strategy.load_state_dict(model, chosen, strict=False)

        return self._load(_tensors(model), is_of_peft(model), fill)

    def _load(
        self, state: Mapping[str, Tensor], of_peft: bool, fill: Callable[[dict[str, Stored]], None]
    ) -> dict[str, Any]:
        source = open_source(self._settings.path, self._group.activity)
        try:
            table, chosen = match(state, source, self._settings, of_peft)
            if not table.loaded or (self._settings.strict and not table.fits):
                raise ConfigError(table.problem())
            fill(chosen)
        finally:
            source.close()
        return vars(table)

    def _each_loads(self, load: Any) -> dict[str, Any]:
        """Loads on all ranks or on none: raises on all of them what the first raised that could not."""
        found, problem = {}, None
        try:
            found = load()
        except ConfigError as error:
            problem = str(error)
        problems = self._group.gather(problem, "whether init_from was read")
        first = next(((rank, each) for rank, each in enumerate(problems) if each is not None), None)
        if first is not None:
            rank, text = first
            raise ConfigError(text if rank == 0 else f"{text} (on rank {rank}: every rank has to see these weights)")
        return found

    def _log(self, found: dict[str, Any]) -> None:
        table = Table(**found)
        if self._group.rank != 0:
            return
        for line in table.lines():
            (logger.info if table.fits else logger.warning)("%s", line)
        if table.lines() != (all_of_it := table.lines(shown=table.count + len(table.unexpected))):
            for line in all_of_it[1:]:
                file_only.info("%s", line)


def match(
    state: Mapping[str, Tensor], source: Source, settings: InitFrom, of_peft: bool = False
) -> tuple[Table, dict[str, Stored]]:
    """Returns which weights of the source go where. The name of a tied tensor needs none.

    With an adapter around a model, the weights go to the model inside of it; the adapter begins as it was made.
    """
    there = _renamed(source, settings.map)
    bare = {_without_adapter(name): name for name, each in state.items() if of_peft and not each.requires_grad}
    inside = bool(bare) and not any(name in state for name in there)
    there = {bare.get(name, name): each for name, each in there.items()} if inside else there
    fitting = {
        name: each for name, each in there.items() if name in state and tuple(state[name].shape) == tuple(each.shape)
    }
    shapes = [
        f"{name} {list(state[name].shape)}, there {list(each.shape)}"
        for name, each in there.items()
        if name in state and name not in fitting
    ]
    given = {id(state[name]): name for name in reversed(fitting)}  # each tensor once, by the first of its names
    absent = [name for name in state if name not in there and id(state[name]) not in given]
    kept = [
        name
        for name in absent
        if (source.without_frozen and not state[name].requires_grad) or (inside and state[name].requires_grad)
    ]
    missing = [name for name in absent if name not in set(kept)]
    unexpected = [name for name in there if name not in state]
    converted = sum(each.dtype != state[name].dtype for name, each in fitting.items())
    tensors = len({id(each) for each in state.values()})
    table = Table(
        source.described, tensors, list(given.values())[::-1], missing, unexpected, shapes, converted, len(kept),
        _hints(missing, unexpected),
    )  # fmt: skip
    return table, fitting


def _renamed(source: Source, prefixes: Mapping[str, str | None]) -> dict[str, Stored]:
    """Returns the weights under their names here; of the prefixes that match, the longest counts."""
    found: dict[str, Stored] = {}
    origin: dict[str, str] = {}
    for name, each in source.tensors.items():
        begins = max((prefix for prefix in prefixes if name.startswith(prefix)), key=len, default=None)
        new = name
        if begins is not None:
            replaced = prefixes[begins]
            if replaced is None:
                continue
            new = replaced + name.removeprefix(begins)
        if new in found:
            raise ConfigError(f"init_from.map: both {origin[new]!r} and {name!r} would become {new!r}")
        found[new], origin[new] = each, name
    unused = [prefix for prefix in prefixes if not any(name.startswith(prefix) for name in source.tensors)]
    if unused:
        some = ", ".join(list(source.tensors)[:3])
        raise ConfigError(f"init_from.map: no name in {source.described} begins with {unused[0]!r}; there are {some}")
    return found


def _without_adapter(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _hints(missing: Sequence[str], unexpected: Sequence[str]) -> list[str]:
    found = []
    for name in missing[:_SHOWN]:
        near = nearest(name, unexpected[:1000], cutoff=0.6)
        if near is not None:
            found.append(f"{name} is missing; there is {near}")
    return found[:3]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: each for name, each in model.state_dict(keep_vars=True).items() if isinstance(each, Tensor)}


@dataclass(frozen=True)
class Frozen:
    """The names of a model's frozen weights, and what their values were when the run began."""

    names: frozenset[str]
    digest: str


def is_of_peft(model: nn.Module) -> bool:
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def are_left_out(model: nn.Module, setting: str) -> bool:
    """Returns whether checkpoints leave out the frozen weights of a model, by `checkpoint.save`."""
    wanted = setting == "trainable" or (setting == "auto" and (is_of_peft(model) or is_all_frozen(model)))
    return wanted and any(not each.requires_grad for each in model.parameters())


def is_all_frozen(model: nn.Module) -> bool:
    """Returns whether nothing of a model is trained: a teacher, a reference model."""
    return not any(each.requires_grad for each in model.parameters())


def names_of(model: nn.Module) -> list[str]:
    return [
        name
        for name, each in model.state_dict(keep_vars=True).items()
        if isinstance(each, nn.Parameter) and not each.requires_grad
    ]


def digest_of(model: nn.Module, names: list[str], activity: Activity) -> str:
    """Returns a digest of these weights, before the model is placed: the same under every strategy."""
    if has_no_memory(model):
        raise ConfigError(
            "checkpoint.save: trainable leaves frozen weights out, and those of a model on the meta device are never "
            "whole anywhere to be known again by: set checkpoint.save: all"
        )
    found = hashlib.sha256()
    state = model.state_dict()
    for name in sorted(names):
        tensor: Tensor = state[name].detach().cpu()
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(memory(stored_form(tensor).contiguous()))
        activity.progress()
    return found.hexdigest()


def refuse_other(source: str, model: str, saved: str, now: Frozen | None) -> None:
    """Refuses a checkpoint without frozen weights where the model has others than it was trained with."""
    if now is None:
        raise ConfigError(
            f"{source}: holds the trained weights of {model!r} alone, and this run does not set frozen ones apart: "
            "set checkpoint.save: trainable, as the run had it that saved them, and freeze the same parameters"
        )
    if saved != now.digest:
        raise ConfigError(
            f"{source}: holds the trained weights of {model!r} alone, which were trained beside other frozen weights "
            f"than the model has now (digest {saved[:12]}, now {now.digest[:12]}). Give the model the weights that the "
            "run began with: by init_from, or by the task's model()"
        )
