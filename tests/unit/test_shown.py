"""Text of others on a terminal: no control character gets there, and nothing without end."""

from __future__ import annotations

import logging
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cli import main
from lockstep.cli.common import say
from lockstep.distributed.failure import find_cause, report
from lockstep.record.display import Display
from lockstep.record.logs import rank_log
from lockstep.shown import LONGEST, binary_size, in_a_line, shown, size, visible


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("plain text, é, 中文, ✓", "plain text, é, 中文, ✓"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("by\r\nWindows", "by\nWindows"),
        ("\x1b[31mred\x1b[0m \x07\x00\x7f", "\\x1b[31mred\\x1b[0m \\x07\\x00\\x7f"),
        ("\x9b31m over\rwritten \x08", "\\x9b31m over\\rwritten \\x08"),
        ("user\u202etxt.exe \u200b\u2028", "user\\u202etxt.exe \\u200b\\u2028"),
        ("\ud800 \udcff", "\\ud800 \\udcff"),
        ("a\xa0b\u3000c", "a\xa0b\u3000c"),
    ],
)
def test_what_is_no_plain_character_is_written_out(text: str, seen: str) -> None:
    assert visible(text) == seen
    assert visible(seen) == seen


@given(st.text())
def test_whatever_it_is_it_can_be_printed(text: str) -> None:
    seen = visible(text)
    seen.encode()
    assert all(each.isprintable() or each in "\n\t" or each.isspace() for each in seen)
    assert not {"\x1b", "\r", "\x0b", "\x0c", "\x85", "\u2028"} & set(seen)
    assert "\n" not in in_a_line(text)


def test_of_what_is_very_long_the_beginning_and_the_end_are_shown() -> None:
    text = "headline " + "x" * 100_000 + " last line"
    seen = shown(text)
    assert len(seen) <= LONGEST and seen.startswith("headline x") and seen.endswith("x last line")
    assert "\n... 94519 characters are left out here ...\n" in seen
    assert shown("x" * LONGEST) == "x" * LONGEST


def test_what_the_command_line_says(capfd: pytest.CaptureFixture[str]) -> None:
    say("wrong:\n\n  \x1b]0;title\x07" + "y" * 10_000)
    err = capfd.readouterr().err
    assert err.startswith("lockstep: wrong:\n\nlockstep:   \\x1b]0;title\\x07yyy") and len(err) < LONGEST + 100


def test_a_command_line_that_is_quoted() -> None:
    result = CliRunner().invoke(main, ["tra\x1b[31min"], color=True)
    assert "there is no command 'tra\\x1b[31min'" in result.stderr and "\x1b" not in result.output


def test_an_exception_with_control_characters() -> None:
    failure = find_cause([report(ValueError("\x1b[2J\x1b[Hgone \udcff"), 0, "box\x07")], {0: 1}, "box")
    assert "failed: ValueError: \\x1b[2J\\x1b[Hgone \\udcff" in failure.render(1) and "box\\x07" in failure.render(1)


def test_the_screen_shows_it_and_the_log_keeps_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"epoch": 1, "step": 2, "loss\x1b[31m": 1.0}
    with rank_log(tmp_path, 0, None, redirect=False) as log:
        Display().row(row, [])
        logging.getLogger("lockstep").warning("z" * 20_000)
    out = capsys.readouterr().out
    assert "loss\\x1b[31m 1" in out and "\x1b" not in out and len(out) < LONGEST + 1000
    assert "loss\x1b[31m 1" in log.read_text() and "z" * 20_000 in log.read_text()


def test_on_a_terminal(tmp_path: Path) -> None:
    """The whole way: a config with escape codes in a key, a value and a file's name, on a real terminal."""
    file = tmp_path / "con\x1b[31mfig.yaml"
    file.write_text('task: a.py:A\n"train\\e[31m": 1\nseed: "\\e]0;x\\a"\n')
    controller, terminal = pty.openpty()
    argv = [sys.executable, "-m", "lockstep", "train", str(file)]
    environment = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen(argv, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    said = b""
    try:
        while data := os.read(controller, 65536):
            said += data
    except OSError:
        pass  # how Linux says that nobody has it open any more
    finally:
        os.close(controller)
    assert process.wait(30) == 2
    assert b"train\\x1b[31m: unknown key" in said and b"con\\x1b[31mfig.yaml" in said
    assert b"\x1b" not in said and b"\x07" not in said


def test_sizes_have_the_unit_that_fits() -> None:
    assert [size(each) for each in (0, 999, 1500, 2.5e9, 7e15)] == ["0 B", "999 B", "1.5 kB", "2.5 GB", "7000.0 TB"]
    found = [binary_size(each) for each in (0, 1000, 1536, 10 * 2**20, 100 * 2**30, 3 * 2**40)]
    assert found == ["0 B", "1000 B", "1.50 KiB", "10.00 MiB", "100.0 GiB", "3.00 TiB"]
