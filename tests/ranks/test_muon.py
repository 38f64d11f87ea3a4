"""Muon under every strategy: each matrix is computed once, and the weights are those of one process in plain torch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import muon_bodies
import pytest
from test_sharded import MESHES

import lockstep

launch = partial(lockstep.launch, runtime="cpu", timeouts={"collective": "60 s"})
WAYS: dict[str, tuple[int, Any]] = {
    "ddp-2": (2, "ddp"),
    "fsdp-2": (2, "fsdp"),
    **{name: MESHES[name] for name in ("fsdp-3", "hsdp-2x2", "tensor-2", "fsdp-tensor-2x2")},
}
SHORT = ("ddp-2", "fsdp-3")


def close(mine: dict[str, list[float]], theirs: dict[str, list[float]]) -> bool:
    return mine.keys() == theirs.keys() and all(mine[name] == pytest.approx(theirs[name], 1e-5, 1e-8) for name in mine)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (found,) = launch(muon_bodies.trained, processes=1, folder=tmp_path_factory.mktemp("alone") / "run")
    return found


def test_one_process_computes_what_plain_torch_does(tmp_path: Path) -> None:
    ((mine, theirs),) = launch(muon_bodies.beside_plain_torch, processes=1, folder=tmp_path / "run")
    assert mine == theirs


@pytest.mark.parametrize(
    "way", [each if each in SHORT else pytest.param(each, marks=pytest.mark.long) for each in WAYS]
)
def test_ranks_compute_what_one_process_does(way: str, alone: dict[str, Any], tmp_path: Path) -> None:
    processes, strategy = WAYS[way]
    for found in launch(muon_bodies.trained, processes=processes, folder=tmp_path / "run", strategy=strategy):
        assert close(found["weights"], alone["weights"])


def test_momentum_goes_to_other_ranks(alone: dict[str, Any], tmp_path: Path) -> None:
    """One epoch on three ranks under fsdp, the other on two under ddp."""
    launch(partial(muon_bodies.trained, epochs=1), processes=3, folder=tmp_path / "run", strategy="fsdp")
    found, _ = launch(muon_bodies.trained, processes=2, folder=tmp_path / "run", strategy="ddp")
    assert found["step"] == alone["step"] and close(found["weights"], alone["weights"])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_each_matrix_is_computed_once(strategy: str, tmp_path: Path) -> None:
    first, second = launch(muon_bodies.measured, processes=2, folder=tmp_path / "run", strategy=strategy)
    assert sorted(first["made"] + second["made"]) == sorted([(12, 48), (48, 12)] * 3)
    assert len(first["made"]) == len(second["made"]) == 3


def test_any_optimizer_may_ask_for_whole_matrices(tmp_path: Path) -> None:
    """One epoch on three ranks, the other on four of another mesh: state that one rank had is saved for all."""
    train = partial(muon_bodies.trained, optimizer_of=muon_bodies.whitened_of)
    (expected,) = launch(train, processes=1, folder=tmp_path / "alone")
    launch(partial(train, epochs=1), processes=3, folder=tmp_path / "run", strategy="fsdp")
    for found in launch(train, processes=4, folder=tmp_path / "run", strategy=MESHES["fsdp-tensor-2x2"][1]):
        assert found["step"] == expected["step"] and close(found["weights"], expected["weights"])
