"""Loss scaling for float16: small gradients would vanish in it, so the loss is multiplied before its backward pass.

The arithmetic of torch's GradScaler with its numbers. Whether gradients are finite is asked after they were reduced, so
that all ranks answer alike, also where each has a part of them; and there is one scale for a whole step, however many
optimizers it has.
"""

from __future__ import annotations

from typing import Any

from lockstep.errors import ConfigError

FIRST = 2.0**16
_GROWTH, _BACKOFF, _PATIENCE = 2.0, 0.5, 2000


class LossScale:
    """A power of two, so that multiplying and dividing by it rounds nothing. Doubled after so many good steps, halved
    after a step whose gradients overflowed; never between a backward pass and the step that uses its gradients."""

    def __init__(self) -> None:
        self._scale, self._good = FIRST, 0
        self._step = 0  # the one that the scale is used for
        self._overflowed: bool | None = None  # in that step; None before any of its optimizers has stepped

    def of(self, step: int) -> float:
        """What the losses of a step are multiplied with."""
        if step != self._step:
            self._scale, self._good = self._after()
            self._step, self._overflowed = step, None
        return self._scale

    def noted(self, step: int, finite: bool) -> None:
        """An optimizer of a step found its gradients finite, or not."""
        self.of(step)
        self._overflowed = bool(self._overflowed) or not finite

    @property
    def next(self) -> float:
        """That of the step to come."""
        return self._after()[0]

    def _after(self) -> tuple[float, int]:
        if self._overflowed is None:
            return self._scale, self._good
        if self._overflowed:
            return self._scale * _BACKOFF, 0
        return (self._scale * _GROWTH, 0) if self._good + 1 == _PATIENCE else (self._scale, self._good + 1)

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self._scale, "good": self._good, "step": self._step, "overflowed": self._overflowed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scale, self._good = float(state["scale"]), int(state["good"])
        self._step, self._overflowed = int(state["step"]), state["overflowed"]


def refuse_half_weights(dtypes: set[str]) -> None:
    """What is scaled is to be scaled back: gradients in float16 would lose what the scaling saved."""
    if "torch.float16" in dtypes:
        raise ConfigError(
            "train.precision: fp16 computes in float16 and keeps weights in float32, but the model has parameters in "
            "float16: make it in float32 (no .half(), torch_dtype=torch.float32)"
        )
