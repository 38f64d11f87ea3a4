"""The loggers of a run: made from the config, each with a thread and a queue, so that none holds a step back.

A logger that raises, or takes longer than it may, costs a warning, and what it misses is counted at the end. Rows are
in metrics.jsonl and samples in the run's folder all the same.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import logging
import math
import os
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from lockstep import run_files
from lockstep.config.plain import number
from lockstep.config.schema import Log, RunSettings
from lockstep.config.secrets import redacted
from lockstep.errors import ConfigError
from lockstep.record.logger import About, Logger, Sample, check_methods
from lockstep.record.writers import write_json
from lockstep.shown import brief, described, in_a_line

logger = logging.getLogger(__name__)

Find = Callable[[str, str], Any]  # imports an object by its path; the second argument is the path in the YAML
Construct = Callable[[Any, dict[str, Any], str], Any]

SERVICES = ("tensorboard", "wandb", "mlflow")  # the sections of `log`, packages and extras alike


def check(settings: Log, environment: Mapping[str, str] = os.environ) -> None:
    """Refuses what cannot work here: a package that is not installed, a service without a key. Imports no package."""
    for name in SERVICES:
        if getattr(settings, name) and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"log.{name}: needs {name}: pip install 'lockstep-train[{name}]', or leave log.{name} out"
            )
    if settings.wandb is not None or settings.mlflow is not None:
        from lockstep.record.services import MlflowLogger, WandbLogger

        if settings.wandb is not None:
            WandbLogger.check(settings.wandb, environment)
        if settings.mlflow is not None:
            MlflowLogger.check(settings.mlflow, environment)


def create(folder: Path, settings: RunSettings, find: Find, construct: Construct) -> list[LoggerQueue]:
    """Returns a queue for each logger of the config, not started yet. Raises ConfigError for one that cannot work."""
    log = settings.log
    check(log)
    made: dict[str, Logger] = {}
    if any(getattr(log, name) for name in SERVICES):
        from lockstep.record import services

        if log.tensorboard:
            made["tensorboard"] = services.TensorBoardLogger()
        if log.wandb is not None:
            made["wandb"] = services.WandbLogger(log.wandb)
        if log.mlflow is not None:
            made["mlflow"] = services.MlflowLogger(log.mlflow)
    for name, own in log.own.items():
        cls = find(own.type, f"log.{name}")
        check_methods(cls, f"log.{name}", own.type)
        made[name] = construct(cls, own.arguments, f"log.{name}")
    config = redacted(settings.model_dump(mode="json", by_alias=True)) if made else {}
    about = About(folder.name, "", folder, config, 0, log.timeout)
    return [LoggerQueue(name, each, about) for name, each in made.items()]


FOLDER = "loggers"  # in the run's folder: the state of each logger, for a restart
MOST_CALLS, MOST_BYTES = 1000, 64_000_000  # that wait for a logger; the rest is left out

Backlog = Callable[[], Iterable[tuple[int, Mapping[str, float]]]]


class Call(NamedTuple):
    """A row or a sample that is yet to be sent."""

    method: str
    names: tuple[str, ...]  # of numbers; a sample's begins with its kind
    step: int
    send: Callable[[], None]
    size: int


class LoggerQueue:
    """One logger of rank 0, from start to end. All methods return at once, except `wait`."""

    def __init__(self, name: str, to: Logger, about: About) -> None:
        self.name, self._logger, self._about = name, to, about
        self._file = about.folder / FOLDER / f"{name}.json"
        self._kept = _Kept.read(self._file)
        self._takes_back = bool(getattr(to, "takes_back", False))
        delay = getattr(to, "delay", 0.0)
        if (seconds := number(delay)) is None:
            raise ConfigError(f"log.{name}: its delay must be a number of seconds, got {described(delay)}")
        self._delay = seconds
        # The steps it has from before: a run that resumes from an older checkpoint computes them again, bit for bit.
        self._before = {} if self._takes_back else dict(self._kept.sent)
        self._waiting: queue.Queue[Call | None] = queue.Queue()  # None is the end
        self._left_out = self._failed = 0
        self._status: str | None = None  # once the run is over
        self._given_up = False
        self._at: tuple[str, float] | None = None  # the method that it is in, and since when
        self._warned: set[str] = set()
        self._thread: threading.Thread | None = None

    def start(self, step: int, backlog: Backlog = tuple) -> None:
        """Starts the thread, once it is known at which step the run resumes. Of `backlog`, the rows written before,
        it sends what was never sent: what waits is lost when a process is killed."""
        about = replace(self._about, step=step, id=self._kept.id, kept=self._kept.kept)
        self._thread = threading.Thread(
            target=self._work, args=(about, backlog), name=f"lockstep-{self.name}", daemon=True
        )
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if call := self._row(step, values):
            self._put(call)

    def log_sample(self, sample: Sample, size: int) -> None:
        name, send = f"{sample.kind} {sample.name}", getattr(self._logger, "log_sample", None)
        if send is None:
            self._warn_once("samples", "takes no samples (it has no log_sample): they are in the run's folder alone")
        elif sample.step > self._before.get(name, -1):
            self._put(Call("log_sample", (name,), sample.step, lambda: send(sample), size))

    def close(self, status: str) -> None:
        """Lets the thread send what waits, and finish."""
        if self._status is None:
            self._status = status
            self._waiting.put(None)

    def wait(self, until: float) -> None:
        """Waits for its end up to a moment of the monotonic clock, and warns of what was lost."""
        if self._thread is None:
            return
        self._thread.join(max(until - time.monotonic(), 0.0))
        self._given_up, at = True, self._at
        lost = [f"{self._failed} calls failed"] if self._failed else []
        lost += [f"{self._left_out} rows and samples were left out, since it was too slow"] if self._left_out else []
        if left := max(self._waiting.qsize() - 1, 0):  # without the end
            lost.append(f"{left} were not sent any more")
        if self._thread.is_alive():
            self._abandon()
            if at is not None:
                lost.insert(0, f"{at[0]} has not returned for {time.monotonic() - at[1]:.0f} s, and is left alone")
        if lost:
            self._warn(f"{'; '.join(lost)}. The run's folder has all of it")

    def _row(self, step: int, values: Mapping[str, float]) -> Call | None:
        new = {name: value for name, value in values.items() if step > self._before.get(name, -1)}
        return Call("log", tuple(new), step, lambda: self._logger.log(step, new), 0) if new else None

    def _put(self, call: Call) -> None:
        if self._status is not None or self._thread is None or not self._thread.is_alive():
            return
        with self._waiting.mutex:
            waiting = list(self._waiting.queue)
        held = sum(each.size for each in waiting if each is not None)
        if len(waiting) < MOST_CALLS and (not waiting or held + call.size <= MOST_BYTES):
            self._waiting.put(call)
        else:
            self._left_out += 1
            self._warn_once("full", f"is too slow: {MOST_CALLS} calls wait, and what comes now is left out")

    # The thread

    def _work(self, about: About, backlog: Backlog) -> None:
        self._note()  # a restart must find the id that this one starts with
        if self._called("start", lambda: self._keep(self._logger.start(about))):
            for call in self._calls(backlog):
                if self._called(call.method, call.send):
                    self._kept.note(call, self._delay)
                    self._note()
                else:
                    self._failed += 1
            if not self._given_up and self._called("finish", lambda: self._logger.finish(str(self._status))):
                self._kept.settle()
                self._note()
        else:
            self._abandon()

    def _keep(self, returned: Mapping[str, Any] | None) -> None:
        try:
            self._kept.kept = json.loads(json.dumps(dict(returned or {})))
        except (TypeError, ValueError) as error:
            raise TypeError(f"what it returns is kept as JSON, got {returned!r} ({error})") from None
        self._note()
        if self._kept.kept.get("url"):
            logger.info("log.%s: %s", self.name, in_a_line(str(self._kept.kept["url"])))

    def _note(self) -> None:
        if not getattr(self._logger, "keeps_nothing", False):
            self._kept.write(self._file)

    def _calls(self, backlog: Backlog) -> Iterator[Call]:
        with contextlib.suppress(OSError):
            for step, values in () if self._takes_back else backlog():
                if call := self._row(step, values):
                    yield call
                if self._given_up:
                    return
        while (waiting := self._waiting.get()) is not None and not self._given_up:
            yield waiting

    def _called(self, method: str, call: Callable[[], None]) -> bool:
        self._at = (method, time.monotonic())
        try:
            call()
        except BaseException as error:  # a logger that calls sys.exit ends its own thread, and nothing else
            end = "It is left out of this run" if method == "start" else "The run goes on"
            self._warn_once(method, f"{method} failed: {type(error).__name__}: {error}. {end}")
            return False
        finally:
            self._at = None
        return True

    def _abandon(self) -> None:
        """Ends what a package has started, which may keep this process from ending."""
        with contextlib.suppress(Exception):
            getattr(self._logger, "abandon", lambda: None)()

    def _warn_once(self, what: str, text: str) -> None:
        if what not in self._warned and not self._given_up:
            self._warned.add(what)
            self._warn(text)

    def _warn(self, text: str) -> None:
        logger.warning("log.%s: %s", self.name, in_a_line(brief(text, 500)))


class _Kept:
    """The state of a logger from one start of the run to the next."""

    def __init__(self, id: str, kept: dict[str, Any], sent: dict[str, int]) -> None:
        self.id, self.kept, self.sent, self.calls = id, kept, sent, 0
        self._recent: deque[tuple[float, Call]] = deque()  # calls that a kill would lose

    @classmethod
    def read(cls, file: Path) -> _Kept:
        with contextlib.suppress(OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
            found = json.loads(run_files.read_text(file, depth=2))
            sent = {str(name): int(step) for name, step in found["sent"].items()}
            return cls(str(found["id"]), dict(found["kept"]), sent)
        return cls(secrets.token_hex(8), {}, {})

    def note(self, call: Call, delay: float) -> None:
        """Notes a call that returned; what it sent is safe `delay` seconds later."""
        self.calls += 1
        self._recent.append((time.monotonic() + delay, call))
        self.settle(time.monotonic())

    def settle(self, until: float = math.inf) -> None:
        while self._recent and self._recent[0][0] <= until:
            call = self._recent.popleft()[1]
            for name in call.names:
                self.sent[name] = max(call.step, self.sent.get(name, -1))

    def write(self, file: Path) -> None:
        with contextlib.suppress(OSError):  # a full disk is reported by those who must write
            write_json(file, {"id": self.id, "kept": self.kept, "calls": self.calls, "sent": self.sent}, depth=2)
