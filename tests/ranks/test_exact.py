"""`train.exact`: the number of ranks changes no bit of weights, losses and metrics."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import exact_bodies
import pytest

import lockstep
from lockstep.errors import ConfigError, WorkerFailed


def launched(main: Any, processes: int, folder: Path, **train: Any) -> Any:
    train = train or {"exact": 8}
    strategy = {"type": "auto", "find_unused_parameters": not train.get("exact")}
    return lockstep.launch(
        main, processes=processes, runtime="cpu", folder=folder, log={"every": "1 step"}, train=train, strategy=strategy
    )


def rows(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in row if name in ("step", "loss") or "norm" in name} for row in found]


@pytest.mark.parametrize("several", [2, 4, 8])
def test_any_loop_has_the_same_bits_on_one_and_several_ranks(tmp_path: Path, several: int) -> None:
    number = random.SystemRandom().randrange(1000)
    print("seed", number, exact_bodies.settings_of(number))
    found = {
        ranks: launched(partial(exact_bodies.train, seed=number), ranks, tmp_path / str(ranks))
        for ranks in (1, several)
    }
    expected, losses = found[1][0], rows(tmp_path / "1")
    assert len(losses) >= 9
    for ranks, of_ranks in found.items():
        assert of_ranks == [expected] * ranks
        assert rows(tmp_path / str(ranks)) == losses


def test_a_run_that_changes_its_ranks_ends_as_if_it_never_had(tmp_path: Path) -> None:
    number = random.SystemRandom().randrange(100)
    print("seed", number, exact_bodies.settings_of(number))
    expected = launched(partial(exact_bodies.train, seed=number), 1, tmp_path / "whole")[0]
    for ranks, until in ((4, 3), (2, 6), (1, 9)):
        found = launched(partial(exact_bodies.train, seed=number, until=until), ranks, tmp_path / "elastic")
    assert found == [expected]
    assert rows(tmp_path / "elastic") == rows(tmp_path / "whole")


@pytest.mark.parametrize("seed", range(3))
def test_the_numbers_are_those_of_the_whole_batch(tmp_path: Path, seed: int) -> None:
    """Where a model draws nothing and sees each example by itself, leaves change nothing but rounding."""
    number = 100 + 10 * seed + random.SystemRandom().randrange(10)
    print("seed", number, exact_bodies.settings_of(number))
    main = partial(exact_bodies.train, seed=number, noise=False)
    exact, plain = launched(main, 1, tmp_path / "exact")[0], launched(main, 1, tmp_path / "plain", exact=False)[0]
    assert exact[1] == pytest.approx(plain[1], rel=1e-3)
    for one, other in zip(rows(tmp_path / "exact"), rows(tmp_path / "plain"), strict=True):
        assert one == pytest.approx(other, rel=1e-3)


def test_without_exact_the_same_loop_depends_on_the_ranks(tmp_path: Path) -> None:
    """The test above can fail: dropout and rounding differ."""
    everywhere = next(seed for seed in range(99) if not exact_bodies.settings_of(seed)["sometimes"])
    found = {
        ranks: launched(partial(exact_bodies.train, seed=everywhere), ranks, tmp_path / str(ranks), deterministic=True)
        for ranks in (1, 2)
    }
    assert found[1][0] != found[2][0]


def test_a_batch_that_is_dropped_leaves_nothing_behind(tmp_path: Path) -> None:
    """One leaf for each rank: ranks have sent each other buckets of it when the loop clears them."""
    launched(partial(exact_bodies.refused, what="dropped"), 2, tmp_path / "run", exact=2)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("own data", "this loop brings its own data: use run.batches"),
        ("all_gather", "a loss over pairs sees the examples of its leaf"),
        ("no step", "gradients of the batch before wait for a step"),
        ("clipped by hand", "gradients were changed between run.backward and run.step"),
        ("after a step", "comes after an optimizer has stepped for the batch"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(tmp_path: Path, what: str, message: str) -> None:
    with pytest.raises((ConfigError, WorkerFailed), match=message):
        launched(partial(exact_bodies.refused, what=what), 1, tmp_path / "run")
