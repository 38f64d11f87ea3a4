"""What fully_shard lacks: a second backward pass, methods beside forward, ranks that use different parameters, and the
name of the block that a rank is in."""

from __future__ import annotations

import functools
import inspect
import zlib
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.utils._pytree import tree_leaves

from lockstep.distributed.group import Group
from lockstep.errors import ConfigError
from lockstep.runtime.moving import map_tensors

_MODEL = "the model"
_SHOWN = 6  # so many names in a message
_FILES = ("_fsdp_state.py", "_fsdp_param_group.py")
_GATHER = {"_pre_forward", "_pre_backward", "pre_forward", "pre_backward", "unshard", "wait_for_unshard"}
_REDUCE = {"post_backward", "finalize_backward", "_root_post_backward_final_callback"}


class SecondBackward:
    def __init__(self, model: nn.Module) -> None:
        assert isinstance(model, FSDPModule)
        self._model: FSDPModule = model
        self._units = [each for each in model.modules() if isinstance(each, FSDPModule)]
        self.is_possible = False  # whether a backward pass of this step has made a graph
        model.register_forward_hook(self._watch)

    def computed(self) -> None:
        """Reduces gradients that came after torch had reduced those of their block: it occurs in both graphs."""
        if not self.is_possible:
            return
        for unit in self._units:
            for group in param_groups(unit._get_fsdp_state()):
                group.post_backward()
                group.finalize_backward()

    def release(self) -> None:
        """Parameters have changed, or are about to."""
        if self.is_possible:
            self.is_possible = False
            self._model.set_reshard_after_backward(True)
        self.reshard()

    def reshard(self) -> None:
        """Frees what is gathered. Without a backward pass (of what was detached, say), torch keeps the values as they
        are, and who looks at the module finds them in place of its parameters."""
        for unit in self._units:
            if not all(each.is_sharded for each in param_groups(unit._get_fsdp_state())):
                unit.reshard()

    def _watch(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            map_tensors(self._follow, output)

    def _follow(self, tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            tensor.register_hook(self._goes_back)  # type: ignore[no-untyped-call]
        return tensor

    def _goes_back(self, gradient: Tensor) -> None:
        if torch.is_grad_enabled() and not self.is_possible:  # only while a graph of the backward pass is made
            self.is_possible = True
            self._model.set_reshard_after_backward(False)


def reshard_without_backward(module: nn.Module, inputs: Any, output: Any) -> None:
    """Frees what torch keeps gathered until a backward pass, where none comes."""
    if isinstance(module, FSDPModule):
        learns = torch.is_grad_enabled() and any(
            isinstance(each, Tensor) and each.requires_grad for each in tree_leaves(output)
        )
        if not learns:
            module.reshard()


def let_methods_compute(model: nn.Module) -> None:
    """Gathers parameters for the model's methods beside forward, too; not where forward calls them."""
    depth = [0]

    def begin(*about: Any) -> None:
        depth[0] += 1

    def end(*about: Any) -> None:
        depth[0] -= 1

    model.register_forward_pre_hook(begin, prepend=True)
    model.register_forward_hook(end, always_call=True)
    for name, _ in inspect.getmembers(type(model), inspect.isfunction):
        if name.startswith("_") or hasattr(nn.Module, name) or hasattr(FSDPModule, name):
            continue
        plain = getattr(model, name)
        register_fsdp_forward_method(model, name)
        setattr(model, name, _Method(plain, getattr(model, name), depth))


class _Method:
    def __init__(self, plain: Callable[..., Any], together: Callable[..., Any], depth: list[int]) -> None:
        self._plain, self._together, self._depth = plain, together, depth
        functools.update_wrapper(self, plain)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if self._depth[0]:
            return self._plain(*inputs, **named)
        self._depth[0] += 1
        try:
            return self._together(*inputs, **named)
        finally:
            self._depth[0] -= 1


class UsedParameters:
    """Finds ranks whose gradients are not of the same parameters. Torch gathers and reduces what comes next on each
    rank: of two layers of one shape, one gets the gradients of the other, and nothing shows."""

    def __init__(self) -> None:
        self._digest = 0
        self._patterns: dict[bytes, None] = {}  # which parameters had gradients, since the last comparison

    def note(self, parameters: Iterable[nn.Parameter]) -> int:
        """Takes which have gradients. Returns a digest of all since the last comparison."""
        pattern = bytes(each.grad is not None for each in parameters)
        self._digest = zlib.crc32(pattern, self._digest)
        self._patterns[pattern] = None
        return self._digest

    def compare(self, digests: Sequence[int], names: Sequence[str], group: Group) -> int:
        """All ranks call it after the same step, with the digests of all. Returns that of nothing."""
        mine = [each.hex() for each in self._patterns]
        self._digest = 0
        self._patterns.clear()
        if len(set(digests)) == 1:
            return 0
        everywhere = group.gather(mine, "which parameters got gradients")
        patterns = [bytes.fromhex(each) for of_rank in everywhere for each in of_rank]
        differ = [name for name, flags in zip(names, zip(*patterns, strict=True), strict=True) if len(set(flags)) > 1]
        raise ConfigError(
            f"strategy: ranks have not used the same parameters in a step: {', '.join(differ[:_SHOWN])} got gradients "
            "on some ranks and not on others, and torch's fully_shard has mixed them up with those of other "
            "parameters. Nothing was saved from these weights. Call every layer on every rank, with no rows where it "
            "has none, or use strategy: ddp with find_unused_parameters: true"
        )


class BlockTracker:
    def __init__(self) -> None:
        self._names: dict[int, str] = {}  # by the identity of the module
        self._states: list[tuple[str, Any]] = []

    def add(self, name: str, unit: nn.Module) -> None:
        """Adds a block that fully_shard was applied to; a model itself has no name."""
        assert isinstance(unit, FSDPModule)
        self._names[id(unit)] = name or _MODEL
        self._states.append((name, unit._get_fsdp_state()))

    def locate(self, stacks: Iterable[FrameType]) -> tuple[str, bool] | None:
        """Returns `the parameters of layers.3`, and whether the rank waits there; None outside of all models.

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
        """Returns what is exchanged, where torch is about to exchange something."""
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
    """Returns the parameter groups of a block, of which older versions of torch have one or none."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
