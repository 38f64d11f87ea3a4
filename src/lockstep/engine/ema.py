"""Exponential moving average of a model's weights: measured, saved and restored beside them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from lockstep.config.training import Ema
from lockstep.errors import ConfigError
from lockstep.runtime.base import Runtime, generator_states, set_generator_states
from lockstep.strategy.slices import local_part, read_like

logger = logging.getLogger(__name__)

# Before the name of what was measured with averaged weights: val/ema/loss beside val/loss.
PREFIX = "ema/"


class Average:
    """Averages the trained parameters of one model; a rank with a part of a parameter has that part of the average.

    Buffers (running statistics) are not averaged.
    """

    def __init__(self, module: nn.Module, settings: Ema, runtime: Runtime) -> None:
        self.settings, self._runtime = settings, runtime
        self._parameters = {name: each for name, each in module.named_parameters() if each.requires_grad}
        self._frozen = {name: each for name, each in module.named_parameters() if not each.requires_grad}
        self._weights: dict[str, Tensor] | None = None  # from the first step on
        self.updates = 0
        self.was_saved = False  # what was loaded had it
        self.is_in_place = False  # whether the model has it for weights now

    @property
    def weights(self) -> dict[str, Tensor]:
        """The average by parameter name; before the first step, the parameters as they are."""
        if self._weights is None:
            with torch.no_grad():
                self._weights = {name: _wide(each.detach().clone()) for name, each in self._parameters.items()}
            self._runtime.end_of_program()
        return self._weights

    def begin(self) -> None:
        """Starts the average from the weights before the first step; that of unfrozen ones before their first."""
        self._follow([name for name, each in self._frozen.items() if each.requires_grad])
        _ = self.weights

    def _follow(self, names: Sequence[str]) -> None:
        for name in names:
            self._parameters[name] = parameter = self._frozen.pop(name)
            if self._weights is not None:
                self._weights[name] = _wide(parameter.detach().clone())

    def update(self, step: int) -> None:
        """Updates the average after a step."""
        if step % int(self.settings.every.count):
            return
        averages, now = self._pairs()
        self.updates += 1
        weight = 1.0 - self.decay
        with torch.no_grad():
            if self._runtime.fixed_shapes:
                # A number would become part of the program, and every new one a program to compile.
                on_device = torch.tensor(weight, dtype=torch.float32).to(self._runtime.device)
                for average, parameter in zip(averages, now, strict=True):
                    average.add_((parameter.to(average.dtype) - average) * on_device)
            else:
                for first, second in _by_kind(averages, now):
                    torch._foreach_lerp_(first, [each.to(mine.dtype) for mine, each in zip(first, second, strict=True)],
                                         weight)  # fmt: skip
        self._runtime.end_of_program()

    @property
    def decay(self) -> float:
        """The decay of the last update."""
        settings, n = self.settings, self.updates
        return min(settings.decay, (1 + n) / (10 + n)) if settings.warmup else settings.decay

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the averages in place of the weights inside the block, and then the weights back, bit for bit."""
        averages, now = self._pairs()
        with torch.no_grad():
            kept = [each.clone() for each in now]
            for parameter, average in zip(now, averages, strict=True):
                parameter.copy_(average)
        self._runtime.end_of_program()
        self.is_in_place = True
        try:
            yield
        finally:
            self.is_in_place = False
            with torch.no_grad():
                for parameter, before in zip(now, kept, strict=True):
                    parameter.copy_(before)
            self._runtime.end_of_program()

    def state(self) -> dict[str, Any]:
        return {"updates": self.updates, "weights": dict(self.weights)}

    def load(self, state: Mapping[str, Any] | None, source: str) -> None:
        """Loads what state() gave. Without any, or of other parameters, the average starts from the weights, which
        are restored already."""
        self._weights, self.updates, self.was_saved = None, 0, False
        if state is not None:
            self._follow([name for name in state["weights"] if name in self._frozen])
        if state is None or state["weights"].keys() != self._parameters.keys():
            logger.info("%s has no average of these weights: it starts from them", source)
            return
        found = read_like(state["weights"], self.weights)
        with torch.no_grad():
            for name, mine in self.weights.items():
                local_part(mine).copy_(local_part(found[name]))
        self.updates, self.was_saved = int(state["updates"]), True

    def _pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        """Returns this rank's parts of averages and weights. Looked up every time: restoring may move them."""
        averages = [local_part(each) for each in self.weights.values()]
        return averages, [local_part(each) for each in self._parameters.values()]


def ema_settings(given: float | Mapping[str, Any] | Ema) -> Ema:
    """Returns the settings for what `run.setup(ema=...)` is given: a decay, or all of `train.ema`."""
    if isinstance(given, Ema):
        return given
    try:
        return Ema.model_validate(given if isinstance(given, Mapping) else {"decay": given})
    except ValidationError as problems:
        raise ConfigError(
            f"run.setup: ema must be a decay between 0 and 1, or a mapping with decay, every and warmup, got "
            f"{given!r}: {problems.errors()[0]['msg']}"
        ) from None


def measured_beside(
    averages: Sequence[Average], runtime: Runtime, measure: Callable[[], dict[str, dict[str, Any]] | None]
) -> dict[str, dict[str, Any]] | None:
    """Measures with the weights and, under `ema/` names, with their averages; None where `measure` returns that.

    Random numbers continue as if the averages had not been measured.
    """
    before = generator_states(runtime)
    found = measure()
    if found is None or not averages:
        return found
    between = generator_states(runtime)
    with in_place(averages):
        more = measure()
    if more is None:  # a resumed run begins again with the weights
        set_generator_states(runtime, before)
        return None
    set_generator_states(runtime, between)
    return {
        name: values | {PREFIX + metric: value for metric, value in more[name].items()}
        for name, values in found.items()
    }


@contextlib.contextmanager
def in_place(averages: Sequence[Average]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for each in averages:
            stack.enter_context(each.in_place())
        yield


def _wide(tensor: Tensor) -> Tensor:
    """Returns it in float32: in half precision an average would stand still."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _by_kind(averages: list[Tensor], now: list[Tensor]) -> list[tuple[list[Tensor], list[Tensor]]]:
    kinds: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]] = {}
    for average, parameter in zip(averages, now, strict=True):
        first, second = kinds.setdefault((average.dtype, average.device), ([], []))
        first.append(average)
        second.append(parameter)
    return list(kinds.values())
