"""`lockstep doctor`: what is installed, what works on this machine, and what to do about what does not."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from pathlib import Path

from lockstep.doctor import installed, machine, runtimes
from lockstep.doctor.ask import Question
from lockstep.doctor.check import Check
from lockstep.mirror.url import Url


def examine(asked: Collection[str], count: int | None, out: Path | Url, limit: float) -> Iterator[Check]:
    """Yields every check as soon as it is known. `asked` are the runtimes that must work; none means any."""
    began = machine.clock_offset()
    yield from installed.look(asked)
    with Question("dependencies", limit=limit) as question:
        yield installed.judge_dependencies(question.answer())
    yield from machine.look(count or 1)
    with ExitStack() as questions:
        host = socket.gethostname()
        address = questions.enter_context(Question("hostname", host, limit=limit))
        topic, judge = ("bucket", machine.judge_bucket) if isinstance(out, Url) else ("disk", machine.judge_disk)
        room = questions.enter_context(Question(topic, out, limit=limit))
        yield machine.network()
        yield machine.hostname(host, address.answer())
        yield judge(room.answer())
    if installed.version_of("torch") is None:
        yield from runtimes.not_tried(asked)
    else:
        gpus = False
        for check in runtimes.look(asked, limit):
            gpus = gpus or check.name.startswith("cuda:")
            yield check
        if count is not None:
            for family in dict.fromkeys(asked) or ["cuda" if gpus else "cpu"]:
                yield from runtimes.look_at_processes(count, family, limit)
    yield machine.clock(began)
