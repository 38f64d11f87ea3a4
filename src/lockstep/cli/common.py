"""Parts that several commands share: options, messages on standard error, and help with examples."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pwd
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import click

from lockstep.config.plain import nearest
from lockstep.distributed.signals import handled, unless_ignored
from lockstep.errors import INTERRUPTED_EXIT_CODE, ConfigError
from lockstep.shown import shown

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from lockstep.mirror.url import Url

Given = ParamSpec("Given")
Returned = TypeVar("Returned")

# A command must be this similar to what was typed to be suggested.
_SIMILAR = 0.6


def run_dir(given: str | Path, setting: str = "RUN_DIR") -> Path | Url:
    from lockstep.mirror.url import place

    return place(given, setting)


def complete_run_dir(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completes the runs in runs/, or else any folder."""
    from click.shell_completion import CompletionItem

    names = sorted((str(file.parent) for file in Path("runs").glob("*/summary.json")), reverse=True)
    fitting = [CompletionItem(name) for name in names if name.startswith(incomplete)]
    return fitting or [CompletionItem(incomplete, type="dir")]


RUN_DIR = click.argument("run_dir", type=run_dir, shell_complete=complete_run_dir)
SET = click.option(
    "--set", "overrides", multiple=True, metavar="KEY.PATH=VALUE", help="Override a config value; VALUE is YAML."
)
OUT = click.option(
    "--out", type=lambda given: run_dir(given, "--out"), default="runs", metavar="DIR|URL",
    help="Where run folders are made: a folder, s3://... or gs://...",
)  # fmt: skip
WEIGHTS = click.option(
    "--weights",
    type=click.Choice(["raw", "ema"]),
    default="raw",
    help="As trained, or averaged by train.ema.",
)
PROFILE = click.option("--profile", is_flag=True, help="Write a trace of a few steps; short for profile.enabled=true.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
DRY_RUN = click.option("--dry-run", is_flag=True, help="Print the resolved config and the launch plan; start nothing.")


def with_profile(overrides: tuple[str, ...], profile: bool) -> tuple[str, ...]:
    return (*overrides, "profile.enabled=true") if profile else overrides


def require_new(out: Path) -> None:
    """Refuses an --out that exists, or whose folder does not."""
    if out.exists():
        raise ConfigError(f"--out {out}: is there already: name one that is not, or move it away")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.absolute().parent}: make it, or name another one")


class Group(click.Group):
    """A group of commands that answers a misspelt one with the nearest name."""

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not context.resilient_parsing and not name.startswith("-") and self.get_command(context, name) is None:
            names = self.list_commands(context)
            found = nearest(name, names, _SIMILAR)
            meant = f"did you mean {found}?" if found else f"there are {', '.join(names)}"
            raise click.UsageError(f"there is no command {name!r}: {meant}", context)
        return super().resolve_command(context, args)


def examples(*lines: str) -> str:
    """Returns the end of a command's help: each line as it is typed."""
    head = "Example:" if len(lines) == 1 else "Examples:"
    return "\n".join(["\b", head, *(f"  {line}" for line in lines)])


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
    """Prints log records of Lockstep while this process does what ranks otherwise do."""
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


def leaving_at_once(command: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """Ends this process at Ctrl-C until ranks are started, which handle it themselves.

    KeyboardInterrupt would be raised in the middle of an import, or be lost in code that ignores it.
    """

    @functools.wraps(command)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
        with handled(dict.fromkeys(unless_ignored([signal.SIGINT]), _leave)):
            return command(*args, **kwargs)

    return run


def _leave(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"lockstep: interrupted\n")  # not through the stream, which may be in the middle of a write
    os._exit(INTERRUPTED_EXIT_CODE)
