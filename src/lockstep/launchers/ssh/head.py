"""The head of a job, on the first host, and the line to it: it watches all hosts, ends or restarts them, and concludes.

A host that is lost ends the job everywhere. Ranks that fail end the attempt everywhere, and another one starts from the
newest checkpoint. On every host, a Line sends heartbeats with news of the host, and receives what the head says.
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

from lockstep.distributed.failure import Failure, Report, Result, find_cause, worth_retrying
from lockstep.distributed.signals import Signals
from lockstep.distributed.store.client import Client, StoreLost
from lockstep.distributed.store.private import store_prefix
from lockstep.distributed.topology import ranks_text
from lockstep.distributed.watch.stall import Limits, RunningClock, Watcher
from lockstep.errors import INTERRUPTED_EXIT_CODE, RankStalled
from lockstep.launchers.ending import conclude
from lockstep.launchers.ssh.folder import Job
from lockstep.launchers.ssh.record import Order
from lockstep.mirror.mirror import Mirror
from lockstep.record import timeline as timelines
from lockstep.record.loggers import suspect
from lockstep.record.run_folder import read_summary
from lockstep.record.timeline import Timeline
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
# A host, or the head, that is silent for so long counts as gone. A heartbeat comes five times a second; on a link that
# loses one packet in twenty, TCP needs a few seconds now and then.
GONE_SECONDS = 10.0
_BEAT_SECONDS = 0.2
_HEAD_KEY = "pod/head"


def _host_key(index: int) -> str:
    return f"pod/host/{index}"


def _closed_key(index: int) -> str:
    """Returns the key that the store sets when the connection of a host is closed: its agent died."""
    return f"pod/closed/{index}"


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
        self.lost: dict[int, str] = {}
        self._timeline: Timeline

    def run(self) -> Result:
        with timelines.opened(Path(self._order.folder), lambda text: tell(f"lockstep: {text}")) as self._timeline:
            self._timeline.note("start", note=", ".join(each.name for each in self._order.hosts))
            result = self._run()
            self._timeline.ended(result, self._order.world_size)
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
            if self.lost:
                break
            self._timeline.failed("restart", failure, self._order.world_size, attempt=attempt + 1)
            tell(
                f"lockstep: {failure.render(self._order.world_size)}\n"
                f"lockstep: restarting from the newest checkpoint (restart {attempt + 1} of {self._restarts})"
            )
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
        names = ", ".join(self._name(index) for index in missing)
        cause = (
            f"{names} did not come within {self._join:g} s: the agent was started there, but does not reach "
            f"{self._order.head.address} port {self._order.port} on {self._name(0)}. Check the firewall between them; "
            "timeouts.rendezvous sets the limit"
        )
        return Failure(0, self._name(0), cause, 3, HostLost.__name__, concerns_all_ranks=True)

    def _attempt(self, attempt: int) -> Result:
        self._say(attempt=attempt, stop=False, end=False)
        watcher = Watcher(self._store.under(store_prefix(attempt)), range(self._order.world_size), self._limits)
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
            now = self._clock.now()
            states = [self._ended(index) for index in range(len(self._order.hosts))]
            if all(state is not None and "returned" in state for state in states):
                return Result(max(code for state in states if state for code in state["returned"].values()))
            if self.lost:
                return self._without(*next(iter(self.lost.items())))
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

    def _without(self, index: int, why: str) -> Result:
        host = self._order.hosts[index]
        cause = f"host {host.name} ({ranks_text(list(host.ranks))}) is gone: {why}"
        failure = Failure(host.first, host.name, cause, 5, HostLost.__name__, concerns_all_ranks=True)
        return Result(5, failure=failure)

    def _stalled(self, rank: int, message: str) -> Result:
        self._say(stacks=True)
        time.sleep(_DUMP_SECONDS)
        message += suspect(Path(self._order.folder), message)
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
            if all(self._ended(at) is not None or at in self.lost for at in range(len(self._order.hosts))):
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
        for index in range(len(self._order.hosts)):
            for raw in (self._ended(index) or {}).get("reports", ()):
                try:
                    found.append(Report(**raw))
                except TypeError:  # not as we write them
                    continue
        return found

    def _codes(self) -> dict[int, int]:
        ended = [self._ended(index) or {} for index in range(len(self._order.hosts))]
        return {int(rank): int(code) for each in ended for rank, code in each.get("exit_codes", {}).items()}

    def _ended(self, index: int) -> dict[str, Any] | None:
        """Returns how the ranks of a host ended in this attempt."""
        said = self._said.get(index, {})
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
        values = self._store.read_all([*map(_host_key, everyone), *map(_closed_key, everyone)])
        for index in everyone:
            said, closed = _decoded(values[index]), values[len(everyone) + index] is not None
            if said is not None and said.get("count") != self._said.get(index, {}).get("count"):
                self._said[index], self._heard[index] = said, now
            if index not in self._heard or index in self.lost:
                continue
            if self._said[index].get("leaves"):
                self.lost[index] = str(self._said[index]["leaves"])
            elif closed and not self._said[index].get("finished"):
                self.lost[index] = "its connection was closed: its agent was killed, or the host was shut down"
            elif now > self._heard[index] + GONE_SECONDS:
                self.lost[index] = f"nothing was heard of it for {GONE_SECONDS:g} s: it died, or the network is cut"

    def _say(self, **news: Any) -> None:
        self._count += 1
        self._message = {**self._message, **news, "count": self._count}
        self._store.set(_HEAD_KEY, json.dumps(self._message))

    def _name(self, index: int) -> str:
        return self._order.hosts[index].name

    def _host_of(self, rank: int) -> str:
        return next((each.name for each in self._order.hosts if rank in each.ranks), self._name(0))


class Line:
    """The connection of a host to the head, in a thread: a store that does not answer blocks nothing else."""

    def __init__(self, connect: Callable[[float], Client], join_seconds: float, index: int) -> None:
        """`connect` gets a limit in seconds: as long as hosts may take to come together."""
        self._connect, self._join_seconds, self._index = connect, join_seconds, index
        self._said: dict[str, Any] = {}
        self._clock = RunningClock()
        self._answered = self._clock.now()
        self._done = threading.Event()
        self.heard: dict[str, Any] = {}
        self.problem: str | None = None  # why there is no connection
        self._thread = threading.Thread(target=self._talk, name="lockstep-line", daemon=True)

    def open(self) -> None:
        self._thread.start()

    def say(self, **news: Any) -> None:
        self._said = {**self._said, **news}

    @property
    def quiet(self) -> float:
        """Seconds since the head's store answered, without pauses of this whole machine."""
        return self._clock.now() - self._answered

    def close(self) -> None:
        """Sends the last news and ends."""
        self._done.set()
        connected = bool(self.heard) and self.problem is None and self.quiet < GONE_SECONDS
        self._thread.join(2 * GONE_SECONDS if connected else 0.0)

    def _talk(self) -> None:
        try:
            client = self._connect(self._join_seconds)
            client.set_final_message(_closed_key(self._index), "closed")
            count, last = 0, False
            while not last:
                last, count = self._done.is_set(), count + 1
                client.set(_host_key(self._index), json.dumps({**self._said, "count": count}))
                self.heard = _decoded(client.read(_HEAD_KEY)) or self.heard
                self._answered = self._clock.now()
                self._done.wait(_BEAT_SECONDS)
        except (StoreLost, OSError) as error:
            self.problem = str(error) or type(error).__name__


def _decoded(message: bytes | None) -> dict[str, Any] | None:
    try:
        found = json.loads(message or b"null")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


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
        order, said = self._order, list[str]()

        def say(text: str) -> None:
            lines = shown("\n".join(f"lockstep: {line}" if line else "" for line in text.split("\n")))
            said.append(lines)
            tell(lines)

        folder, pod = Path(order.folder), (shlex.quote(order.pod), order.head.name)
        config = order.run_config().model_copy(update={"processes": order.world_size})
        code = conclude(folder, self._result, config, say, self._mirror, pod=pod)
        self._job.has_ended(code, str(read_summary(folder).get("status", "ended")), "\n".join(said))
        return code
