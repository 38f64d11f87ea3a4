"""The page of the command line, from what every command says of itself."""

from __future__ import annotations

from collections.abc import Iterator

import click

from lockstep.cli.commands import main

INTRODUCTION = """# The command line

This page lists every command with its options, as `lockstep COMMAND --help` shows them. A wrong command or config exits
with code 2; [failures](failures.md) lists all exit codes. `--set` takes the keys of [the configuration](config.md).
"""


def commands_page() -> str:
    with click.Context(main, info_name="lockstep") as context:
        parts = [part for name in main.list_commands(context) for part in _command(main, name, context, 2)]
    return "\n".join([INTRODUCTION, *parts])


def _command(group: click.Group, name: str, parent: click.Context, level: int) -> Iterator[str]:
    command = group.get_command(parent, name)
    assert command is not None
    with click.Context(command, parent=parent, info_name=name) as context:
        path = context.command_path
        usage = " ".join([path, *command.collect_usage_pieces(context)])
        yield f"{'#' * level} {path}\n\n```text\n{usage}\n```\n\n{_text(command.help)}\n"
        options = [record for each in command.get_params(context) if (record := each.get_help_record(context))]
        options = [(name, text) for name, text in options if text and "--help" not in name]
        if options:
            rows = [f"| `{_cell(option)}` | {_cell(_escaped(text))} |" for option, text in options]
            yield "\n".join(["| option | |", "| --- | --- |", *rows, ""])
        if command.epilog:
            yield f"{_text(command.epilog)}\n"
        if isinstance(command, click.Group):
            for below in command.list_commands(context):
                yield from _command(command, below, context, level + 1)


def _text(text: str | None) -> str:
    """Paragraphs of a docstring; after click's mark for such, lines that stay lines."""
    kept = "\n\n".join(_paragraph(each) for each in (text or "").split("\f")[0].split("\n\n"))
    return kept.strip()


def _paragraph(text: str) -> str:
    if text.startswith("\b"):
        return f"```text\n{text[1:].strip(chr(10))}\n```"
    return _escaped(" ".join(text.split()))


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", "\\*").replace("[", "\\[")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
