"""`lockstep`: the commands, `init` and `schema`, and how errors become messages and exit codes."""

from __future__ import annotations

import errno
import importlib
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from lockstep.cli.common import Group, examples, say
from lockstep.errors import INTERRUPTED_EXIT_CODE, ConfigError, LockstepError
from lockstep.shown import shown
from lockstep.terminal import colour, make_safe


@click.command(epilog=examples("lockstep schema > lockstep.schema.json"))
def schema() -> None:
    """Print the JSON schema of the config, for editors."""
    from lockstep.config.schema import RunConfig

    click.echo(json.dumps(RunConfig.model_json_schema(by_alias=True), indent=2))


@click.command(epilog=examples("lockstep init demo"))
@click.argument("folder", type=click.Path(path_type=Path), default=Path())
def init(folder: Path) -> None:
    """Write a task and a config to start from into FOLDER."""
    templates = Path(__file__).parents[1] / "templates"
    files = {"task.py": templates / "task.py.txt", "config.yaml": templates / "config.yaml"}
    present = [name for name in files if (folder / name).exists()]
    if present:
        raise ConfigError(f"{folder / present[0]} is there already; name another folder: lockstep init FOLDER")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, template in files.items():
            text = template.read_text(encoding="utf-8").replace("name: NAME", _name_line(folder))
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from None
    config = folder / "config.yaml"
    say(f"wrote {folder / 'task.py'} and {config}; next: lockstep train {shlex.quote(str(config))}")


def _name_line(folder: Path) -> str:
    """Returns the line that names runs after the folder, as wide as the line it replaces."""
    from lockstep.config.load import to_yaml
    from lockstep.launchers.base import run_name

    return to_yaml({"name": run_name(folder.resolve().name)}).strip().ljust(len("name: NAME"))


# The module of each command, which is imported when the command is used.
_MODULES = {
    "after": ("evaluate", "predict", "export"),
    "checkpoint": ("checkpoint",),
    "commands": ("init", "schema"),
    "doctor": ("doctor", "verify"),
    "plan": ("plan",),
    "pod": ("pod",),
    "runs": ("runs", "report", "serve", "sweep", "profile"),
    "train": ("train", "resume"),
    "watch": ("watch",),
}
_HOMES = {command: module for module, commands in _MODULES.items() for command in commands}
_ARGUMENTS = "lockstep.arguments"  # the key of the command line in click's context, for messages about a mistake in it


class Commands(Group):
    """Turns Lockstep's errors into a message and an exit code."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        make_safe()
        kwargs.setdefault("color", colour(os.environ))
        return super().main(*args, **kwargs)

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted(_HOMES)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in _HOMES:
            return None
        return vars(importlib.import_module(f"lockstep.cli.{_HOMES[name]}"))[name]  # type: ignore[no-any-return]

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
        except KeyboardInterrupt:
            say("interrupted")
            sys.exit(INTERRUPTED_EXIT_CODE)
        except click.ClickException as error:
            if isinstance(error, click.NoSuchOption):
                _name_the_setting(error, context.meta[_ARGUMENTS])
            vars(error)["message"] = shown(error.message)  # it quotes the command line
            raise
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            say(_of_the_system(error))
            sys.exit(ConfigError.exit_code)


def _name_the_setting(error: click.NoSuchOption, arguments: list[str]) -> None:
    """Answers `--epochs 3`, a value of the config, with `--set train.epochs=3`."""
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
    try:
        Path.cwd()
    except OSError as error:
        raise ConfigError(
            f"the current folder cannot be entered any more: {error.strerror}. It was deleted, or is out of reach: cd "
            "into another one"
        ) from None


def _of_the_system(error: OSError) -> str:
    remedy = {
        errno.EMFILE: "; raise the limit (ulimit -n)",
        errno.ENOSPC: "; make room on that disk, or name a folder on another one",
        errno.EDQUOT: "; make room on that disk, or name a folder on another one",
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
