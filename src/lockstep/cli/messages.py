"""How the command line speaks: on standard error, every line with its name."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import click

from lockstep.shown import shown


def say(text: str) -> None:
    for line in shown(text).split("\n"):
        click.echo(f"lockstep: {line}" if line else "", err=True)


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
