"""`lockstep`: all commands together, and what becomes of an error of ours."""

from __future__ import annotations

import sys
from typing import Any

import click

from lockstep.cli.doctor import doctor
from lockstep.cli.init import init
from lockstep.cli.messages import say
from lockstep.cli.profile import profile
from lockstep.cli.run import run
from lockstep.cli.schema import schema
from lockstep.cli.train import resume, train
from lockstep.cli.verify import verify
from lockstep.errors import LockstepError
from lockstep.shown import shown


class Commands(click.Group):
    """Turns our errors into a message and an exit code: a user never sees a bare traceback for a mistake."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except LockstepError as error:
            say(str(error))
            sys.exit(error.exit_code)
        except click.ClickException as error:
            vars(error)["message"] = shown(error.message)  # it quotes the command line, which may quote anything
            raise


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="lockstep-train", prog_name="lockstep")
def main() -> None:
    """Train PyTorch models with every device in step."""


for command in (train, resume, run, profile, init, doctor, verify, schema):
    main.add_command(command)
