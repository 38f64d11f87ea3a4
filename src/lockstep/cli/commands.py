"""`lockstep`: all commands together, and what becomes of an error of ours."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import click

from lockstep.cli.help import Group, examples
from lockstep.cli.messages import say
from lockstep.errors import INTERRUPTED_EXIT_CODE, ConfigError, LockstepError
from lockstep.shown import shown
from lockstep.terminal import colour, make_safe

# The module of every command, which is imported when it is asked for.
_HOMES = {
    "train": "train",
    "resume": "train",
    "evaluate": "after",
    "predict": "after",
    "export": "export",
    "run": "run",
    "checkpoint": "checkpoint",
    "pod": "pod",
    "sweep": "sweep",
    "profile": "profile",
    "report": "report",
    "serve": "serve",
    "init": "init",
    "doctor": "doctor",
    "verify": "verify",
    "plan": "plan",
    "schema": "schema",
    "runs": "runs",
    "watch": "watch",
}


_ARGUMENTS = "lockstep.arguments"  # under which the command line is kept, for what is said of a mistake in it


class Commands(Group):
    """Turns our errors into a message and an exit code: a user never sees a bare traceback for a mistake."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        make_safe()
        kwargs.setdefault("color", colour(os.environ))
        return super().main(*args, **kwargs)

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted(_HOMES)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in _HOMES:
            return None
        command: click.Command = getattr(importlib.import_module(f"lockstep.cli.{_HOMES[name]}"), name)
        return command

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        context.meta[_ARGUMENTS] = list(args)
        return super().parse_args(context, args)

    def invoke(self, context: click.Context) -> Any:
        try:
            _require_a_current_folder()
            return super().invoke(context)
        except LockstepError as error:
            say(str(error))
            sys.exit(error.exit_code)
        except KeyboardInterrupt:  # before there was anything to end, or after
            say("interrupted")
            sys.exit(INTERRUPTED_EXIT_CODE)
        except click.ClickException as error:
            if isinstance(error, click.NoSuchOption):
                _name_the_setting(error, context.meta[_ARGUMENTS])
            vars(error)["message"] = shown(error.message)  # it quotes the command line, which may quote anything
            raise
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            say(_of_the_system(error))
            sys.exit(ConfigError.exit_code)


def _name_the_setting(error: click.NoSuchOption, arguments: list[str]) -> None:
    """`--epochs 3` is a value of the config: answer it with `--set train.epochs=3`."""
    takes_settings = error.ctx is not None and any(each.name == "overrides" for each in error.ctx.command.params)
    from lockstep.config.load import paths_called

    paths = paths_called(error.option_name.lstrip("-")) if takes_settings else []
    if not paths:
        return
    given = next((each for each in arguments if each.partition("=")[0] == error.option_name), "")
    value = given.partition("=")[2]
    if given and not value:
        following = arguments[arguments.index(given) + 1 :]
        value = following[0] if following and not following[0].startswith("--") else ""
    vars(error)["possibilities"] = [f"--set {path}={value or 'VALUE'}" for path in paths]


def _require_a_current_folder() -> None:
    """Whatever is relative to it would fail, each in its own way."""
    try:
        Path.cwd()
    except OSError as error:
        raise ConfigError(
            f"the folder that this command was given in cannot be entered any more: {error.strerror}. It was deleted, "
            "or is out of reach: cd into another one"
        ) from None


def _of_the_system(error: OSError) -> str:
    """What the system refused, where nobody nearer to it had more to say."""
    remedy = {
        errno.EMFILE: "; too many files are open: raise the limit (ulimit -n)",
        errno.ENFILE: "; the system has too many files open",
        errno.ENOSPC: "; make room on that disk, or name a folder on another one",
        errno.EDQUOT: "; make room on that disk, or name a folder on another one",
        errno.EACCES: "; this user may not",
        errno.EPERM: "; this user may not",
        errno.EROFS: "; nothing can be written there",
        errno.ENOMEM: "; there is not enough memory",
        errno.EAGAIN: "; the limit of processes is reached (ulimit -u)",
    }.get(error.errno or 0, "")
    place = f"{error.filename}: " if error.filename is not None else ""
    return f"{place}{error.strerror or error}{remedy}"


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples("lockstep init demo", "lockstep train demo/config.yaml", "lockstep COMMAND --help"),
)
@click.version_option(package_name="lockstep-train", prog_name="lockstep")
def main() -> None:
    """Train PyTorch models with every device in step."""
