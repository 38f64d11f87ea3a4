"""Weights that training leaves as they are: not saved again with every checkpoint, where the run is told so.

What they were is known by a digest. A run that goes on gets them from where they came from, the task's model() or
`init_from`, and is refused where they are others.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass

from torch import Tensor, nn

from lockstep.checkpoint.tensor_file import memory, stored_form
from lockstep.distributed.activity import Activity
from lockstep.errors import ConfigError
from lockstep.strategy.placing import has_no_memory


@dataclass(frozen=True)
class Frozen:
    """The names of a model's frozen weights, and what their values were when the run began."""

    names: frozenset[str]
    digest: str


def is_of_peft(model: nn.Module) -> bool:
    """Whoever has made one has imported peft."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def are_left_out(model: nn.Module, setting: str) -> bool:
    """Whether the frozen weights of a model are left out of its checkpoints, by `checkpoint.save`."""
    wanted = setting == "trainable" or (setting == "auto" and (is_of_peft(model) or is_all_frozen(model)))
    return wanted and any(not each.requires_grad for each in model.parameters())


def is_all_frozen(model: nn.Module) -> bool:
    """Whether nobody trains it: a teacher, a reference model."""
    return not any(each.requires_grad for each in model.parameters())


def names_of(model: nn.Module) -> list[str]:
    return [
        name
        for name, each in model.state_dict(keep_vars=True).items()
        if isinstance(each, nn.Parameter) and not each.requires_grad
    ]


def digest_of(model: nn.Module, names: list[str], activity: Activity) -> str:
    """Of the values of these weights, before the model is placed: the same under every strategy."""
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
    """A checkpoint without frozen weights goes with those that it was trained on, and with no others."""
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
