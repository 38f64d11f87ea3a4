"""The heartbeat of a rank: a thread that reports its activity to the store, and ends it when the run is stuck."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from lockstep.distributed.activity import LEFT, Activity, Beat, beat_key
from lockstep.distributed.topology import Topology
from lockstep.distributed.watch import stacks
from lockstep.distributed.watch.stacks import is_users
from lockstep.distributed.watch.stall import Limits, RunningClock, Seen, Watcher
from lockstep.errors import RankStalled
from lockstep.shown import in_a_line, shown
from lockstep.terminal import standard_error

logger = logging.getLogger(__name__)

VERDICT = "stalled"
_INTERVAL = 1.0
# How long a rank that must end may take to report why.
_END_SECONDS = 10.0
_WORKER_SECONDS = 5.0


def interval(limits: Limits) -> float:
    """Returns the seconds between two beats."""
    return min(_INTERVAL, limits.stall / 8)


class Heartbeat:
    """Sends beats until it is stopped. Without a watching launcher, ranks 0 and 1 watch all ranks."""

    def __init__(self, store: Any, topology: Topology, activity: Activity, limits: Limits) -> None:
        self._store, self._rank, self._world_size = store, topology.place.rank, topology.world_size
        self._activity, self._limits = activity, limits
        self._watched, self._host = topology.watched, topology.place.host
        self._watches = not self._watched and self._rank < 2
        self._training_thread = threading.get_ident()
        self._count = 0
        self._clock = RunningClock()
        self._reported = (-1, 0.0)  # the number of the last moment, and how long this process had been paused then
        # The moment, the data worker, when to ask it again, and its line.
        self._worker: tuple[int, tuple[int, int], float, str] = (-1, (-1, -1), 0.0, "")
        # How far into the moment there was progress: another block of a model, or the user's debugger. And the block.
        self._progressed, self._block = 0.0, ""
        self._asking = 1  # the number of the beat that waits for the store; 0 between two beats
        self._stopping = threading.Event()
        self.stacks: TextIO = sys.stderr
        self.on_beat: Callable[[Any], None] | None = None  # called with the store at every beat
        self.tell: Callable[[str], None] | None = None  # called with the reason before this process ends
        self.show: Callable[[list[Seen]], None] | None = None  # on rank 0: displays all ranks
        self.ask_to_save: Callable[[], None] = lambda: None  # on rank 0, before stuck ranks are ended
        self.reports_resident_memory = False  # on the CPU
        self._terminal = standard_error()  # before the output of ranks is redirected to their logs
        beat = self._beat if store is not None else self._beat_alone
        self._threads = [threading.Thread(target=beat, name="lockstep-heartbeat", daemon=True)]
        if not self._watched and store is not None:
            self._threads.append(threading.Thread(target=self._watch_store, name="lockstep-store", daemon=True))

    def start(self) -> None:
        """Starts the threads. Without a store, beats only go to `show`."""
        for thread in self._threads:
            thread.start()

    def follow_this_thread(self) -> None:
        """Makes the caller's thread the training thread, whose line is reported."""
        self._training_thread = threading.get_ident()

    def stop(self) -> None:
        """Sends the last beat and ends, within a limit."""
        self._stopping.set()
        self._threads[0].join(timeout=2 * interval(self._limits))
        if not self._threads[0].is_alive():
            os.close(self._terminal)

    def _beat(self) -> None:
        watcher = Watcher(self._store, range(self._world_size), self._limits) if self._watches else None
        try:
            self._send()
            self._asking = 0
            while not self._stopping.wait(interval(self._limits)):
                self._asking = self._count + 1
                self._send()
                if self.on_beat is not None:
                    self.on_beat(self._store)
                if watcher is not None and (stall := watcher.look()) is not None:
                    self._store.set(VERDICT, stall.message)
                elif watcher is not None and self._rank == 0:
                    self._warn(watcher)
                if watcher is not None and self.show is not None:
                    self.show(watcher.everyone)
                if not self._watched and (verdict := self._store.read(VERDICT)) is not None:
                    self._end(verdict.decode(errors="replace"), self._wait_for_others)
                self._asking = 0
            self._send()
        except RuntimeError as error:
            if not self._watched:  # a lost launcher is detected elsewhere
                self._end_without_a_store(error)

    def _beat_alone(self) -> None:
        watcher = Watcher(None, [0], self._limits)
        while not self._stopping.wait(interval(self._limits)):
            watcher.everyone = [Seen(0, self._now(), 0.0)]
            self._warn(watcher)
            if self.show is not None:
                self.show(watcher.everyone)

    def _warn(self, watcher: Watcher) -> None:
        """Writes past the log, whose lock the training thread may hold, and requests a save if ranks wait."""
        slow = watcher.warning()
        if slow is None:
            return
        with suppress(OSError, ValueError):
            os.write(self._terminal, f"lockstep: {shown(slow.message)}\n".encode())
        if slow.waited_for and watcher.begun:
            self.ask_to_save()

    def _send(self) -> None:
        self._store.set(beat_key(self._rank), self._now().encode())

    def _now(self) -> Beat:
        self._count += 1
        self._clock.now()
        now = self._activity.now
        if now.number != self._reported[0]:
            self._reported, self._progressed, self._block = (now.number, self._clock.paused), 0.0, ""
        taken = time.monotonic() - now.since - (self._clock.paused - self._reported[1])
        stacks = sys._current_frames() if taken > _INTERVAL / 2 else {}
        # With its own frame this one would be a cycle, which keeps the tensors of all others until the next collection.
        stacks.pop(threading.get_ident(), None)
        frame = stacks.get(self._training_thread)
        where = self._where(frame, now.number)
        doing, waits = self._located(stacks) or (now.doing, now.waits)
        if in_debugger(frame) or self._block not in ("", doing):
            self._progressed = taken
        self._block, still = doing, max(taken - self._progressed, 0.0)
        return Beat(
            self._count, now.number, now.step, doing, waits, now.first, now.limit, round(still, 1), where,
            self._activity.begun, self._activity.restores, self._activity.exchanges, self._host,
            self._activity.total_steps, self._activity.busy,
            resident_memory() if self.reports_resident_memory else self._activity.memory,
        )  # fmt: skip

    def _where(self, frame: FrameType | None, moment: int) -> str:
        """Returns the line of the training thread, or of the data worker it waits for."""
        worker = stacks.awaited(frame)
        if worker is None:
            return user_line(frame) if frame is not None else ""
        if self._worker[:2] != (moment, worker) or time.monotonic() > self._worker[2]:
            line = stacks.line_of(worker[1])
            text = f"data worker {worker[0]} (pid {worker[1]}){f' at {line}' if line else ''}"
            self._worker = (moment, worker, time.monotonic() + _WORKER_SECONDS, text)
        return self._worker[3]

    def _located(self, stacks: dict[int, FrameType]) -> tuple[str, bool] | None:
        """Returns where in a sharded model this rank is, unless it waits for something named."""
        if self._activity.now.doing.startswith(("'", '"')):
            return None
        mine = stacks.pop(self._training_thread, None)
        return self._activity.locate([*([mine] if mine else []), *stacks.values()]) if mine else None

    def _watch_store(self) -> None:
        """Detects a store that does not answer, in which the beating thread hangs."""
        clock, asking, since = RunningClock(), 0, 0.0
        while not self._stopping.wait(interval(self._limits)):
            now = clock.now()
            if self._asking != asking:
                asking, since = self._asking, now
            quiet = now - since
            # Between two beats nothing is asked, and the thread may be late on a busy host.
            if asking and self._threads[0].is_alive() and quiet > self._limits.stall:
                doing = self._activity.now.doing
                self._end(
                    f"rank {self._rank} has had no answer from the store for {quiet:.0f} s, while it was in "
                    f"{doing}: the network to rank 0's host is cut, or that host is gone"
                )

    def _end_without_a_store(self, error: RuntimeError) -> None:
        """Ends this rank if the store is gone and it does not leave by itself."""
        if not self._stopping.wait(_END_SECONDS) and self._activity.now.doing != LEFT:
            self._end(
                f"rank {self._rank} lost the store, which rank 0 or the launcher serves, while it was in "
                f"{self._activity.now.doing}: {str(error).strip().splitlines()[0]}"
            )

    def _end(self, message: str, wait: Callable[[], None] = lambda: None) -> None:
        """Ends this process from here: the training thread is stuck, or waits for a stuck rank."""
        # Writing may hang as well, on a disk that does not answer or a lock that the stuck thread holds.
        in_any_case = threading.Timer(_END_SECONDS, os._exit, (RankStalled.exit_code,))
        in_any_case.daemon = True
        in_any_case.start()
        message = in_a_line(message)  # it came over the network
        try:
            with suppress(OSError, ValueError):
                os.write(self._terminal, f"lockstep: {shown(message)}\n".encode())
            if self.tell is not None:
                self.tell(message)
            with suppress(OSError, ValueError):
                faulthandler.dump_traceback(self.stacks, all_threads=True)
            logger.error("%s. Ended; the stacks of all threads are above", message)
            wait()
        finally:
            os._exit(RankStalled.exit_code)

    def _wait_for_others(self) -> None:
        """The first rank to leave would look like the cause to the others."""
        deadline = time.monotonic() + 3 * interval(self._limits)
        self._store.add(f"{VERDICT}/heard", 1)
        while self._store.add(f"{VERDICT}/heard", 0) < self._world_size and time.monotonic() < deadline:
            time.sleep(0.02)


def in_debugger(frame: FrameType | None) -> bool:
    """Whether a thread is at the prompt of pdb."""
    while frame is not None:
        if frame.f_globals.get("__name__") == "bdb":
            return True
        frame = frame.f_back
    return False


def resident_memory() -> int | None:
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def user_line(frame: FrameType | None) -> str:
    """Returns `train.py:42`: the innermost line of user code."""
    innermost = frame
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users(file):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return f"{Path(innermost.f_code.co_filename).name}:{innermost.f_lineno}" if innermost is not None else ""
