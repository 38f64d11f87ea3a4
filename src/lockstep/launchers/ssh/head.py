"""The head of a job, on the first host: it assigns ranks, watches all hosts, ends or restarts them, and concludes.

A host that is lost, or whose ranks fail, ends the attempt everywhere. Another one starts from the newest checkpoint,
with a spare in place of a host that is gone.
"""

from __future__ import annotations

import json
import shlex
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.distributed.failure import Failure, Report, Result, find_cause, how_to_plan, worth_retrying
from lockstep.distributed.signals import Signals
from lockstep.distributed.store.client import Client
from lockstep.distributed.store.private import store_prefix
from lockstep.distributed.topology import ranks_text
from lockstep.distributed.watch.stall import Limits, RunningClock, Watcher
from lockstep.errors import INTERRUPTED_EXIT_CODE, PREEMPTED_EXIT_CODE, BucketBehind, RankStalled
from lockstep.launchers.ssh.folder import Job
from lockstep.launchers.ssh.line import GONE_SECONDS, HEAD_KEY, closed_key, closed_patience, decoded, host_key
from lockstep.launchers.ssh.record import Order, RankRange, spread
from lockstep.mirror.mirror import Mirror
from lockstep.record import timeline as timelines
from lockstep.record.run_folder import note_end, read_summary
from lockstep.record.timeline import Timeline
from lockstep.runs.report import leave_report
from lockstep.shown import shown
from lockstep.terminal import tell

_LOOK_SECONDS = 0.1
_WATCH_SECONDS = 0.5
# How long the ranks of other hosts get to fall by themselves, so that what they say is known too.
_FALL_SECONDS = 1.5
# How long hosts get to end their ranks, and to hear that the job is over.
_END_SECONDS, _FINISH_SECONDS = 20.0, 5.0
# How long ranks that have not made a step get to leave by themselves, once they are asked to.
_EARLY_SECONDS = 10.0
_DUMP_SECONDS = 1.0


class HostLost(Exception):
    """Its name is the kind of failure in reports."""


class Head:
    def __init__(self, order: Order, store: Client, limits: Limits, signals: Signals) -> None:
        self._order, self._store, self._limits, self._signals = order, store, limits, signals
        config = order.run_config()
        self._grace, self._join = config.timeouts.stop, config.timeouts.rendezvous
        self._restarts = config.launch.max_restarts
        self._clock = RunningClock()
        self._count = 0
        self._message: dict[str, Any] = {"attempt": -1}
        self._said: dict[int, dict[str, Any]] = {}
        self._heard: dict[int, float] = {}
        self._closed: dict[int, bytes | None] = {}  # the last connection of a host that was closed
        self._closed_at: dict[int, float] = {}  # of those that have not come back
        self.lost: dict[int, str] = {}
        self._ranks: list[RankRange] = []
        self._timeline: Timeline
        self._blind: set[int] = set()  # hosts that do not see the run's folder, already reported

    def run(self) -> Result:
        with timelines.opened(Path(self._order.folder), lambda text: tell(f"lockstep: {text}")) as self._timeline:
            self._timeline.note("start", note=", ".join(each.name for each in self._order.hosts))
            result = self._run()
            self._timeline.ended(result, self.world_size)
            return result

    def _run(self) -> Result:
        failure = self._gather()
        if failure is not None:
            return self._finish(Result(failure.exit_code, failure=failure))
        if self._signals.count:  # asked to stop while hosts were still coming
            return self._finish(Result(INTERRUPTED_EXIT_CODE, nothing_to_save=True))
        for attempt in range(self._restarts + 1):
            result = self._attempt(attempt)
            failure = result.failure
            if failure is None or self._signals.count or attempt == self._restarts or not worth_retrying(failure):
                break
            if len(self._living()) < self._order.nodes:
                gone = ", ".join(self._name(host) for host in self.lost)
                tell(f"lockstep: no other attempt: {gone} is gone, and launch.hosts has no spare that is left")
                break
            self._timeline.failed("restart", failure, self.world_size, attempt=attempt + 1)
            self._tell_restart(failure, attempt)
        return self._finish(result)

    def give_up(self, error: Exception) -> Result:
        """Ends the job after an error of the head, so that nobody waits for it."""
        cause = f"the head of the job failed: {type(error).__name__}: {error}; its traceback is in the console"
        failure = Failure(0, self._name(0), cause, 5, type(error).__name__, concerns_all_ranks=True)
        return self._finish(Result(5, failure=failure))

    def _gather(self) -> Failure | None:
        """Waits for every host to connect."""
        deadline = self._clock.now() + self._join
        while True:
            self._look()
            missing = [index for index in range(len(self._order.hosts)) if index not in self._heard]
            if not missing or self._signals.count:
                return None
            if self._clock.now() > deadline:
                break
            time.sleep(_LOOK_SECONDS)
        needed = [index for index in missing if index < self._order.nodes]
        for index in missing:
            self.lost[index] = "it never came"
        names = ", ".join(self._name(index) for index in needed or missing)
        if not needed:
            tell(f"lockstep: {names} did not come within {self._join:g} s: there is no such spare")
            return None
        cause = (
            f"{names} did not come within {self._join:g} s: the agent was started there, but does not reach "
            f"{self._order.head.address} port {self._order.port} on {self._name(0)}. Check the firewall between them; "
            "timeouts.rendezvous sets the limit"
        )
        return Failure(0, self._name(0), cause, 3, HostLost.__name__, concerns_all_ranks=True)

    def _attempt(self, attempt: int) -> Result:
        self._ranks = spread(self._order, self._living()[: self._order.nodes])
        self._say(attempt=attempt, ranks=[each.model_dump() for each in self._ranks], stop=False, end=False)
        watcher = Watcher(self._store.under(store_prefix(attempt)), range(self.world_size), self._limits)
        result = self._supervise(watcher)
        self._end()
        if result is None:
            failure = self._cause()
            asked = self._signals.count and self._codes().get(failure.rank) in (-15, INTERRUPTED_EXIT_CODE)
            if asked:  # before the first step
                return Result(INTERRUPTED_EXIT_CODE, nothing_to_save=True)
            return Result(failure.exit_code, failure=failure)
        return result

    def _supervise(self, watcher: Watcher) -> Result | None:
        """Waits until all ranks returned; returns None where some failed, with what hosts said of it in `_said`."""
        stopped, failed_at, watched_at = None, None, 0.0
        while True:
            self._look()
            self._tell_blind()
            now = self._clock.now()
            states = [self._ended(each) for each in self._ranks]
            if all(state is not None and "returned" in state for state in states):
                return Result(max(code for state in states if state for code in state["returned"].values()))
            for ranks in self._ranks:
                if ranks.host in self.lost:
                    return self._without(ranks)
            if any(state is not None and "returned" not in state for state in states):
                failed_at = failed_at or now
                if all(states) or now > failed_at + (_FALL_SECONDS if self._knows_cause() else GONE_SECONDS + 2):
                    return None
            if stopped is None and (asked := self._asked()):
                stopped = now
                self._say(stop=True)
                self._timeline.note("preempt", note=asked)
                tell(f"lockstep: {asked}: finishing the step, saving and leaving")
            if self._signals.count > 1:
                return Result(INTERRUPTED_EXIT_CODE)
            if self._signals.save:
                self._signals.save = False
                self._say(save=self._message.get("save", 0) + 1)
            if now > watched_at + _WATCH_SECONDS:
                watched_at = now
                stall = watcher.look()
                self._timeline.show(watcher.everyone)
                if stall is not None and failed_at is None:
                    self._timeline.note("stall", rank=stall.ranks[0], note=stall.message)
                    return self._stalled(stall.ranks[0], stall.message)
                if (slow := watcher.warning()) is not None:
                    tell(f"lockstep: {slow.message}")
                    if slow.waited_for and watcher.begun:
                        self._say(save=self._message.get("save", 0) + 1)
            if stopped is not None and not watcher.begun and now > stopped + _EARLY_SECONDS:
                return Result(INTERRUPTED_EXIT_CODE, nothing_to_save=True)
            if stopped is not None and now > stopped + self._grace:
                cause = f"was asked to stop and did not within {self._grace:g} s (timeouts.stop), so it was ended"
                return Result(5, failure=Failure(0, self._name(0), cause, 5))
            time.sleep(_LOOK_SECONDS)

    def _without(self, ranks: RankRange) -> Result:
        name, why = self._name(ranks.host), self.lost[ranks.host]
        cause = f"host {name} ({ranks_text(list(ranks.ranks))}) is gone: {why}"
        failure = Failure(ranks.first, name, cause, 5, HostLost.__name__, concerns_all_ranks=True)
        return Result(5, failure=failure)

    def _stalled(self, rank: int, message: str) -> Result:
        self._say(stacks=True)
        time.sleep(_DUMP_SECONDS)
        cause = f"{message}. The stacks of all threads are in the ranks' logs; timeouts.stall sets the limit"
        code = RankStalled.exit_code
        failure = Failure(rank, self._host_of(rank), cause, code, RankStalled.__name__, concerns_all_ranks=True)
        return Result(code, failure=failure)

    def _end(self) -> None:
        """Waits until every host has ended what is left of this attempt, or is gone."""
        self._say(end=True, stacks=False)
        deadline = self._clock.now() + _END_SECONDS
        while self._clock.now() < deadline:
            self._look()
            if all(self._ended(each) is not None or each.host in self.lost for each in self._ranks):
                return
            time.sleep(_LOOK_SECONDS)

    def _finish(self, result: Result) -> Result:
        self._say(finish=result.exit_code)
        deadline = self._clock.now() + _FINISH_SECONDS
        while self._clock.now() < deadline:
            self._look()
            others = [index for index in self._heard if index and index not in self.lost]
            if all(self._said[index].get("finished") for index in others):
                break
            time.sleep(_LOOK_SECONDS)
        return result

    def _cause(self) -> Failure:
        failure = find_cause(self._reports(), self._codes(), self._name(0))
        reported = {each.rank for each in self._reports()}
        if failure.rank in reported:
            return failure
        return replace(failure, host=self._host_of(failure.rank))

    def _knows_cause(self) -> bool:
        """Returns whether a rank reported a failure that is no consequence of another, or ended without a report."""
        reports = self._reports()
        reported = {each.rank for each in reports}
        return any(not each.consequence for each in reports) or any(rank not in reported for rank in self._codes())

    def _reports(self) -> list[Report]:
        found = []
        for ranks in self._ranks:
            for raw in (self._ended(ranks) or {}).get("reports", ()):
                try:
                    found.append(Report(**raw))
                except TypeError:  # not as we write them
                    continue
        return found

    def _codes(self) -> dict[int, int]:
        ended = [self._ended(each) or {} for each in self._ranks]
        return {int(rank): int(code) for each in ended for rank, code in each.get("exit_codes", {}).items()}

    def _ended(self, ranks: RankRange) -> dict[str, Any] | None:
        """Returns how the ranks of a host ended in this attempt."""
        said = self._said.get(ranks.host, {})
        ended = said.get("ended") if said.get("attempt") == self._message["attempt"] else None
        return ended if isinstance(ended, dict) else None

    def _asked(self) -> str | None:
        """Returns who asked the run to stop."""
        if self._signals.count:
            return self._signals.name
        asked = [index for index, said in self._said.items() if said.get("asked") and index not in self.lost]
        if asked:
            self._signals.count, self._signals.name = 1, f"{self._name(asked[0])} was asked to stop"
            return self._signals.name
        return None

    def _look(self) -> None:
        """Reads what every host said, and sends them a heartbeat."""
        self._say()
        now = self._clock.now()
        everyone = range(len(self._order.hosts))
        values = self._store.read_all([*map(host_key, everyone), *map(closed_key, everyone)])
        for index in everyone:
            said, closed = decoded(values[index]), values[len(everyone) + index]
            if said is not None and said.get("count") != self._said.get(index, {}).get("count"):
                self._said[index], self._heard[index] = said, now
                self._closed_at.pop(index, None)
            if closed != self._closed.get(index):
                self._closed[index], self._closed_at[index] = closed, now
            if index in self._heard and index not in self.lost and (why := self._why_gone(index, now)) is not None:
                self.lost[index] = why

    def _why_gone(self, index: int, now: float) -> str | None:
        said = self._said[index]
        if said.get("leaves"):
            return str(said["leaves"])
        patience = closed_patience(said.get("exchange"))
        if now > self._closed_at.get(index, now) + patience:
            return (
                f"its connection was closed, and did not come back within {patience:.1f} s: its agent was killed, or "
                "the host was shut down"
            )
        if now > self._heard[index] + GONE_SECONDS:
            return f"nothing was heard of it for {GONE_SECONDS:g} s: it died, or the network to it is cut"
        return None

    def _say(self, **news: Any) -> None:
        self._count += 1
        self._message = {**self._message, **news, "count": self._count}
        self._store.set(HEAD_KEY, json.dumps(self._message))

    def _living(self) -> list[int]:
        return [index for index in sorted(self._heard) if index not in self.lost]

    @property
    def world_size(self) -> int:
        return sum(each.count for each in self._ranks)

    def _name(self, index: int) -> str:
        return self._order.hosts[index].name

    def _host_of(self, rank: int) -> str:
        return next((self._name(each.host) for each in self._ranks if rank in each.ranks), self._name(0))

    def _tell_blind(self) -> None:
        """Warns of hosts that do not see a run's folder that was named as shared; the run works all the same."""
        new = [index for index, said in self._said.items() if said.get("sees_folder") is False]
        new = [index for index in new if index not in self._blind]
        if new:
            self._blind.update(new)
            names, head = ", ".join(map(self._name, new)), self._name(0)
            tell(
                f"lockstep: {names} does not see {self._order.folder} of {head}: the path is on another disk "
                f"there. The run and its checkpoints are on {head} alone, and lost with it. Mount the same disk on all "
                "hosts, or use a bucket (--out s3://...); without --out it is the same, in the pod's folder"
            )

    def _tell_restart(self, failure: Failure, attempt: int) -> None:
        before = {each.host for each in self._ranks}
        spares = [self._name(index) for index in self._living()[: self._order.nodes] if index not in before]
        instead = f", with {', '.join(spares)} in the place of {', '.join(self._name(each) for each in self.lost)}"
        tell(
            f"lockstep: {failure.render(self.world_size)}\nlockstep: restarting from the newest checkpoint"
            f"{instead if spares else ''} (restart {attempt + 1} of {self._restarts})"
        )


class HeadThread:
    """Runs the head in a thread, so that it does not wait for the ranks of its host."""

    def __init__(self, head: Head, order: Order, job: Job, mirror: Mirror | None) -> None:
        self._head, self._order, self._job, self._mirror = head, order, job, mirror
        self._result: Result | None = None
        self._thread = threading.Thread(target=self._run, name="lockstep-head", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._head.run()
        except Exception as error:
            tell(traceback.format_exc())
            self._result = self._head.give_up(error)

    def concluded(self) -> int:
        """Says how the job ended, writes it down, and returns the exit code."""
        self._thread.join()
        if self._result is None:  # what it raised is in the console
            self._job.has_ended(5, "failed")
            return 5
        code, status, said = conclude(self._order, self._result, self._head.world_size, self._mirror)
        self._job.has_ended(code, status, said)
        return code


def conclude(order: Order, result: Result, world_size: int, mirror: Mirror | None = None) -> tuple[int, str, str]:
    """Says how the job ended, where it is and what to do next; returns exit code, status and what was said."""
    said: list[str] = []

    def say(text: str) -> None:
        said.append(shown(text))
        tell(text)

    try:
        note_end(Path(order.folder), result)
    except OSError as error:
        say(f"lockstep: {error}")
    leave_report(Path(order.folder), lambda text: tell(f"lockstep: {text}"))
    config = order.run_config()
    limit = config.timeouts.checkpoint if result.exit_code == 0 else config.timeouts.stop
    behind = mirror.finish(limit) if mirror is not None else None
    code, status = _say_end(order, result, world_size, say)
    if behind is not None:
        say(f"lockstep: {behind}")
        code = BucketBehind.exit_code if code in (0, PREEMPTED_EXIT_CODE) else code
    return code, status, "\n".join(said)


def _say_end(order: Order, result: Result, world_size: int, say: Callable[[str], None]) -> tuple[int, str]:
    """The exit code is 75 only where there is a checkpoint to resume from."""
    folder, pod = Path(order.folder), shlex.quote(order.pod)
    config = order.run_config()
    saved = any((folder / "checkpoints").glob("step-*"))
    go_on = f"lockstep pod resume {pod}"
    if result.failure is not None:
        failure = result.failure
        say("\n".join(f"lockstep: {line}" if line else "" for line in failure.render(world_size).split("\n")))
        if failure.memory and config.after is None:
            say(f"lockstep: {how_to_plan('CONFIG', world_size)}")
        say(f"lockstep: logs: lockstep pod pull {pod}")
        if saved:
            say(f"lockstep: go on from the last checkpoint with: {go_on}")
        return result.exit_code, "failed"
    if result.exit_code == PREEMPTED_EXIT_CODE:
        say(f"lockstep: saved and stopped; go on with: {go_on}")
        return result.exit_code, "preempted"
    if result.nothing_to_save:
        say(f"lockstep: stopped before the first step; go on with: {go_on}")
        return (PREEMPTED_EXIT_CODE if saved else result.exit_code), "interrupted"
    if result.exit_code:
        then = f"go on from the last checkpoint with: {go_on}" if saved else "nothing was saved"
        say(f"lockstep: ended at once; {then}")
        return result.exit_code, "interrupted"
    summary = read_summary(folder)
    metrics = "  ".join(f"{name} {value:.4g}" for name, value in (summary.get("metrics") or {}).items()
                        if isinstance(value, (int, float)))  # fmt: skip
    progress = f"epoch {summary.get('epoch', '?')}, step {summary.get('step', '?')}"
    say(f"lockstep: {summary.get('status', 'ended')}: {progress}  {metrics}".rstrip())
    say(f"lockstep: run folder: {order.url or f'{order.head.name}:{folder}'}")
    say(f"lockstep: bring it here: lockstep pod pull {pod}")
    return 0, str(summary.get("status", "completed"))
