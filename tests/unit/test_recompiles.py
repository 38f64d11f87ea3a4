"""The compile guard, on a runtime that counts what a test tells it to."""

from __future__ import annotations

import logging

import pytest
import torch

from lockstep.engine.compile_guard import WARM_UP_STEPS, CompileGuard
from lockstep.errors import Recompiled
from lockstep.runtime.cpu import CpuRuntime


class Counting(CpuRuntime):
    """Compiles when it is told to, and shows the program that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.text = 0, ""

    def compilations(self) -> int | None:
        return self.count

    def program_text(self, tensor: torch.Tensor) -> str:
        return self.text


def steps(guard: CompileGuard, runtime: Counting, compiled: list[int], width: int = 4) -> None:
    for number, new in enumerate(compiled, start=1):
        guard.begin("a step", {"x": torch.zeros(2, width)})
        guard.computed(torch.zeros(()))
        runtime.count += new
        guard.end(number)


def test_the_first_steps_may_compile(caplog: pytest.LogCaptureFixture) -> None:
    runtime = Counting()
    guard = CompileGuard(runtime, max_recompiles=0)
    steps(guard, runtime, [2, 1, 1, 1, 0, 0])
    assert guard.compilations == {"a step": 5} and guard.recompiles == 0 and not caplog.records
    assert WARM_UP_STEPS == 4


def test_an_input_with_another_shape_is_named(caplog: pytest.LogCaptureFixture) -> None:
    runtime = Counting()
    guard = CompileGuard(runtime, None)
    steps(guard, runtime, [1] * WARM_UP_STEPS)
    steps(guard, runtime, [1], width=3)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "batch['x'] was float32[2, 4] and is float32[2, 3]" in record.getMessage()


def test_a_program_that_changed_is_named_with_its_line(caplog: pytest.LogCaptureFixture) -> None:
    runtime = Counting()
    guard = CompileGuard(runtime, None)
    steps(guard, runtime, [1] * WARM_UP_STEPS)
    line = "  %9 = f32[8,{w}]{{1,0}} aten::slice(%1), location=loss@task.py:7, xla_shape=f32[8,{w}]{{1,0}}"
    for width in (7, 6, 5):
        runtime.text = line.format(w=width)
        steps(guard, runtime, [1])
    said = [record.getMessage() for record in caplog.records]
    assert "a Python value became part of the program; the next time it is named" in said[0]
    assert "f32[8,5] aten::slice in loss@task.py:7" in said[2]
    steps(guard, runtime, [1])
    assert "look at what follows it" in caplog.records[-1].getMessage()


def test_more_than_are_allowed_end_the_run() -> None:
    runtime = Counting()
    guard = CompileGuard(runtime, max_recompiles=1)
    steps(guard, runtime, [1] * WARM_UP_STEPS + [1])
    with pytest.raises(Recompiled, match=r"2 times, and xla.max_recompiles is 1"):
        steps(guard, runtime, [1])


def test_where_nothing_is_compiled_nothing_is_watched() -> None:
    guard = CompileGuard(CpuRuntime(), max_recompiles=0)
    guard.begin("a step", torch.zeros(2))
    guard.end(1)
    assert guard.settled and guard.compilations == {}
