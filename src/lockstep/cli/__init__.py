"""The command line, one file per group of commands.

Nothing here imports torch before it is needed: help and a config error answer at once.
"""

from lockstep.cli.commands import main

__all__ = ["main"]
