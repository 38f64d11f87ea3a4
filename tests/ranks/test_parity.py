"""Faults of parallel code, as they were in well-known projects, are named; the same code without them agrees."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import parity_programs
import pytest
import torch.distributed as dist

from lockstep.errors import ConfigError, WorkerFailed
from lockstep.testing import assert_parity
from lockstep.verify.parity import ParityCase, check
from lockstep.verify.parity_findings import ParityReport

# The phase, the kind and the words of the first finding, and what it tells to look at.
FAULTS = {
    "MissingDivision": ("gradients", "factor", r"0\.weight: gradient is 2\.00 times the reference on all ranks: a sum "
                        r"over data where a mean was meant", "def parallelize"),
    "TiedOnce": ("gradients", "not reduced", r"tokens\.weight: gradient differs between ranks that must be equal: it "
                 "is not averaged over data", "def parallelize"),
    "BrokenTie": ("weights", "new", r"head\.weight: .* breaks its tie to tokens\.weight", r"model\.head\.weight = "),
    "LocalNorm": ("outputs", "output", r"1\.norm: the first module whose output differs", r"Norm\.forward \(parity_pr"),
    "LocalClip": ("gradients", "local norm", r"gradient is \d\.\d+ times the reference on rank 0, \d\.\d+ times .* on "
                  "rank 1: scaled by a norm over local shards", "def after_backward"),
    "LocalRouter": ("gradients", "not reduced", r"router\.weight: gradient .* it is not summed over model", "router_"),
    "LocalSequenceNorm": ("gradients", "not reduced", r"norm\.weight: gradient differs between ranks that must be "
                          r"equal: it is not summed over model", r"average\(model\.norm"),
    "WrongAxis": ("gradients", "not reduced", r"0\.weight: gradient .* it is not averaged over data", "parallelize"),
    "LocalTokens": ("loss", "local count", r"loss: 5\.1\d+ on rank 0, 8\.0\d+ on rank 1, .* by a local count of",
                    "def loss"),
    "StaleBuffer": ("buffers", "stale", r"0\.mean: buffer is stale on rank 1 alone", "parallelize"),
    "Unreached": ("gradients", "zero", r"0\.bias: gradient is zero on all ranks: not reached", r"model\[0\]\.bias"),
    "OneRank": ("gradients", "factor", r"2\.bias: gradient is 1\.50 times the reference on rank 1 alone", "bias"),
}  # fmt: skip
RIGHT = (*FAULTS, "FullyShardedTensorParallel", "OwnRows")


def case(name: str, faulty: bool) -> ParityCase:
    program = getattr(parity_programs, name)
    return ParityCase(program(faulty).functions(), program.mesh, steps=2)


@pytest.fixture(scope="module")
def reports() -> dict[tuple[str, bool], ParityReport]:
    """Ranks are started once for all programs."""
    keys = [(name, True) for name in FAULTS] + [(name, False) for name in RIGHT]
    return dict(zip(keys, check([case(*key) for key in keys], limit=100), strict=True))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str, reports: dict[tuple[str, bool], ParityReport]) -> None:
    phase, kind, text, look_at = FAULTS[name]
    report = reports[name, True]
    assert not report.agrees and report.steps == (kind != "new"), report
    first = report.findings[0]
    assert (first.phase, first.kind) == (phase, kind), report
    assert re.search(text, first.text) and re.search(look_at, first.look_at), report
    assert first.text in str(report)


@pytest.mark.parametrize("name", RIGHT)
def test_the_same_code_without_it_agrees(name: str, reports: dict[tuple[str, bool], ParityReport]) -> None:
    report = reports[name, False]
    assert report.agrees and 0 < report.largest < 1e-12 and report.steps == 2, report
    assert report.compared["gradients"] == report.compared["weights"] > 0
    assert ("outputs" in report.compared) is (name != "OwnRows")


def test_other_parameters_with_the_same_fault_are_with_it(reports: dict[tuple[str, bool], ParityReport]) -> None:
    assert reports["MissingDivision", True].findings[0].also == ("0.bias", "2.weight", "2.bias")
    _, mixed = reports["WrongAxis", True].findings
    assert (mixed.name, mixed.kind) == ("1.up.weight", "wrong axis")
    assert "averaged over model, where ranks have different parts of it, and not averaged over data" in mixed.text
    (_, follows) = reports["LocalTokens", True].findings
    assert follows.kind == "follows", "gradients that are wrong because the loss is do not have findings of their own"


class Fails(parity_programs.Program):
    def parallelize(self, model: Any, mesh: Any) -> Any:
        if dist.get_rank() == 1:
            raise ValueError("no such layer")


class Waits(parity_programs.Program):
    """Rank 0 waits for rank 1, which has no hook."""

    def parallelize(self, model: Any, mesh: Any) -> Any:
        if dist.get_rank() == 0:
            parity_programs.average(model, mesh.get_group("data"))


class NoModule(parity_programs.Program):
    def parallelize(self, model: Any, mesh: Any) -> Any:
        return "fsdp"


class OddBatch(parity_programs.Program):
    def batch(self, step: int) -> Any:
        return [each[:7] for each in super().batch(step)]


@pytest.mark.parametrize(
    ("program", "error", "message"),
    [
        (Fails, WorkerFailed, r"rank 1 of 2 on \S+ failed: ValueError: no such layer"),
        (NoModule, ConfigError, r"parallelize\(\) must return a torch.nn.Module, and returned a str"),
        pytest.param(OddBatch, ConfigError, r"a tensor of 7 rows, which 2 data-parallel ranks", marks=pytest.mark.long),
        pytest.param(Waits, WorkerFailed, r"rank 0 waited 5 s .* at parity_programs.py:\d+", marks=pytest.mark.long),
    ],
)
def test_what_goes_wrong_on_the_way_is_named(program: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        assert_parity(**program().functions(), limit=10)


PROGRAM = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

def model():
    return nn.Linear(4, 2)

def batch(step):
    return torch.randn(4, 4)

def loss(model, batch):
    return model(batch).square().mean()

def parallelize(model, mesh):
    return fully_shard(model, mesh=mesh)

def after_backward(model, mesh):
    if mesh is not None and FACTOR != 1:
        for each in model.parameters():
            each.grad *= FACTOR
"""


def test_a_file_is_asserted(tmp_path: Path) -> None:
    file = tmp_path / "sharded_linear.py"
    file.write_text(PROGRAM.replace("FACTOR", "0.5"))
    with pytest.raises(AssertionError, match=r"weight: gradient is 0\.50 times .* a mean over data where a sum"):
        assert_parity(file, steps=1)
