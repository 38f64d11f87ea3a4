"""How the command line speaks: on standard error, every line with its name."""

from __future__ import annotations

import click


def say(text: str) -> None:
    for line in text.splitlines():
        click.echo(f"lockstep: {line}" if line else "", err=True)
