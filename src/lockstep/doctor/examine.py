"""All looks at this machine, one after the other."""

from __future__ import annotations

import socket
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from pathlib import Path

from lockstep.doctor import bucket, clock, dependencies, disk, installed, machine, network, processes, runtimes
from lockstep.doctor.ask import Question
from lockstep.doctor.check import Check
from lockstep.mirror.url import Url


def examine(asked: Collection[str], count: int | None, out: Path | Url, limit: float) -> Iterator[Check]:
    """Every check as soon as it is known. `asked` are the runtimes that have to work; none means any that is here."""
    began = clock.offset()
    yield from installed.look(asked)
    with Question("dependencies", limit=limit) as question:
        yield dependencies.judge(question.answer())
    yield from machine.look(count or 1)
    with ExitStack() as questions:
        host = socket.gethostname()
        address = questions.enter_context(Question("hostname", host, limit=limit))
        topic, judge = ("bucket", bucket.judge) if isinstance(out, Url) else ("disk", disk.judge)
        room = questions.enter_context(Question(topic, out, limit=limit))
        yield network.look()
        yield network.hostname(host, address.answer())
        yield judge(room.answer())
    if installed.version_of("torch") is None:
        yield from runtimes.not_tried(asked)
    else:
        yield from _running(asked, count, limit)
    yield clock.judge(time.time(), clock.newest_install(), clock.offset() - began)


def _running(asked: Collection[str], count: int | None, limit: float) -> Iterator[Check]:
    gpus = False
    for check in runtimes.look(asked, limit):
        gpus = gpus or check.name.startswith("cuda:")
        yield check
    if count is not None:
        for family in dict.fromkeys(asked) or ["cuda" if gpus else "cpu"]:
            yield from processes.look(count, family, limit)
