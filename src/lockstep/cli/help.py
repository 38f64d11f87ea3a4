"""What every command has: examples below its help, and the nearest name for one that there is not."""

from __future__ import annotations

import click

from lockstep.config.plain import nearest

# A name must be this similar to be offered: `lockstep x` is no misspelt anything.
_SIMILAR = 0.6


class Group(click.Group):
    """Commands under one name; a misspelt one is answered with the one that was meant."""

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not context.resilient_parsing and not name.startswith("-") and self.get_command(context, name) is None:
            raise click.UsageError(self.unknown(context, name), context)
        return super().resolve_command(context, args)

    def unknown(self, context: click.Context, name: str) -> str:
        """What to say of a name that is no command here."""
        names = self.list_commands(context)
        found = nearest(name, names, _SIMILAR)
        meant = f"did you mean {found}?" if found else f"there are {', '.join(names)}"
        return f"there is no command {name!r}: {meant}"


def examples(*lines: str) -> str:
    """What the help of a command ends with, each line as it is typed."""
    head = "Example:" if len(lines) == 1 else "Examples:"
    return "\n".join(["\b", head, *(f"  {line}" for line in lines)])
