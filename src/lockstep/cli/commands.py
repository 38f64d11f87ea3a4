"""`lockstep`: the commands, `init` and `schema`, and how errors become messages and exit codes."""

from __future__ import annotations

import errno
import importlib
import json
import os
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
    say(f"wrote {folder / 'task.py'} and {folder / 'config.yaml'}; next: lockstep train {folder / 'config.yaml'}")


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

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except LockstepError as error:
            say(str(error))
            sys.exit(error.exit_code)
        except KeyboardInterrupt:
            say("interrupted")
            sys.exit(INTERRUPTED_EXIT_CODE)
        except click.ClickException as error:
            if isinstance(error, click.NoSuchOption) and any(
                each.name == "overrides" for each in (error.ctx.command.params if error.ctx else ())
            ):
                vars(error)["possibilities"] = [*(error.possibilities or ()), "--set KEY.PATH=VALUE"]
            vars(error)["message"] = shown(error.message)  # it quotes the command line
            raise
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            say(f"{error.filename}: {error.strerror}" if error.filename is not None else str(error))
            sys.exit(ConfigError.exit_code)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples("lockstep init demo", "lockstep train demo/config.yaml", "lockstep COMMAND --help"),
)
@click.version_option(package_name="lockstep-train", prog_name="lockstep")
def main() -> None:
    """Train PyTorch models with every device in step."""
