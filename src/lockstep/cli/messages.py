"""How the command line speaks: on standard error, every line with its name."""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
from collections.abc import Iterator
from pathlib import Path

import click

from lockstep.shown import shown


def say(text: str) -> None:
    for line in shown(text).split("\n"):
        click.echo(f"lockstep: {line}" if line else "", err=True)


def say_whose_code(given: object) -> None:
    """Says that a command is about to run code that another user has chosen, by the owner of a config or a run."""
    from lockstep.distributed.topology import Topology, launched

    if not isinstance(given, Path) or (launched(os.environ) and Topology.from_env(os.environ).place.rank):
        return
    owners = set()
    for each in (given, given / "config.yaml", given / "launch.yaml"):
        with contextlib.suppress(OSError):
            owners.add(each.stat().st_uid)
    for owner in sorted(owners - {os.geteuid(), 0}):
        try:
            name = pwd.getpwuid(owner).pw_name
        except KeyError:
            name = f"uid {owner}"
        say(f"{given} belongs to {name}, and this command imports and runs the code that its config names")


@contextlib.contextmanager
def saying_what_is_logged() -> Iterator[None]:
    """For what the command does itself by code that ranks have a log for."""
    handler = _Saying()
    ours = logging.getLogger("lockstep")
    if any(isinstance(each, _Saying) for each in ours.handlers):
        yield
        return
    ours.addHandler(handler)
    try:
        yield
    finally:
        ours.removeHandler(handler)


class _Saying(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())
