"""The processes that fetch data ahead of time: they end with their rank, and with nothing else.

A signal to the whole process group, as `timeout`, systemd and most schedulers send it, asks the rank to save and leave.
It still needs its workers then, so that they take no notice. What multiprocessing ends them by is SIGKILL instead of
SIGTERM, also for one that is stuck, and the system ends them where the rank itself was killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Iterator
from multiprocessing.context import BaseContext, ForkContext, ForkProcess, SpawnContext, SpawnProcess
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from lockstep.distributed.signals import QUIET_SIGNALS, die_with_parent
from lockstep.distributed.watch.stacks import show_stack_on_request


def begin(worker: int) -> None:
    for number in QUIET_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, QUIET_SIGNALS)
    die_with_parent()
    show_stack_on_request()


@contextlib.contextmanager
def signals_kept_back() -> Iterator[None]:
    """Workers that are being made cannot take notice of any signal before they have said which they ignore."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, QUIET_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def context() -> BaseContext:
    """As processes are made here, but for how they are ended."""
    return {"fork": _Forked, "spawn": _Spawned}.get(multiprocessing.get_start_method(), _Spawned)()


def end(loader: DataLoader[Any], at_once: bool) -> None:
    """End the workers of a loader: when they have put down what they have in hand, or at once."""
    iterator: Any = getattr(loader, "_iterator", None)
    if iterator is None:
        return
    if at_once and iterator._worker_pids_set:
        signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]  # torch would report them as workers that failed
        iterator._worker_pids_set = False
        for worker in iterator._workers:
            worker.kill()
    iterator._shutdown_workers()


def _ended_by_kill(popen: Any) -> Any:
    popen.terminate = popen.kill
    return popen


class _ForkedWorker(ForkProcess):
    @staticmethod
    def _Popen(process: Any) -> Any:
        return _ended_by_kill(ForkProcess._Popen(process))


class _SpawnedWorker(SpawnProcess):
    @staticmethod
    def _Popen(process: Any) -> Any:
        return _ended_by_kill(SpawnProcess._Popen(process))


class _Forked(ForkContext):
    Process = _ForkedWorker


class _Spawned(SpawnContext):
    Process = _SpawnedWorker
