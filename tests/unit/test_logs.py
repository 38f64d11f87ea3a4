"""Where a rank's words go."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.record.logs import file_only, rank_log

OURS = logging.getLogger("lockstep")
logger = logging.getLogger("lockstep.somewhere")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    state = (OURS.propagate, OURS.level)
    yield
    OURS.propagate, OURS.level = state


def lines(folder: Path, rank: int) -> list[str]:
    return (folder / f"rank-{rank}.log").read_text().splitlines()


@pytest.mark.requirement("D08")
@pytest.mark.parametrize("rank", [0, 3])
def test_every_line_of_a_rank_carries_its_rank(tmp_path: Path, rank: int) -> None:
    with rank_log(tmp_path / "logs", rank, None, redirect=False):
        logger.info("first")
        logger.warning("second")
    first, second = lines(tmp_path / "logs", rank)
    assert first.endswith(f" [RANK {rank}] INFO first")
    assert second.endswith(f" [RANK {rank}] WARNING second")


@pytest.mark.requirement("D08")
def test_rank_0_speaks_on_the_screen_and_others_do_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        with rank_log(tmp_path, rank, None, redirect=False):
            logger.info("from %d", rank)
            logger.warning("careful")
    out = capsys.readouterr().out
    assert re.fullmatch(r"\d\d:\d\d:\d\d from 0\n\d\d:\d\d:\d\d WARNING: careful\n", out)


def test_above_a_live_display_lines_are_printed_as_they_are(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=20)
    with rank_log(tmp_path, 0, console, redirect=False):
        logger.info("[bold] is no style here, and a long line is not broken")
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "[bold] is no style here, and a long line is not broken\n"


def test_words_of_other_libraries_go_to_the_file_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with rank_log(tmp_path, 0, None, redirect=False):
        logging.getLogger("elsewhere").warning("theirs")
    assert lines(tmp_path, 0)[0].endswith("[RANK 0] WARNING theirs")
    assert capsys.readouterr().out == ""


def test_what_is_for_the_file_alone_reaches_no_handler_of_others(tmp_path: Path) -> None:
    """torch_xla gives the root logger a handler that prints."""
    root, theirs = logging.getLogger(), logging.StreamHandler(stream := io.StringIO())
    root.addHandler(theirs)
    try:
        with rank_log(tmp_path, 0, None, redirect=False):
            file_only.error("rank 0 failed")
    finally:
        root.removeHandler(theirs)
    assert lines(tmp_path, 0)[0].endswith("[RANK 0] ERROR rank 0 failed")
    assert stream.getvalue() == ""


def test_a_resumed_run_goes_on_in_the_same_file(tmp_path: Path) -> None:
    for text in ("before", "after"):
        with rank_log(tmp_path, 0, None, redirect=False):
            logger.info(text)
    assert len(lines(tmp_path, 0)) == 2


def test_afterwards_logging_is_as_it_was(tmp_path: Path) -> None:
    """`lockstep.launch` runs one process here, in a notebook perhaps: what it changed must not stay."""
    root = logging.getLogger()
    before = (OURS.propagate, OURS.level, list(OURS.handlers), list(root.handlers))
    with pytest.raises(ValueError, match="inside"), rank_log(tmp_path, 0, None, redirect=False):
        raise ValueError("inside")
    assert (OURS.propagate, OURS.level, list(OURS.handlers), list(root.handlers)) == before
