"""`launch: ssh`: starts the agents of a job on the hosts of a pod, and follows their consoles from here.

The job is detached from this process: a lost connection is made again from where it was, and the job does not notice.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING

from lockstep.config.changes import changes, refuse_wrong_changes
from lockstep.config.changes import described as described_change
from lockstep.distributed.signals import handled, unless_ignored
from lockstep.errors import ConfigError, LockstepError
from lockstep.launchers import checks
from lockstep.launchers.base import Ended, Out, Plan, Say
from lockstep.launchers.local import launcher as local
from lockstep.launchers.ssh import record as records
from lockstep.launchers.ssh.pod import Pod
from lockstep.launchers.ssh.record import Record
from lockstep.launchers.ssh.ssh import Command, ConsoleStart, Transport, decoded
from lockstep.mirror.url import Url
from lockstep.shown import visible
from lockstep.terminal import tell

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig

# How long a host may be unreachable before its console is given up.
_PATIENCE_SECONDS = 60.0
_RETRY_SECONDS = 1.0
_CHUNK = 64 * 1024

# `lockstep resume` trains a folder that was pulled on this host; `lockstep pod resume` resumes it on the pod.
resume = local.resume


class HeadLost(LockstepError):
    """The host that leads a job is gone, so how the run ended is not known."""

    exit_code = 5


@dataclass(frozen=True)
class PodPlan:
    note: str
    commands: tuple[Command, ...]

    def render(self) -> str:
        return "\n".join([self.note, *(command.render() for command in self.commands)])


def plan(config: RunConfig, out: Out, folder: str | None = None) -> tuple[RunConfig, Plan]:
    if folder is not None:
        return local.plan(config, out, folder)
    return config, plan_pod(config, out.pod or str(config.name))


def plan_pod(config: RunConfig, name: str, folder: str | None = None) -> PodPlan:
    """Returns the commands that start a run, in order; with the folder of a run, those that resume it."""
    pod = Pod(name, config)
    workers = range(len(pod.transport.workers))
    commands = [*pod.inspecting(folder, make=True, claim="JOB"), *pod.copying()]
    for stage in zip(*(pod.starting(each, "JOB", f"{config.pod.directory}/{name}") for each in workers), strict=True):
        commands += [command for part in stage for command in part]
    commands += [command for each in workers for command in pod.following(each)]
    return PodPlan(f"# {records.archive_of(name)}: the code, and the order of the job", tuple(commands))


@contextmanager
def train(config: RunConfig, out: Out, say: Say) -> Iterator[Ended]:
    pod = Pod(out.pod or str(config.name), config)
    code = _start_and_follow(pod, out.place)
    message = "done on the pod; its console has what it found" if config.after is not None and not code else ""
    yield Ended(code, config, message=message)


def resume_pod(name: str, config: RunConfig) -> int:
    """Resumes the newest run of a pod from its newest checkpoint; returns the run's exit code."""
    known = records.read(name)
    if known.folder is None:
        raise ConfigError(f"pod {name}: no run was started there yet")
    found = changes(known.run_config().plain(), config.plain())
    refuse_wrong_changes(found, config.plain())
    for change in found:
        tell(f"lockstep: changed: {described_change(change)}")
    pod = Pod(name, config)
    pod.make_ready()
    return _start_and_follow(pod, Path(), known)


def describe(config: RunConfig) -> str:
    return "on the hosts of a pod"


def _start_and_follow(pod: Pod, out: Path | Url, known: Record | None = None) -> int:
    """Checks the config here while the hosts are inspected, starts the job, and follows it to its end."""
    checks.prepare()
    started = pod.start(out, known, lambda: checks.check_names(pod.config))
    records.write(started)
    hosts = pod.transport.workers
    tell(f"lockstep: job {started.job} of pod {pod.name} on {', '.join(hosts)}; run folder {hosts[0]}:{started.folder}")
    return follow(pod, started, stops=True)


def follow(pod: Pod, record: Record, stops: bool) -> int:
    """Shows the consoles of a job until it ends. With `stops`, Ctrl-C asks the run to stop; else it only leaves."""
    requests, leaving, passed_on = 0, False, 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal requests
        requests += 1

    def leave(number: int, frame: FrameType | None) -> None:
        nonlocal leaving
        leaving = True

    def leaves() -> bool:
        nonlocal passed_on
        if leaving or (requests and not stops):
            tell(f"lockstep: the run goes on; look again: lockstep pod logs {pod.name} --follow")
            return True
        if requests > passed_on:
            passed_on = requests
            tell("lockstep: asking the run to save and leave; once more to end it at once"
                 if passed_on == 1 else "lockstep: asking the run to end at once")  # fmt: skip
            pod.stop(record, at_once=passed_on > 1)
        return False

    handlers = {
        **dict.fromkeys(unless_ignored([signal.SIGINT, signal.SIGTERM]), stop),
        **dict.fromkeys(unless_ignored([signal.SIGHUP]), leave),
    }
    with handled(handlers):
        return _follow_consoles(pod.transport, lambda worker, offset: pod.following(worker, offset, record.job), leaves)


def _follow_consoles(
    transport: Transport, command: Callable[[int, int], list[Command]], leaves: Callable[[], bool]
) -> int:
    """Shows all consoles until the run is over or `leaves` says so; returns the run's exit code."""
    out = getattr(sys.stdout, "buffer", None)
    consoles = []
    for worker, name in enumerate(transport.workers):
        prefix = f"[{name}] " if worker else ""
        consoles.append(_Console(transport, worker, lambda offset, at=worker: command(at, offset), prefix, out))  # type: ignore[misc, arg-type]
    leading, *others = consoles
    try:
        while not leading.is_over:
            if leaves():
                return 0
            # Where the head's host is gone, the agents of the others end.
            if leading.problem and others and all(each.is_over for each in others):
                break
            time.sleep(0.1)
    finally:
        for console in consoles:
            console.leave()
    if leading.code is not None:
        return leading.code
    raise HeadLost(
        f"{transport.workers[0]}, which leads the job, is out of reach: {leading.problem}. Where it is back: "
        "lockstep pod resume"
    )


class _Console:
    """Follows the console of one host in a thread. Lines of hosts other than the head begin with the host's name."""

    def __init__(
        self,
        transport: Transport,
        worker: int,
        command: Callable[[int], list[Command]],
        prefix: str,
        out: IO[bytes],
    ) -> None:
        self._transport, self._command, self._prefix, self._out = transport, command, prefix, out
        self._offset = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._left = False
        self.code: int | None = None  # of the run, once it is known
        self.problem = ""
        self._thread = threading.Thread(target=self._follow, name=f"lockstep-console-{worker}", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def leave(self) -> None:
        self._left = True
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._process.kill()

    def _follow(self) -> None:
        quiet_since = time.monotonic()
        while not self._left:
            before = self._offset
            code, errors = self._stream()
            if code != 255 and not self._left:
                self.code = code
                return
            self.problem = self._transport.explain(self._command(0)[0], code, errors)
            if self._offset > before:
                quiet_since = time.monotonic()
            if time.monotonic() > quiet_since + _PATIENCE_SECONDS:
                return
            time.sleep(_RETRY_SECONDS)

    def _stream(self) -> tuple[int, str]:
        (command,) = self._command(self._offset)
        # Not in the terminal's process group: Ctrl-C is handled here.
        self._process = subprocess.Popen(
            command.argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        pending, start = b"", ConsoleStart()
        while received := self._process.stdout.read1(_CHUNK):  # type: ignore[attr-defined]
            data = start.rest(received)
            self._offset += len(data)
            *lines, pending = (pending + data).split(b"\n")
            self._show(lines)
        self._offset -= len(pending)  # an unfinished line is asked for again
        errors = self._process.stderr.read().decode(errors="replace")
        code = self._process.wait()
        if pending and code != 255:
            self._show([pending])
        if code != 255 and (answer := decoded(start.instead.decode(errors="replace"))) is not None:
            self._show([f"lockstep: {answer.get('error')}".encode()])
        return code, errors

    def _show(self, lines: list[bytes]) -> None:
        for line in lines:
            text = visible(line.decode(errors="replace"))
            try:
                self._out.write(f"{self._prefix}{text}\n".encode())
                self._out.flush()
            except (OSError, ValueError):  # nobody reads it any more; the console is on the host
                return
