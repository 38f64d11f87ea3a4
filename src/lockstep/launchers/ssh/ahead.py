"""Asks hosts before the config is read: what a push asked them the last time, and will most likely ask again.

To import and validate a config takes this machine as long as hosts take to let somebody in, and both can be done at
once. Where it turns out that something else is to be asked, or of others, what was asked ahead is dropped.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from lockstep.launchers.ssh.execute import Done, UnderWay
from lockstep.launchers.ssh.record import cache_of
from lockstep.launchers.ssh.ssh import Ssh
from lockstep.launchers.ssh.transport import Command


class Ahead:
    """A question that is under way."""

    def __init__(self, commands: Sequence[Command]) -> None:
        self.began = time.time()
        self._asked = UnderWay(commands)

    def answers(self, commands: Sequence[Command], limit: float) -> list[Done] | None:
        """To these commands, where they are what was asked."""
        return self._asked.done(limit) if list(self._asked.commands) == list(commands) else None

    def drop(self) -> None:
        self._asked.end()


@contextlib.contextmanager
def asked(pod: str) -> Iterator[Ahead | None]:
    """The question of the last time, put to the hosts of that time; None where nothing is known of one."""
    try:
        known = json.loads(_file(pod).read_text(encoding="utf-8"))
        hosts, argv = map(str, known["hosts"]), [str(part) for part in known["argv"]]
        found = Ahead(Ssh(list(hosts)).run(argv))
    except (OSError, ValueError, TypeError, KeyError):
        yield None
        return
    try:
        yield found
    finally:
        found.drop()


def remember(pod: str, hosts: Sequence[str], argv: Sequence[str]) -> None:
    """For the next time."""
    file = _file(pod)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as opened:
        json.dump({"hosts": list(hosts), "argv": list(argv)}, opened)
    partial.replace(file)


def _file(pod: str) -> Path:
    return cache_of(pod) / "asked.json"
