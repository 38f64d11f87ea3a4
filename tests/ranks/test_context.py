"""Ranks along the axis `context` compute a part of every sequence, with the numbers of one process."""

from __future__ import annotations

import functools
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import context_bodies
import pytest

import lockstep
from lockstep.errors import ConfigError, WorkerFailed

launch = partial(lockstep.launch, runtime="cpu", timeouts={"collective": "60 s"})


def fsdp(**mesh: int) -> dict[str, Any]:
    return {"type": "fsdp", "mesh": mesh}


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")


@functools.cache
def alone(compile: Any = False, **how: Any) -> dict[str, Any]:
    (found,) = launch(partial(context_bodies.trained, **how), processes=1)
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("processes", "mesh", "how"),
    [
        (2, {"data": 1, "context": 2}, {"kind": "llama", "padded": True}),
        (2, {"data": 1, "context": 2}, {"kind": "causal"}),
        (4, {"data": 2, "context": 2}, {"kind": "gpt", "activation_checkpointing": "blocks"}),
        pytest.param(2, {"data": 1, "context": 2}, {"kind": "gpt", "compile": True}, marks=needs_compiler),
        pytest.param(
            2,
            {"data": 1, "context": 2},
            {"kind": "gpt", "compile": "blocks", "activation_checkpointing": "blocks"},
            marks=[needs_compiler, pytest.mark.long],
        ),
        pytest.param(3, {"context": -1, "data": 1}, {"kind": "gpt", "length": 15}, marks=pytest.mark.long),
        pytest.param(4, {"data": 2, "context": 2}, {"kind": "llama"}, marks=pytest.mark.long),
    ],
)
def test_parts_of_sequences_give_the_numbers_of_one_process(
    processes: int, mesh: dict[str, int], how: dict[str, Any], tmp_path: Path
) -> None:
    if how["kind"] == "llama":
        pytest.importorskip("transformers")
    expected = alone(**how)
    body = partial(context_bodies.trained, **how)
    for found in launch(body, processes=processes, folder=tmp_path / "run", strategy=fsdp(**mesh)):
        for name, weights in expected["weights"].items():
            assert found["weights"][name] == pytest.approx(weights, rel=1e-6, abs=1e-9), name
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-9)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"kind": "own"}, r"layers.0 \(Own\) does not call torch.nn.functional.scaled_dot_product_attention"),
        ({"kind": "convolved"}, r"layers.1 \(Convolved\) computes something else from parts of a sequence"),
        ({"kind": "hidden"}, r"layers.0 \(Hidden\) computes something else from parts of a sequence"),
        ({"kind": "dropped"}, r"layers.1 \(Dropped\) draws random numbers"),
        ({"kind": "keys"}, r"layers.0 \(Masked\) cannot be computed on a part of a sequence"),
        pytest.param(
            {"length": 15},
            "sequences of 15 tokens cannot be divided among 2 ranks: pad them, or cut them to 14",
            marks=pytest.mark.long,
        ),
        pytest.param({"kind": "llama", "dropout": 0.1}, r"attention with dropout \(0.1\)", marks=pytest.mark.long),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(how: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, WorkerFailed), match=message):
        launch(partial(context_bodies.trained, **how), processes=2, folder=tmp_path, strategy=fsdp(data=1, context=2))
