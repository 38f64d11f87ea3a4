"""`lockstep doctor`: what is installed, what works on this machine, and what to do about what does not."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack
from pathlib import Path

from lockstep.doctor import machine, runtimes
from lockstep.doctor.ask import Question
from lockstep.doctor.check import Check
from lockstep.mirror.url import Url
from lockstep.version import version_of


def examine(asked: Collection[str], count: int | None, out: Path | Url, limit: float) -> Iterator[Check]:
    """Yields every check as soon as it is known. `asked` are the runtimes that must work; none means any."""
    yield from machine.look(asked)
    topic = "bucket" if isinstance(out, Url) else "disk"
    with ExitStack() as questions:
        packages = questions.enter_context(Question("dependencies", limit=limit))
        room = questions.enter_context(Question(topic, out, limit=limit))
        dependencies = packages.check("dependencies", "reinstall what this message names")
        yield dependencies
        yield machine.port()
        yield room.check(topic, "name another place, one that answers, with --out")
    if dependencies.verdict == "fail" or version_of("torch") is None:
        for family in asked or runtimes.FAMILIES:
            found, remedy = "not tried: torch or a dependency does not work", "see to the checks above that failed"
            yield Check(family, "fail" if asked else "none", found, remedy if asked else "")
        return
    checks = []
    for check in runtimes.look(asked, limit):
        checks.append(check)
        yield check
    if count is not None:
        gpus = any(check.name.startswith("cuda:") for check in checks)
        for family in dict.fromkeys(asked) or ["cuda" if gpus else "cpu"]:
            yield runtimes.look_at_processes(count, family, limit)
