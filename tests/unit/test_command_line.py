"""The command line as people expect it: help with examples that parse, the name that was meant, completion, colours."""

from __future__ import annotations

import os
import pty
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from lockstep.cli import main
from lockstep.terminal import colour

# A shell that has read the script and is asked what it would offer for a line. No list of ours is in it.
BASH = """
eval "$(_LOCKSTEP_COMPLETE=bash_source lockstep)"
COMP_WORDS=($1); COMP_CWORD=$2; COMPREPLY=()
_lockstep_completion lockstep
printf '%s\\n' "${COMPREPLY[@]}"
"""


def commands(group: click.Group = main, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


COMMANDS = dict(commands())


@pytest.mark.parametrize(
    "path", [path for path, each in COMMANDS.items() if not isinstance(each, click.Group)], ids=" ".join
)
def test_every_command_has_an_example_that_it_understands(path: tuple[str, ...]) -> None:
    command = COMMANDS[path]
    assert command.help, "it does not say what it does"
    lines = [line.strip() for line in (command.epilog or "").splitlines() if line.strip().startswith("lockstep ")]
    assert lines, "its help has no example"
    for line in lines:
        words = shlex.split(line.partition(" > ")[0])[1:]
        assert tuple(words[: len(path)]) == path
        command.make_context(path[-1], words[len(path) :])  # refuses an option or a value that there is not


def test_a_misspelt_name_is_answered_with_the_one_that_was_meant() -> None:
    for arguments, meant in (
        (["trian"], "there is no command 'trian': did you mean train?"),
        (["checkpoint", "lst"], "there is no command 'lst': did you mean list?"),
        (["pod", "pul"], "there is no command 'pul': did you mean pull?"),
        (["xyzzy"], "there is no command 'xyzzy': there are checkpoint, doctor,"),
    ):
        result = CliRunner().invoke(main, arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert meant in result.stderr
    for arguments, meant in (
        (["train", "c.yaml", "--epochs", "3"], "--set train.epochs=3"),
        (["train", "c.yaml", "--lr=0.1"], "--set optimizer.lr=0.1"),
        (["resume", "run", "--batch-size", "3", "--best"], "--set train.batch_size=3"),
    ):
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 2 and f"'{meant}'" in result.stderr and "--pod" not in result.stderr
    result = CliRunner().invoke(main, ["train", "--dry-rnu"])
    assert result.exit_code == 2
    assert "--dry-run" in result.stderr


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """An environment in which `lockstep` is the one under test, and leaves word of what it imported."""
    script = tmp_path / "lockstep"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -X importtime -m lockstep "$@" 2>> "{tmp_path}/imports"\n')
    script.chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("line", "offered", "not_offered"),
    [
        ("lockstep tr", {"train"}, {"resume"}),
        ("lockstep checkpoint ", {"list", "verify"}, {"train"}),
        ("lockstep train --dr", {"--dry-run"}, {"--set"}),
        ("lockstep resume runs/di", {"runs/digits-1", "runs/digits-2"}, {"runs/other-1"}),
    ],
)
def test_bash_completes_without_torch(
    line: str, offered: set[str], not_offered: set[str], tmp_path: Path, shell: dict[str, str]
) -> None:
    for name in ("digits-1", "digits-2", "other-1"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "summary.json").write_text("{}")
    word = str(len(line.split()) - (not line.endswith(" ")))
    done = subprocess.run(
        [str(shutil.which("bash")), "-c", BASH, "bash", line, word],
        env=shell, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    found = set(done.stdout.split())
    assert offered <= found and not found & not_offered, done.stderr
    imported = {each.rpartition("|")[2].strip() for each in (tmp_path / "imports").read_text().splitlines()}
    assert "lockstep.cli.commands" in imported
    assert not imported & {"torch", "rich", "numpy.core"}


def test_colours_are_for_terminals_unless_one_says_otherwise() -> None:
    assert colour({}) is None  # as the stream is
    assert colour({"TERM": "xterm"}) is None
    assert colour({"TERM": "dumb"}) is False
    assert colour({"NO_COLOR": "1"}) is False
    assert colour({"NO_COLOR": ""}) is None  # an empty value is none, by no-color.org
    assert colour({"FORCE_COLOR": "1"}) is True
    assert colour({"FORCE_COLOR": "0"}) is False
    assert colour({"FORCE_COLOR": "1", "TERM": "dumb"}) is True
    assert colour({"FORCE_COLOR": "1", "NO_COLOR": "1"}) is False


def on_a_terminal(command: list[str], cwd: Path, env: dict[str, str]) -> str:
    """What a command writes where its standard output is a terminal."""
    ours, theirs = pty.openpty()
    try:
        subprocess.run(command, cwd=cwd, env=env, stdout=theirs, stderr=subprocess.DEVNULL, timeout=60, check=True)
        os.close(theirs)
        theirs = -1
        said = b""
        while True:
            try:
                more = os.read(ours, 65536)
            except OSError:  # nobody has the other end any more
                more = b""
            if not more:
                return said.decode()
            said += more
    finally:
        os.close(ours)
        if theirs >= 0:
            os.close(theirs)


def test_a_table_is_coloured_on_a_terminal_and_nowhere_else(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "digits-20260101-120000"
    (run / "logs").mkdir(parents=True)
    (run / "config.yaml").write_text("task: task.py:Mine\n")
    (run / "summary.json").write_text('{"status": "completed", "step": 3}')
    command = [sys.executable, "-m", "lockstep", "runs"]
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    plain["TERM"] = "xterm"
    assert "\x1b[32mcompleted" in on_a_terminal(command, tmp_path, plain)
    assert "\x1b" not in on_a_terminal(command, tmp_path, {**plain, "NO_COLOR": "1"})
    assert "\x1b" not in on_a_terminal(command, tmp_path, {**plain, "TERM": "dumb"})
    for more, coloured in (({}, False), ({"FORCE_COLOR": "1"}, True)):
        done = subprocess.run(command, cwd=tmp_path, env={**plain, **more}, capture_output=True, timeout=60, check=True)
        assert (b"\x1b[32m" in done.stdout) is coloured
