"""Every fault at every moment: said in time, by name, once; no process left, little lost, and the resumed run exact.

`make test` runs a selection with every kind and every moment; `make faults` runs all cells and writes the table of
docs/reliability.md.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from cells import CELLS, NOT_A_CELL, SELECTION, WAYS, WORLD_SIZES, Cell, expected
from experiment import Outcome, experiment, undisturbed
from sabotage import ACTS, DDP, EXCEPTION, IDENTITIES, MOMENTS, SHARDED_ACTS, SHARDED_MOMENTS, WRITING_MOMENTS
from table import Row, write

# Most of a cell is waiting, for a limit to pass or for a process to start.
_AT_ONCE = max(len(os.sched_getaffinity(0)), 2)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" in metafunc.fixturenames:
        whole = metafunc.config.getoption("--whole-matrix")
        chosen = [cell for cell in CELLS if whole or cell in SELECTION]
        metafunc.parametrize("cell", chosen, ids=[cell.id for cell in chosen])


class _WhenAsked(dict[Cell, Future]):  # type: ignore[type-arg]
    """Runs a cell when somebody asks for it."""

    def __init__(self, pool: ThreadPoolExecutor, run: Callable[[Cell], Outcome]) -> None:
        self._pool, self._run = pool, run

    def __missing__(self, cell: Cell) -> Future[Outcome]:
        return self._pool.submit(self._run, cell)


class _References:
    """Runs that nothing disturbs, each made by the first who asks for it; others wait for that."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._asking = folder, threading.Lock()
        self._found: dict[tuple[str, int], Future[Path]] = {}

    def get(self, way: str, world_size: int) -> Path:
        with self._asking:
            first = (way, world_size) not in self._found
            found = self._found.setdefault((way, world_size), Future())
        if first:
            try:
                found.set_result(undisturbed(self._folder / f"reference-{way}-{world_size}", way, world_size))
            except BaseException as error:
                found.set_exception(error)
        return found.result()


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Cell, Future]]:  # type: ignore[type-arg]
    """All chosen cells under way, a few at a time, in the order of the tests."""
    chosen = [item.callspec.params["cell"] for item in request.session.items if "outcomes" in item.fixturenames]
    folder = tmp_path_factory.mktemp("matrix")
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="cell") as pool:
        references = _References(folder)
        for world_size in WORLD_SIZES:
            pool.submit(references.get, DDP, world_size)

        def run(cell: Cell) -> Outcome:
            return experiment(cell, folder / cell.id, references.get(cell.way, cell.world_size))

        try:
            # Beside other workers of the tests, each runs the cells that it is given, and not all of them.
            shared = "PYTEST_XDIST_WORKER" in os.environ
            yield _WhenAsked(pool, run) if shared else {cell: pool.submit(run, cell) for cell in chosen}
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


@pytest.fixture(scope="session")
def seen(request: pytest.FixtureRequest) -> Iterator[dict[Cell, Row | None]]:
    """What goes into the table: a row for every cell that did what it must."""
    rows: dict[Cell, Row | None] = {}
    yield rows
    if request.config.getoption("--whole-matrix"):
        write(rows)


def test_a_cell(cell: Cell, outcomes: dict[Cell, Future], seen: dict[Cell, Row | None]) -> None:  # type: ignore[type-arg]
    seen[cell] = None
    outcome: Outcome = outcomes[cell].result()
    wanted = expected(cell)
    for ended in outcome.ended:
        said = ended.err if wanted.code != 75 else ended.err + ended.out
        assert ended.code in (wanted.code, wanted.or_code), ended.text
        assert len(re.findall(wanted.says, said)) == 1, ended.text
        assert ended.text.count("Traceback") == (1 if cell.kind == EXCEPTION else 0), ended.text
        if cell.kind == EXCEPTION:
            assert 'sabotage.py", line' in ended.err, "the user's own line"
        strangers = [line for line in ended.err.splitlines() if line and not line.startswith("lockstep: ")]
        assert not strangers, f"not in our words: {strangers}"
    assert outcome.seconds < wanted.within
    if cell.kind not in IDENTITIES:
        assert outcome.lost is not None and outcome.lost <= wanted.loses
        assert outcome.resumed is not None and outcome.resumed.code == 0, outcome.resumed
        assert not outcome.differences
        assert not (cell.leaves_no_checkpoint and cell.step in outcome.saved), "nothing that looks like a checkpoint"
    seen[cell] = Row.of(cell, wanted, outcome)


def test_every_pair_is_a_cell_or_has_a_reason() -> None:
    pairs = {(kind, moment) for kind in (*ACTS, *IDENTITIES) for moment in MOMENTS}
    cells = {(cell.kind, cell.moment) for cell in CELLS if cell.way == DDP}
    assert not cells & NOT_A_CELL.keys()
    sharded = {(kind, moment) for kind in SHARDED_ACTS for moment in SHARDED_MOMENTS}
    assert {(cell.kind, cell.moment) for cell in CELLS if cell.way != DDP} == sharded - NOT_A_CELL.keys()
    assert cells | NOT_A_CELL.keys() == pairs


def test_the_selection_has_every_kind_and_every_moment() -> None:
    assert set(CELLS) >= SELECTION
    assert {cell.kind for cell in SELECTION} == {*ACTS, *IDENTITIES}
    assert {cell.moment for cell in SELECTION} == {*MOMENTS, *WRITING_MOMENTS}
    assert {cell.world_size for cell in SELECTION} == {*WORLD_SIZES}
    assert {cell.way for cell in SELECTION} == {*WAYS}
