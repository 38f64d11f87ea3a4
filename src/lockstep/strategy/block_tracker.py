"""Finds the block of a sharded model that a rank is in, and whether it waits there for other ranks.

It is asked when a rank makes no progress, and looks at Python's stacks and at the state of torch's FSDP then. Training
itself notes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import FrameType
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

_MODEL = "the model"
_FILES = ("_fsdp_state.py", "_fsdp_param_group.py")
_GATHER = {"_pre_forward", "_pre_backward", "pre_forward", "pre_backward", "unshard", "wait_for_unshard"}
_REDUCE = {"post_backward", "finalize_backward", "_root_post_backward_final_callback"}


class BlockTracker:
    def __init__(self) -> None:
        self._names: dict[int, str] = {}  # by the identity of the module
        self._states: list[tuple[str, Any]] = []

    def add(self, name: str, unit: nn.Module) -> None:
        """Add a block that fully_shard was applied to; a model itself has no name."""
        assert isinstance(unit, FSDPModule)
        self._names[id(unit)] = name or _MODEL
        self._states.append((name, unit._get_fsdp_state()))

    def locate(self, stacks: Iterable[FrameType]) -> tuple[str, bool] | None:
        """`the parameters of layers.3`, and whether the rank waits there; None outside of all models.

        `stacks` are the innermost frames of threads.
        """
        for stack in stacks:
            if (found := self._exchange(stack)) is not None:
                return found, True
        forward = [name for name, state in self._states if state._training_state.name == "FORWARD"]
        backward = [
            name for name, state in self._states
            if any(group._training_state.name == "PRE_BACKWARD" for group in param_groups(state))
        ]  # fmt: skip
        for doing, inside in (("forward", forward), ("backward", backward)):
            if inside:
                return f"the {doing} pass of {next(filter(None, inside), _MODEL)}", False
        return None

    def _exchange(self, frame: FrameType | None) -> str | None:
        """What is exchanged, where torch is about to exchange something."""
        while frame is not None:
            code = frame.f_code
            if code.co_filename.endswith(_FILES) and code.co_name in _GATHER | _REDUCE:
                group: Any = frame.f_locals.get("self")
                modules: Any = getattr(group, "modules", None) or getattr(group, "_modules", ())
                name = next((self._names[id(each)] for each in modules if id(each) in self._names), _MODEL)
                return f"the {'parameters' if code.co_name in _GATHER else 'gradients'} of {name}"
            frame = frame.f_back
        return None


def param_groups(state: Any) -> list[Any]:
    """The parameter groups of a block, of which torch up to 2.9 has one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
