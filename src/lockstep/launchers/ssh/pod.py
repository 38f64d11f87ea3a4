"""Ranks on hosts that are reached by SSH or gcloud: started there, detached, and followed from here."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from lockstep.distributed.signals import handled, unless_ignored
from lockstep.launchers import fitting
from lockstep.terminal import tell

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.launchers.ssh.record import Record
    from lockstep.launchers.ssh.verbs import Pod
    from lockstep.mirror.url import Url


def train(config: RunConfig, name: str, out: Path | Url) -> int:
    """Push, start and follow; the run's exit code."""
    from lockstep.launchers.ssh.verbs import Pod

    _tell_of_the_check(config)
    pod = Pod(name, config)
    return _to_its_end(pod, _start(pod, out))


def resume(name: str, config: RunConfig | None = None) -> int:
    """Go on with the newest run of a pod, from its newest checkpoint."""
    from lockstep.config.changes import changes, refuse_wrong_changes
    from lockstep.config.changes import described as described_change
    from lockstep.errors import ConfigError
    from lockstep.launchers.ssh import record as records
    from lockstep.launchers.ssh.verbs import Pod

    known = records.read(name)
    if known.folder is None:
        raise ConfigError(f"pod {name}: no run was started there yet")
    before = known.run_config()
    config = config or before
    found = changes(before.plain(), config.plain())
    refuse_wrong_changes(found, config.plain())
    for change in found:
        tell(f"lockstep: changed: {described_change(change)}")
    _tell_of_the_check(config)
    pod = Pod(name, config)
    pod.make_ready()
    return _to_its_end(pod, _start(pod, Path(), known))


def _start(pod: Pod, out: Path | Url, known: Record | None = None) -> Record:
    """The config is checked here while the hosts are asked."""
    from lockstep.launchers.checking import Checking

    check = Checking(pod.config)
    try:
        return pod.start(out, known, check.finish)
    finally:
        check.end()


def _tell_of_the_check(config: RunConfig) -> None:
    fitting.not_checked(config, "on the hosts of a pod", lambda text: tell(f"lockstep: {text}"))


def _to_its_end(pod: Pod, started: Record) -> int:
    """Follow a job. Where the host that leads it dies, no agent may take its place: two could, on both sides of a cut
    link. Whoever started the run can, by another job on the hosts that are left."""
    from lockstep.errors import LaunchError
    from lockstep.launchers.ssh import record as records
    from lockstep.launchers.ssh.follow import HeadLost

    restarts = pod.config.launch.max_restarts
    for restart in range(1, restarts + 2):
        records.write(started)
        _tell_started(pod, started)
        try:
            return follow(pod, started, stops=True)
        except HeadLost as lost:
            if restart > restarts:
                raise HeadLost(
                    f"{lost}. Go on where it is back, or by spares: lockstep pod resume {pod.name}"
                ) from None
            tell(f"lockstep: {lost}\nlockstep: restarting from the newest checkpoint (restart {restart} of {restarts})")
            try:
                started = pod.start(Path(), started)
            except LaunchError as error:
                raise HeadLost(f"{lost}; and no other job could be started: {error}") from None
    raise AssertionError("an attempt returns or is followed by another")


def follow(pod: Pod, record: Record, stops: bool) -> int:
    """Show what the hosts say until the run is over. With `stops`, Ctrl-C asks the run to stop; else it only leaves."""
    from lockstep.launchers.ssh.follow import follow as follow_consoles

    asked = _Asked()
    told = 0

    def leave() -> bool:
        nonlocal told
        if asked.left or (asked.count and not stops):
            tell(f"lockstep: the run goes on; look again: lockstep pod logs {pod.name} --follow")
            return True
        if asked.count > told:
            told = asked.count
            tell("lockstep: asking the run to save and leave; once more to end it at once"
                 if told == 1 else "lockstep: asking the run to end at once")  # fmt: skip
            pod.stop(record, at_once=told > 1)
        return False

    with asked.listening():
        return follow_consoles(
            pod.transport, lambda worker, offset: pod.following(worker, offset, record.job), pod.head(record), leave
        )


class _Asked:
    """Signals of this terminal, which is not where the run is."""

    def __init__(self) -> None:
        self.count, self.left = 0, False

    @contextmanager
    def listening(self) -> Iterator[None]:
        stops = dict.fromkeys(unless_ignored([signal.SIGINT, signal.SIGTERM]), self._stop)
        leaves = dict.fromkeys(unless_ignored([signal.SIGHUP]), self._leave)
        with handled({**stops, **leaves}):
            yield

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.count += 1

    def _leave(self, number: int, frame: FrameType | None) -> None:
        self.left = True


def _tell_started(pod: Pod, record: Record) -> None:
    hosts = ", ".join(pod.transport.workers)
    tell(f"lockstep: job {record.job} of pod {pod.name} on {hosts}; run folder {record.head}:{record.folder}")


def described(config: RunConfig, name: str, folder: str | None = None) -> str:
    """The commands of `train`, in order; with the folder of a run, those of a resume."""
    from lockstep.launchers.ssh.record import archive_of
    from lockstep.launchers.ssh.verbs import Pod

    pod = Pod(name, config)
    workers = range(len(pod.transport.workers))
    commands = [
        *pod.inspecting(folder, make=True, claim="JOB"),
        *(c for each in workers for c in pod.copying(each, pod.archive(each))),
    ]
    for stage in zip(*(pod.starting(each, "JOB", f"{config.pod.directory}/{name}") for each in workers), strict=True):
        commands += [command for part in stage for command in part]
    commands += [command for each in workers for command in pod.following(each)]
    note = f"# {archive_of(name).parent}/push-N.tar: what a host lacks of the code, and its order"
    return "\n".join([note, *(command.render() for command in commands)])
