"""Being asked to stop."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.distributed.group import Group
from lockstep.distributed.signals import Signals
from lockstep.engine.control_sync import SYNC_SECONDS, Asked, ControlSync, steps_between_syncs
from lockstep.engine.stop_requests import Interrupted, Preempted, StopRequests
from lockstep.errors import INTERRUPTED_EXIT_CODE, PREEMPTED_EXIT_CODE
from lockstep.runtime.cpu import CpuRuntime
from lockstep.strategy.base import Strategy


@settings(deadline=None)
@given(step_seconds=st.floats(0, 1e6), before=st.integers(1, 10_000))
def test_the_steps_between_syncs_are_bounded(step_seconds: float, before: int) -> None:
    steps = steps_between_syncs(step_seconds, before)
    assert 1 <= steps <= min(4 * before, 10_000)
    assert steps == 1 or steps * step_seconds <= SYNC_SECONDS


@pytest.mark.parametrize(
    ("step_seconds", "before", "expected"),
    [
        (60.0, 1, 1),  # a step longer than the pulse: every step
        (SYNC_SECONDS, 1, 1),
        (SYNC_SECONDS / 10, 100, 10),
        (SYNC_SECONDS / 10, 1, 4),  # no faster than fourfold, whatever one measurement says
        (0.0, 10_000, 10_000),
        (float("inf"), 8, 1),
    ],
)
def test_steps_between_syncs(step_seconds: float, before: int, expected: int) -> None:
    assert steps_between_syncs(step_seconds, before) == expected


@settings(deadline=None)
@given(step_seconds=st.floats(1e-4, 1.0))
def test_a_steady_pace_is_reached_and_kept(step_seconds: float) -> None:
    steps = 1
    for _ in range(10):
        steps = steps_between_syncs(step_seconds, steps)
    assert steps == max(1, int(SYNC_SECONDS / step_seconds))
    assert steps_between_syncs(step_seconds, steps) == steps


# Signals


def at_work() -> StopRequests:
    request = StopRequests()
    request.begun = True
    return request


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_remembered_and_handlers_are_put_back(number: signal.Signals) -> None:
    request, before = at_work(), signal.getsignal(number)
    with request.listening(launched=False):
        assert request.leave is None
        os.kill(os.getpid(), number)
        assert request.leave == number.name
    assert signal.getsignal(number) is before


def test_a_second_signal_at_once_is_the_same_request() -> None:
    """A terminal signals the launcher and all ranks together, and the launcher passes it on."""
    request = at_work()
    with request.listening(launched=False):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    assert request.leave == "SIGINT"


def test_a_second_request_in_a_notebook_ends_the_cell_and_not_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.engine.stop_requests.SAME_REQUEST_SECONDS", 0.0)
    monkeypatch.setattr(sys, "ps1", "In [1]: ", raising=False)
    request = at_work()
    with pytest.raises(KeyboardInterrupt), request.listening(launched=False):
        os.kill(os.getpid(), signal.SIGINT)
        assert request.leave == "SIGINT"
        time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)


def test_under_a_launcher_the_terminal_is_left_to_it() -> None:
    request = at_work()
    with request.listening(launched=True):
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU):
            os.kill(os.getpid(), number)
        assert request.leave is None
        os.kill(os.getpid(), signal.SIGTERM)
    assert request.leave == "SIGTERM"


def test_before_the_first_step_there_is_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.engine.stop_requests.interactive", lambda: False)  # as it is, for tests beside others
    request = StopRequests()
    with pytest.raises(Interrupted) as raised, request.listening(launched=True, alone=True):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert (raised.value.code, raised.value.reason) == (INTERRUPTED_EXIT_CODE, "SIGTERM")
    several = StopRequests()
    with several.listening(launched=True):
        os.kill(os.getpid(), signal.SIGTERM)
    assert several.leave == "SIGTERM", "the others would wait for this one: they leave together, after the first step"


def test_a_terminal_that_hangs_up_asks_to_leave_unless_that_was_ignored_from_the_start() -> None:
    request, before = at_work(), signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        with request.listening(launched=False):
            os.kill(os.getpid(), signal.SIGHUP)
            assert request.leave is None
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with request.listening(launched=False):
            os.kill(os.getpid(), signal.SIGHUP)
            assert request.leave == "SIGHUP"
    finally:
        signal.signal(signal.SIGHUP, before)


def test_only_ctrl_c_a_second_time_means_at_once() -> None:
    signals = Signals(save_on_request=True)
    signals._SAME_REQUEST_SECONDS = 0.0  # type: ignore[misc]
    with signals.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (signals.count, signals.how_to_end) == (1, "Ctrl-C (SIGINT)")
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.count == 2


def test_signals_that_ask_for_nothing_end_nobody() -> None:
    signals = Signals(save_on_request=False)
    with signals.listening():
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGPROF):
            os.kill(os.getpid(), number)
    assert (signals.count, signals.save) == (0, False)


def test_handlers_are_put_back_after_a_failure() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="inside"), StopRequests().listening(launched=False):
        raise ValueError("inside")
    assert signal.getsignal(signal.SIGTERM) is before


def test_outside_of_the_main_thread_signals_are_left_alone() -> None:
    handlers = []

    def listen() -> None:
        with StopRequests().listening(launched=False):
            handlers.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=listen)
    thread.start()
    thread.join(10)
    assert handlers == [before]


def test_preempted_is_an_orderly_exit_that_user_code_does_not_catch() -> None:
    error = Preempted("SIGTERM on rank 0")
    assert not isinstance(error, Exception)
    assert (error.code, error.reason) == (PREEMPTED_EXIT_CODE, "SIGTERM on rank 0")


# The pulse, in a world of one


def test_alone_a_request_is_known_at_the_next_step() -> None:
    request = StopRequests()
    control_sync = ControlSync(Group(0, 1, 10.0), request, Strategy(CpuRuntime()))
    assert control_sync.beat(1) == Asked()
    request.leave = "SIGTERM"
    assert control_sync.beat(2) == Asked(leave="SIGTERM on rank 0")


def test_the_clock_goes_on_from_where_it_was_restored() -> None:
    control_sync = ControlSync(Group(0, 1, 10.0), StopRequests(), Strategy(CpuRuntime()))
    control_sync.start(step=7, clock=1000.0)
    assert control_sync.clock == 1000.0
    control_sync.beat(8)
    assert 1000.0 <= control_sync.clock <= control_sync.elapsed()
