"""Supervises the ranks of a run, on this host or on several: passes requests on, ends what is stuck, starts again."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from lockstep.distributed.failure import Failure, Report, Result, find_cause, worth_retrying
from lockstep.distributed.signals import Signals
from lockstep.errors import INTERRUPTED_EXIT_CODE, RankStalled
from lockstep.record.timeline import Timeline
from lockstep.terminal import tell

if TYPE_CHECKING:
    from lockstep.distributed.watch.stall import Stall, Watcher

_POLL_SECONDS = 0.05
_LOOK_SECONDS = 0.5
# How long ranks that have not made a step get to leave by themselves, once they are asked to.
_EARLY_SECONDS = 10.0
# How long ranks get to hear that they are to write their stacks, and to write them, before they are ended.
_DUMP_SECONDS = 1.0


class Supervised(Protocol):
    """The ranks of one attempt."""

    def poll(self, stopping: bool) -> Result | None:
        """Returns how they ended; None while they are at work. `stopping`: the launcher was asked to stop."""

    def returned(self) -> Result | None:
        """Returns what all ranks returned, also while some of them are still leaving."""

    def ask_to_stop(self) -> None: ...

    def ask_to_save(self) -> None: ...

    def dump_stacks(self) -> None: ...

    def end(self) -> None: ...

    def reports(self) -> list[Report]:
        """Returns the failures that ranks wrote down."""

    def host_of(self, rank: int) -> str: ...


def run_attempts(
    attempt: Callable[[int], Result],
    max_restarts: int,
    signals: Signals,
    timeline: Timeline,
    world_size: int,
    can_restart: Callable[[int], bool] = lambda attempt: True,
) -> Result:
    """Calls `attempt` with 0, 1, ... until one does not fail, or starting again is not allowed or makes no sense."""
    for number in range(max_restarts + 1):
        result = attempt(number)
        failure = result.failure
        if failure is None or signals.count or number == max_restarts or not worth_retrying(failure):
            break
        if not can_restart(number):
            break
        timeline.failed("restart", failure, world_size, attempt=number + 1)
        tell(
            f"lockstep: {failure.render(world_size)}\n"
            f"lockstep: restarting from the newest checkpoint (restart {number + 1} of {max_restarts})"
        )
    return result


def supervise(ranks: Supervised, watcher: Watcher | None, signals: Signals, grace: float, timeline: Timeline) -> Result:
    """Waits for the ranks of an attempt, which have `grace` seconds to save and leave once they are asked to stop."""
    from lockstep.distributed.watch.stall import RunningClock

    clock = RunningClock()
    asked, began, next_look = 0, math.inf, 0.0
    while True:
        # Not only once it was passed on: a signal to the whole group reaches ranks by itself.
        result = ranks.poll(stopping=signals.count > 0)
        if result is not None:
            return result
        now = clock.now()
        if signals.count > asked:
            asked, began = signals.count, now
            if asked > 1:
                return ranks.returned() or Result(INTERRUPTED_EXIT_CODE)
            doing = "finishing the step, saving and leaving" if ranks.returned() is None else "done, and leaving"
            tell(f"lockstep: {signals.name}: {doing}; {signals.how_to_end} to end at once")
            timeline.note("preempt", note=signals.name)
            ranks.ask_to_stop()
        if signals.save:
            signals.save = False
            ranks.ask_to_save()
        if watcher is not None and now > next_look:
            next_look = now + _LOOK_SECONDS
            stall = _look(watcher, ranks)
            timeline.show(watcher.everyone)
            if stall is not None:
                timeline.note("stall", rank=stall.ranks[0], note=stall.message)
                return _end_stalled(ranks, stall)
            if asked and not watcher.begun and now > began + _EARLY_SECONDS and ranks.returned() is None:
                # Still compiling, connecting or fetching, in code that no signal reaches; no step has been made.
                return Result(INTERRUPTED_EXIT_CODE, nothing_to_save=True)
        if now > began + grace:
            cause = f"was asked to stop and did not within {grace:g} s (timeouts.stop), so it was ended"
            return ranks.returned() or Result(5, failure=Failure(0, ranks.host_of(0), cause, 5))
        time.sleep(_POLL_SECONDS)


def _look(watcher: Watcher, ranks: Supervised) -> Stall | None:
    """Reads the heartbeats; returns a stall that ends the attempt."""
    stall = watcher.look()
    if stall is None and (slow := watcher.warning()) is not None:
        if not slow.waited_for and any(ranks.reports()):
            return slow  # a rank has failed and cannot leave
        tell(f"lockstep: {slow.message}")
        if slow.waited_for and watcher.begun:
            ranks.ask_to_save()
    return stall


def _end_stalled(ranks: Supervised, stall: Stall) -> Result:
    """Has every rank write its stacks to its log, and ends all of them."""
    ranks.dump_stacks()
    time.sleep(_DUMP_SECONDS)
    ranks.end()
    host = ranks.host_of(stall.ranks[0])
    if any(not each.consequence for each in ranks.reports()):
        return failed(ranks.reports(), {}, host)  # a rank failed, and then could not leave
    cause = f"{stall.message}. The stacks of all threads are in the ranks' logs; timeouts.stall sets the limit"
    code = RankStalled.exit_code
    failure = Failure(stall.ranks[0], host, cause, code, RankStalled.__name__, concerns_all_ranks=True)
    return Result(code, failure=failure)


def failed(reports: list[Report], exit_codes: dict[int, int], host: str, stopping: bool = False) -> Result:
    """Returns the result of ranks that failed; `stopping`: they had been asked to stop."""
    failure = find_cause(reports, exit_codes, host)
    if stopping and exit_codes.get(failure.rank) in (-signal.SIGTERM, INTERRUPTED_EXIT_CODE):
        return Result(INTERRUPTED_EXIT_CODE, nothing_to_save=True)  # before its first step
    return Result(failure.exit_code, failure=failure)
