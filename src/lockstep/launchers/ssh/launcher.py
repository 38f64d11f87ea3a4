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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.config.changes import changes, refuse_wrong_changes
from lockstep.config.changes import described as described_change
from lockstep.distributed.signals import handled, unless_ignored
from lockstep.errors import ConfigError, LaunchError, LockstepError
from lockstep.launchers import checks
from lockstep.launchers.base import Ended, Out, Say
from lockstep.launchers.local import launcher as local
from lockstep.launchers.ssh import record as records
from lockstep.launchers.ssh.pod import Pod
from lockstep.launchers.ssh.record import Record
from lockstep.launchers.ssh.ssh import CONSOLE, SEPARATOR, Command, decoded
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


def plan(config: RunConfig, out: Out, folder: str | None = None) -> tuple[RunConfig, str]:
    if folder is not None:
        return local.plan(config, out, folder)
    return config, plan_pod(config, out.pod or str(config.name))


def plan_pod(config: RunConfig, name: str, folder: str | None = None) -> str:
    """Returns the commands that start a run, in order; with the folder of a run, those that resume it."""
    pod = Pod(name, config)
    workers = range(len(pod.transport.workers))
    commands = [*pod.inspecting(folder, make=True, claim="JOB"), *pod.copying()]
    for stage in zip(*(pod.starting(each, "JOB", f"{config.pod.directory}/{name}") for each in workers), strict=True):
        commands += [command for part in stage for command in part]
    commands += [command for each in workers for command in pod.following(each)]
    note = f"# {records.archive_of(name)}: the code, and the order of the job"
    return "\n".join([note, *(command.render() for command in commands)])


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
    hosts = pod.transport.workers
    tell(f"lockstep: job {started.job} of pod {pod.name} on {', '.join(hosts)}; run folder {hosts[0]}:{started.folder}")
    return follow(pod, started, stops=True)


def follow(pod: Pod, record: Record, stops: bool) -> int:
    """Shows the consoles of a job until it ends. With `stops`, Ctrl-C asks the run to stop; else it only leaves."""
    requests: list[int] = []
    handlers = dict.fromkeys(
        unless_ignored([signal.SIGINT, signal.SIGTERM, signal.SIGHUP]), lambda number, frame: requests.append(number)
    )
    passed_on = 0
    with handled(handlers):
        leading, *others = consoles = [
            _Console(pod, record, worker, f"[{name}] " if worker else "")
            for worker, name in enumerate(pod.transport.workers)
        ]
        try:
            # Where the head's host is gone, the agents of the others end.
            while not (leading.is_over or (leading.problem and others and all(each.is_over for each in others))):
                if requests and (signal.SIGHUP in requests or not stops):
                    tell(f"lockstep: the run goes on; look again: lockstep pod logs {pod.name} --follow")
                    return 0
                if len(requests) > passed_on:
                    passed_on = len(requests)
                    doing = "save and leave; once more to end it at once" if passed_on == 1 else "end at once"
                    tell(f"lockstep: asking the run to {doing}")
                    pod.stop(record, at_once=passed_on > 1)
                time.sleep(0.1)
        finally:
            for console in consoles:
                console.leave()
    if leading.code is not None:
        return leading.code
    raise HeadLost(
        f"{pod.transport.workers[0]}, which leads the job, is out of reach: {leading.problem}. Where it is back: "
        "lockstep pod resume"
    )


def show_console(pod: Pod, record: Record, worker: int, follow: bool) -> None:
    """Shows the console of one host, until the run ends or as far as it is."""
    console = _Console(pod, record, worker, f"[{pod.transport.workers[worker]}] ", follow)
    while not console.is_over:
        time.sleep(0.1)
    if console.code is None:
        raise LaunchError(f"{pod.transport.workers[worker]}: {console.problem}")


class _Console:
    """Follows the console of one host in a thread: a lost connection is made again from where it was."""

    def __init__(self, pod: Pod, record: Record, worker: int, prefix: str, follow: bool = True) -> None:
        self._pod, self._job, self._worker, self._prefix, self._following = pod, record.job, worker, prefix, follow
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
            (command,) = self._pod.following(self._worker, self._offset, self._job, self._following)
            self.problem = self._stream(command)
            if self.code is not None:
                return
            if self._offset > before:
                quiet_since = time.monotonic()
            if time.monotonic() > quiet_since + _PATIENCE_SECONDS:
                return
            time.sleep(_RETRY_SECONDS)

    def _stream(self, command: Command) -> str:
        """Shows the console from the offset on. Returns why it is cut off, where its end has not come."""
        # Not in the terminal's process group: Ctrl-C is handled here.
        self._process = subprocess.Popen(
            command.argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        pending, line, began, position = b"", b"", self._offset, -1
        while received := self._process.stdout.read1(_CHUNK):  # type: ignore[attr-defined]
            *lines, pending = (pending + received).split(b"\n")
            for line in lines:
                if line.endswith(CONSOLE[:-1]):  # once more where gcloud repeats a command whose connection was lost
                    position = began
                elif position >= 0:  # else a shell printed it, or there is an answer in place of a console
                    position += len(line) + 1
                    if position > self._offset:
                        self._offset = position
                        self._show(line)
        errors = self._process.stderr.read().decode(errors="replace")
        code = self._process.wait()
        answer = decoded((pending or line).decode(errors="replace"))
        if answer is None:
            return self._pod.transport.explain(command, code, errors)
        if "error" in answer:
            pending = f"lockstep: {answer['error']}".encode()
        if last := pending.partition(SEPARATOR.encode())[0]:
            self._show(last)
        self.code = int(answer.get("exit_code", LaunchError.exit_code))
        return ""

    def _show(self, line: bytes) -> None:
        text = visible(line.decode(errors="replace"))
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more; the console is on the host
            sys.stdout.write(f"{self._prefix}{text}\n")
            sys.stdout.flush()
