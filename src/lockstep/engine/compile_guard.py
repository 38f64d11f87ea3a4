"""Counts compilations of the training step, and reports what changed where there is one too many."""

from __future__ import annotations

import difflib
import logging
import re
import time
from typing import Any

from torch import Tensor

from lockstep.distributed.activity import Activity
from lockstep.errors import Recompiled
from lockstep.record.timeline import Timeline
from lockstep.runtime.base import Runtime
from lockstep.runtime.moving import tensors_of

logger = logging.getLogger(__name__)

# The first steps compile more than once: an optimizer makes its state in the first and finds it in the second.
# What still compiles something new after so many steps has not settled, and never will.
WARM_UP_STEPS = 4
_SHOWN_LINES = 4


class CompileGuard:
    """Watches the training steps of one rank. A phase is a kind of step that has a separate program."""

    def __init__(self, runtime: Runtime, max_recompiles: int | None) -> None:
        self._runtime, self._max = runtime, max_recompiles
        self._active = runtime.compilations() is not None
        self._before = 0
        self._phase = ""
        self._seen: dict[str, int] = {}  # steps of every phase
        self._inputs: dict[str, dict[str, str]] = {}  # what its last step was given
        self._given: dict[str, str] = {}
        self._looking = False  # whether there is a reason to see what a loss is made of
        self._program = ""  # of the last one
        self._changed: list[str] | None = None  # since the one before; None where there is none to compare with
        self.compilations: dict[str, int] = {}  # by phase
        self.recompiles = 0

    @property
    def settled(self) -> bool:
        """Whether the current step should have nothing left to compile."""
        return not self._active or self._seen.get(self._phase, 0) >= WARM_UP_STEPS

    def begin(self, phase: str, batch: Any) -> None:
        """Notes the batch that a step begins or continues with."""
        if not self._active:
            return
        self._phase = phase
        self._before = self._runtime.compilations() or 0
        self._given = {path: _described(each) for path, each in tensors_of(batch)}

    def computed(self, loss: Tensor) -> None:
        """Looks at the program of a loss that is traced and not yet computed."""
        if self._looking:
            program, before = self._runtime.program_text(loss), self._program
            self._program, self._changed = program, _difference(before, program) if before else None

    def end(self, step: int, again: bool = False) -> None:
        """Counts what an optimizer step compiled (`again`: of another optimizer of the same step); raises where that
        was once too often."""
        if not self._active:
            return
        phase, given = self._phase, self._given
        compiled = self._runtime.compilations() or 0
        new, self._before = compiled - self._before, compiled
        settled, before = self.settled, self._inputs.get(phase)
        self._seen[phase] = self._seen.get(phase, 0) + (not again)
        self._inputs[phase] = given
        self.compilations[phase] = self.compilations.get(phase, 0) + new
        if not new or not settled:
            return
        self.recompiles += 1
        message = f"step {step} was compiled anew ({new} programs), after warm-up: {self._reason(before or {}, given)}"
        self._looking = True
        if self._max is not None and self.recompiles > self._max:
            raise Recompiled(
                f"{message}. That is {self.recompiles} times, and xla.max_recompiles is {self._max}: every one of them "
                "holds up all ranks. Keep shapes and Python values in the step the same, or raise the limit"
            )
        logger.warning(message)

    def _reason(self, before: dict[str, str], given: dict[str, str]) -> str:
        changed = [
            f"{name} was {before.get(name, 'absent')} and is {given.get(name, 'absent')}"
            for name in sorted({*before, *given})
            if before.get(name) != given.get(name)
        ]
        if changed:
            return "; ".join(changed[:_SHOWN_LINES])
        if self._changed:
            return "no input changed its shape, but what the loss is computed by did: " + "; ".join(self._changed)
        if self._changed is not None:
            return (
                "neither the inputs nor what the loss is computed by changed: look at what follows it (the optimizer, "
                "clipping, reading a tensor in the loop)"
            )
        return "no input changed its shape, so a Python value became part of the program; the next time it is named"


def be_patient_while_compiling(activity: Activity) -> None:
    """Gives a rank more time whenever torch begins to compile something."""
    from torch._dynamo import callback

    @callback.on_compile_start
    def began(*about: Any) -> None:
        activity.be_patient()


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _difference(before: str, after: str) -> list[str]:
    """Returns operations that only the second program has, each with its line of code."""
    ours, theirs = ([_operation(line) for line in text.splitlines() if "=" in line] for text in (before, after))
    changed = [line[2:] for line in difflib.ndiff(ours, theirs) if line.startswith("+ ")]
    return list(dict.fromkeys(changed))[:_SHOWN_LINES]


def _operation(line: str) -> str:
    """Returns `f32[32,10] aten::mul in loss@train.py:42`, without the numbers of operations."""
    found = re.search(r"=\s+(\S+?)(?:\{[\d,]*\})?\s+(\S+?)\(.*?\).*?location=([^,]+)", line)
    if found is None:
        return re.sub(r"%\d+", "%", line.strip())
    shape, operation, place = found.groups()
    return f"{shape} {operation} in {place}"


class Phases:
    """Notes when training began, and how long the first step took where it had to be compiled."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._began: tuple[int, float] | None = None

    def at(self, step: int, compiles: bool) -> bool:
        """Called after a step with its number. Returns whether there is no more to note."""
        if self._began is None:
            self._began = (step, time.time())
            self._timeline.note("train", self._began[1], step=step)
            return not compiles
        first, began = self._began
        if step > first:
            self._timeline.note("compile", began, time.time(), step=step)
        return step > first
