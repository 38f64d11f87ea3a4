"""When a trace begins and ends: at the steps of the config, or on request.

`torch.profiler.schedule` knows steps alone, and torch_xla has none: this serves both, and requests too.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from lockstep import run_files
from lockstep.config.schema import Profile
from lockstep.distributed.activity import Activity
from lockstep.profiler import Backend, Profiler
from lockstep.profiler.demand import Demand, Request


class TorchBackend:
    def __init__(self, runtime: str) -> None:
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if runtime == "cuda" else [])]
        self._profile: profile | None = None
        self._folder = Path()

    def start(self, folder: Path) -> None:
        self._folder = folder
        self._profile = profile(activities=self._activities)
        self._profile.start()

    def stop(self) -> Path:
        stopped = self._stopped()
        # The name that torch's own tools look for: WORKER.NANOSECONDS.pt.trace.json.gz
        file = self._folder / f"{self._folder.name}.{time.time_ns()}.pt.trace.json.gz"
        partial = file.with_name(f".{secrets.token_hex(8)}.partial.json.gz")
        try:
            stopped.export_chrome_trace(str(partial))
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
        return file

    def abandon(self) -> None:
        self._stopped()

    def step(self, number: int) -> AbstractContextManager[Any]:
        return record_function(f"ProfilerStep#{number}")  # the name that tools look for

    def mark(self, name: str) -> AbstractContextManager[Any]:
        return record_function(name)

    def _stopped(self) -> profile:
        running, self._profile = self._profile, None
        assert running is not None
        running.stop()
        return running


logger = logging.getLogger(__name__)

# The steps before are not like the rest: they allocate, compile and fill caches.
WARM_UP_STEPS = 9


@dataclass
class Trace:
    """A trace that is being taken, until a step of the window or until a requested time."""

    first_step: int
    end_step: float = math.inf
    end_time: float = math.inf
    request: Request | None = None
    last_step: int = 0  # that it has anything of


class Window(Profiler):
    """Takes the traces of one rank. It never ends a run: a failure is a warning, and there is no trace."""

    def __init__(self, backend: Backend, settings: Profile, folder: Path, activity: Activity, demand: Demand) -> None:
        self._backend, self._folder, self._activity, self._demand = backend, folder, activity, demand
        self._first, self._steps = settings.start_step, settings.steps
        self._wanted = settings.steps > 0  # a window that is still to come
        self._began: int | None = None  # the first step of this process
        self._next = 0
        self._trace: Trace | None = None
        self._step, self._region = contextlib.ExitStack(), contextlib.ExitStack()

    def next_step(self, step: int) -> None:
        if self._began is None:
            self._began = step
            self._first = self._first or step + WARM_UP_STEPS
        if self._trace is not None:
            self._leave_step()
            if step >= self._trace.end_step or time.monotonic() >= self._trace.end_time:
                self._stop()
        first = self._first or step
        if self._trace is None and self._wanted and first <= step < first + self._steps:
            self._start(Trace(step, end_step=first + self._steps))
        elif self._trace is None and (request := self._demand.take()):
            self._start(Trace(step, request=request))
        if self._trace is not None:
            self._step.enter_context(self._backend.step(step))
        self._next = step

    def enter(self, region: str | None) -> None:
        if self._trace is None:
            return
        self._region.close()
        if region == "forward":  # there was a batch, so there is a step
            self._trace.last_step = self._next
        if region is not None:
            self._region.enter_context(self._backend.mark(region))

    @contextlib.contextmanager
    def region(self, name: str) -> Iterator[None]:
        if self._trace is None:
            yield
            return
        with self._backend.mark(name):
            yield

    def close(self) -> None:
        self._leave_step()
        if self._trace is not None and not self._trace.last_step:
            self._abandon("the run ended")
        if self._trace is not None:
            self._stop()
        elif self._wanted:
            logger.warning("profile: nothing was captured: %s", self._why_nothing())
        self._wanted = False
        self._demand.close()

    def give_up(self) -> None:
        self._leave_step()
        self._abandon("the run failed")
        self._demand.close()

    def _start(self, trace: Trace) -> None:
        try:
            with self._activity.within("starting a profile", limit=self._activity.patience):
                with run_files.folder(self._folder, depth=2, make=True):  # without creating the run's folder again
                    pass
                self._backend.start(self._folder)
        except Exception as error:
            self._failed(trace, f"could not be started: {error}")
        else:
            if trace.request is not None:
                trace.end_time = time.monotonic() + trace.request.seconds
            self._trace = trace

    def _stop(self) -> None:
        trace, self._trace = self._trace, None
        assert trace is not None
        first, last, began = trace.first_step, trace.last_step, time.monotonic()
        try:
            with self._activity.within("writing a profile", limit=self._activity.patience):
                written = self._backend.stop()
        except Exception as error:
            self._failed(trace, f"could not be written to {self._folder}: {error}")
            return
        steps = f"steps {first} to {last}" if last > first else f"step {first}"
        logger.info("profile of %s in %s, written in %.2f s", steps, written, time.monotonic() - began)
        self._settle(trace)

    def _failed(self, trace: Trace, reason: str) -> None:
        logger.warning("profile: a trace from step %d on %s. Training continues without it", trace.first_step, reason)
        self._settle(trace, reason)

    def _settle(self, trace: Trace, failure: str | None = None) -> None:
        if trace.request is not None:
            trace.request.answer(failure)
        else:
            self._wanted = False

    def _abandon(self, reason: str) -> None:
        trace, self._trace = self._trace, None
        if trace is None:
            return
        with contextlib.suppress(Exception):  # the run has ended anyway
            self._backend.abandon()
        if trace.request is not None:
            trace.request.answer(reason)

    def _leave_step(self) -> None:
        self._region.close()
        self._step.close()

    def _why_nothing(self) -> str:
        if self._began is None or self._first is None:
            return "no step was taken by run.batches"
        if self._first + self._steps <= self._began:
            last = self._first + self._steps - 1
            return f"steps {self._first} to {last} were over when this process began, at step {self._began}"
        return f"it was to begin at step {self._first}, and the run ended before that; lower profile.start_step"
