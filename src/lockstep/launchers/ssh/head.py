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

from lockstep.distributed.failure import Failure, Report, Result
from lockstep.distributed.signals import Signals
from lockstep.distributed.store.client import Client, StoreLost
from lockstep.distributed.store.private import store_prefix
from lockstep.distributed.topology import ranks_text
from lockstep.distributed.watch.stall import Limits, RunningClock, Watcher
from lockstep.errors import INTERRUPTED_EXIT_CODE
from lockstep.launchers.ending import conclude
from lockstep.launchers.ssh.folder import Job
from lockstep.launchers.ssh.record import Order
from lockstep.launchers.supervisor import failed, run_attempts, supervise
from lockstep.mirror.mirror import Mirror
from lockstep.record import timeline as timelines
from lockstep.record.run_folder import read_summary
from lockstep.shown import shown
from lockstep.terminal import say, tell

_LOOK_SECONDS = 0.1
# How long the ranks of other hosts get to fall by themselves, so that what they say is known too.
_FALL_SECONDS = 1.5
# How long hosts get to end their ranks, and to hear that the job is over.
_END_SECONDS, _FINISH_SECONDS = 20.0, 5.0
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
    """The hosts of a job; in an attempt, their ranks as they are supervised."""

    def __init__(self, order: Order, store: Client, limits: Limits, signals: Signals) -> None:
        self._order, self._store, self._limits, self._signals = order, store, limits, signals
        self._config = order.run_config()
        self._everyone = range(len(order.hosts))
        self._clock = RunningClock()
        self._count = 0
        self._message: dict[str, Any] = {"attempt": -1}
        self._said: dict[int, dict[str, Any]] = {}
        self._heard: dict[int, float] = {}
        self.lost: dict[int, str] = {}

    def run(self) -> Result:
        order, restarts = self._order, self._config.launch.max_restarts
        with timelines.opened(Path(order.folder), say) as timeline:
            timeline.note("start", note=", ".join(each.name for each in order.hosts))

            def attempt(number: int) -> Result:
                self._say(attempt=number, stop=False, end=False, stacks=False)
                watcher = Watcher(self._store.under(store_prefix(number)), range(order.world_size), self._limits)
                result = supervise(self, watcher, self._signals, self._config.timeouts.stop, timeline)
                self.end()
                return result

            result = self._gather() or run_attempts(
                attempt, restarts, self._signals, timeline, order.world_size, lambda number: not self.lost
            )
            timeline.ended(result, order.world_size)
            return self._finish(result)

    def give_up(self, error: Exception) -> Result:
        """Ends the job after an error of the head, so that nobody waits for it."""
        cause = f"the head of the job failed: {type(error).__name__}: {error}; its traceback is in the console"
        failure = Failure(0, self.host_of(0), cause, 5, type(error).__name__, concerns_all_ranks=True)
        return self._finish(Result(5, failure=failure))

    def _gather(self) -> Result | None:
        """Waits for every host to connect; returns the end of the job where one does not, or it was asked to stop."""
        limit = self._config.timeouts.rendezvous
        deadline = self._clock.now() + limit
        while True:
            self._look()
            missing = [self._order.hosts[index].name for index in self._everyone if index not in self._heard]
            if self._signals.count:
                return Result(INTERRUPTED_EXIT_CODE, nothing_to_save=True)
            if not missing:
                return None
            if self._clock.now() > deadline:
                break
            time.sleep(_LOOK_SECONDS)
        cause = (
            f"{', '.join(missing)} did not come within {limit:g} s: the agent was started there, but does not reach "
            f"{self._order.head.address} port {self._order.port} on {self.host_of(0)}. Check the firewall between "
            "them; timeouts.rendezvous sets the limit"
        )
        return Result(3, failure=Failure(0, self.host_of(0), cause, 3, HostLost.__name__, concerns_all_ranks=True))

    # The ranks of an attempt

    def poll(self, stopping: bool) -> Result | None:
        self._look()
        if (done := self.returned()) is not None:
            return done
        if self.lost:
            host, why = next((self._order.hosts[index], why) for index, why in self.lost.items())
            cause = f"host {host.name} ({ranks_text(list(host.ranks))}) is gone: {why}"
            failure = Failure(host.first, host.name, cause, 5, HostLost.__name__, concerns_all_ranks=True)
            return Result(5, failure=failure)
        if not any(self._failed(index) for index in self._everyone):
            return None
        self._wait_for_the_cause()
        if self.lost and not self._knows_cause():
            return None  # and the host that is lost is found at the next look
        self.end()
        return self._with_host(failed(self.reports(), self._codes(), self.host_of(0), stopping))

    def returned(self) -> Result | None:
        states = [self._ended(index) or {} for index in self._everyone]
        if not all("returned" in state for state in states):
            return None
        return Result(max(code for state in states for code in state["returned"].values()))

    def ask_to_stop(self) -> None:
        self._say(stop=True)

    def ask_to_save(self) -> None:
        self._say(save=self._message.get("save", 0) + 1)

    def dump_stacks(self) -> None:
        self._say(stacks=True)

    def end(self) -> None:
        """Waits until every host has ended what is left of this attempt, or is gone."""
        self._say(end=True, stacks=False)
        self._look_until(
            lambda: all(self._ended(index) is not None or index in self.lost for index in self._everyone), _END_SECONDS
        )

    def reports(self) -> list[Report]:
        found = []
        for index in self._everyone:
            for raw in (self._ended(index) or {}).get("reports", ()):
                try:
                    found.append(Report(**raw))
                except TypeError:  # not as we write them
                    continue
        return found

    def host_of(self, rank: int) -> str:
        return next((each.name for each in self._order.hosts if rank in each.ranks), self._order.head.name)

    # Inside

    def _wait_for_the_cause(self) -> None:
        """Gives the ranks of other hosts time to fall by themselves, so that what they say is known too."""
        began = self._clock.now()
        while not all(self._ended(index) for index in self._everyone) and not self.lost:
            if self._clock.now() > began + (_FALL_SECONDS if self._knows_cause() else GONE_SECONDS + 2):
                return
            time.sleep(_LOOK_SECONDS)
            self._look()

    def _look_until(self, done: Callable[[], bool], limit: float) -> None:
        deadline = self._clock.now() + limit
        while self._clock.now() < deadline:
            self._look()
            if done():
                return
            time.sleep(_LOOK_SECONDS)

    def _finish(self, result: Result) -> Result:
        self._say(finish=result.exit_code)
        others = [index for index in self._heard if index]
        self._look_until(
            lambda: all(index in self.lost or self._said[index].get("finished") for index in others), _FINISH_SECONDS
        )
        return result

    def _with_host(self, result: Result) -> Result:
        """Names the host of a rank that ended without a report of its own."""
        failure = result.failure
        if failure is None or failure.rank in {each.rank for each in self.reports()}:
            return result
        return replace(result, failure=replace(failure, host=self.host_of(failure.rank)))

    def _knows_cause(self) -> bool:
        """Returns whether a rank reported a failure that is no consequence of another, or ended without a report."""
        reports = self.reports()
        reported = {each.rank for each in reports}
        return any(not each.consequence for each in reports) or any(rank not in reported for rank in self._codes())

    def _codes(self) -> dict[int, int]:
        ended = [self._ended(index) or {} for index in self._everyone]
        return {int(rank): int(code) for each in ended for rank, code in each.get("exit_codes", {}).items()}

    def _ended(self, index: int) -> dict[str, Any] | None:
        """Returns how the ranks of a host ended in this attempt."""
        said = self._said.get(index, {})
        ended = said.get("ended") if said.get("attempt") == self._message["attempt"] else None
        return ended if isinstance(ended, dict) else None

    def _failed(self, index: int) -> bool:
        ended = self._ended(index)
        return ended is not None and "returned" not in ended

    def _look(self) -> None:
        """Reads what every host said, and sends them a heartbeat."""
        self._say()
        now, everyone = self._clock.now(), self._everyone
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
            elif self._said[index].get("asked") and not self._signals.count:
                name = self._order.hosts[index].name
                self._signals.count, self._signals.name = 1, f"{name} was asked to stop"

    def _say(self, **news: Any) -> None:
        self._count += 1
        self._message = {**self._message, **news, "count": self._count}
        self._store.set(_HEAD_KEY, json.dumps(self._message))


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
