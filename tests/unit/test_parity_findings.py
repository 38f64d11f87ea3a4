"""The parity check without processes: what it is asked, how a batch is cut, and what it says about differences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.testing import assert_parity
from lockstep.verify.parity import ParityCase, parse_mesh
from lockstep.verify.parity_findings import Difference, RankFound, concluded, losses_agree
from lockstep.verify.parity_rank import _Grid, _parts, rows_of

SOURCE = ("code.py", 10, ["def parallelize(model, mesh):\n", "    # wq\n", '    split(model, "wq")\n'])


def found(rank: int, *differences: Difference, **values: Any) -> RankFound:
    made = RankFound(rank, rank, {"wq": "Linear.forward (linear.py:1)"}, [SOURCE, SOURCE], {}, step=1, tolerance=1e-9)
    made.differences = list(differences)
    vars(made).update(values)
    return made


def said(*ranks: RankFound, **mesh: int) -> list[str]:
    return [each.text for each in concluded("code.py", mesh or {"data": 2}, "float64", ranks, 1.0).findings]


@pytest.mark.parametrize(
    ("text", "processes", "mesh"),
    [
        (None, None, {"data": 2}),
        (None, 3, {"data": 3}),
        ("data=2, model=4", None, {"data": 2, "model": 4}),
        ("model=2", 2, {"model": 2}),
    ],
)
def test_meshes(text: str | None, processes: int | None, mesh: dict[str, int]) -> None:
    assert parse_mesh(text, processes) == mesh


@pytest.mark.parametrize("text", ["data", "data=x", "data=2,data=2", "=2", ""])
def test_a_mesh_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write for example data=2,model=2"):
        parse_mesh(text, None)


def test_what_is_asked_is_checked_before_a_process_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--mesh data=4 has 4 processes, but --processes is 2"):
        parse_mesh("data=4", 2)
    with pytest.raises(ConfigError, match="one process has nothing to compare with"):
        assert_parity(tmp_path, mesh="data=1")
    with pytest.raises(ConfigError, match=r"missing\.py: there is no such file"):
        assert_parity(tmp_path / "missing.py")
    with pytest.raises(ConfigError, match="name a file, or give the functions"):
        assert_parity()
    with pytest.raises(ConfigError, match="'train' is none of model, batch, loss, parallelize, optimizer"):
        assert_parity(model=torch.nn.Identity, train=print)
    with pytest.raises(ConfigError, match=r"there is no function batch\(step\)"):
        assert_parity(model=torch.nn.Identity, loss=print, parallelize=print)
    with pytest.raises(ConfigError, match="dtype: must be one of float64, float32, bfloat16, got 'int8'"):
        ParityCase(tmp_path, {"data": 2}, dtype="int8")


def test_a_file_without_a_function_says_which(tmp_path: Path) -> None:
    file = tmp_path / "lacking_loss.py"
    file.write_text(
        "def model(): ...\ndef batch(step): ...\ndef losses(model, batch): ...\ndef parallelize(a, b): ...\n"
    )
    with pytest.raises(ConfigError, match=r"lacking_loss.py: there is no function loss\(model, batch\)\. A parity"):
        ParityCase(file, {"data": 2}).functions()
    case = ParityCase(dict.fromkeys(["model", "batch", "loss", "parallelize"], print), {"shard": 2})
    with pytest.raises(ConfigError, match="mesh: shard: do ranks along this axis have different rows"):
        case.functions()


def test_rows_are_cut_along_data_axes() -> None:
    mesh = {"replica": 2, "data": 2, "model": 2}
    assert [_Grid(mesh, rank).dp_rank for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [_Grid({"tp": 2, "dp_shard": 2}, rank).dp_rank for rank in range(4)] == [0, 1, 0, 1]
    batch = {"x": torch.arange(8), "n": 3, "scalar": torch.tensor(1.0)}
    part = rows_of(batch, 4, 1)
    assert part["x"].tolist() == [2, 3] and part["n"] == 3 and part["scalar"] == 1
    with pytest.raises(ConfigError, match="a tensor of 8 rows, which 3 data-parallel ranks"):
        rows_of(batch, 3, 0)


def test_a_part_is_recognised_by_its_shape() -> None:
    whole = torch.arange(32).view(8, 4)
    factors = _Grid({"data": 2, "model": 2}, 3).factors
    assert next(_parts(whole, (4, 2), factors, rows=True)).tolist() == whole[4:, 2:].tolist()
    assert next(_parts(whole, (8, 2), factors, rows=True)).tolist() == whole[:, 2:].tolist()
    assert [each.tolist() for each in _parts(whole, (8, 4), factors, rows=False)] == [whole.tolist()]
    assert not list(_parts(whole, (3, 4), factors, rows=False))


@pytest.mark.parametrize(
    ("losses", "agree"),
    [
        ([(0, 1.0), (1, 3.0)], True),  # their mean
        ([(0, 0.5), (1, 1.5)], True),  # their sum, where the loss divides by all tokens
        ([(0, 2.0), (1, 2.0)], True),
        ([(0, 2.0), (1, 2.1)], False),
        ([(0, 2.0), (0, 2.1)], False),  # the same rows
        ([(0, 2.0), (1, None)], False),
    ],
)
def test_losses(losses: list[tuple[int, float | None]], agree: bool) -> None:
    assert losses_agree(losses, 2.0, 1e-9) is agree


def test_factors_are_explained_by_the_sizes_of_axes() -> None:
    def of(factor: float) -> str:
        return said(*(found(rank, Difference("gradients", "wq.weight", apart=1.0, factor=factor)) for rank in range(8)),
                    data=2, model=4)[0]  # fmt: skip

    assert of(2.0).endswith("is 2.00 times the reference on all ranks: a sum over data where a mean was meant? Divide "
                            "by its size")  # fmt: skip
    assert "a sum over model" in of(4.0) and "a sum over all ranks" in of(8.0)
    assert of(0.25).endswith("a mean over model where a sum was meant?")
    assert of(1.3).endswith("is 1.30 times the reference on all ranks")


def test_what_ranks_have_in_common() -> None:
    one = Difference("gradients", "wq.weight", apart=0.5)
    assert said(found(0), found(1, one)) == ["wq.weight: gradient differs by 5.0e-01 on rank 1 alone"]
    assert said(found(0, one), found(1, one)) == ["wq.weight: gradient differs by 5.0e-01 on all ranks"]
    apart = Difference("gradients", "wq.weight", apart=0.5, unequal=("data",))
    assert said(found(0, apart), found(1, apart)) == [
        "wq.weight: gradient differs between ranks that must be equal, along data"
    ]
    missing = Difference("gradients", "wq.weight", "missing")
    assert said(found(0, missing), found(1, missing)) == ["wq.weight: has no gradient on all ranks: not reached"]


def test_outputs_show_where_a_fault_begins_and_are_none_by_themselves() -> None:
    inside = Difference("outputs", "wq|1|0", apart=0.5)
    assert said(found(0, inside), found(1, inside)) == [], "the output of the model agrees"
    last = Difference("outputs", "|1|0", apart=0.1)
    report = concluded("code.py", {"data": 2}, "float64", [found(0, inside, last), found(1, inside, last)], 1.0)
    (finding,) = report.findings
    assert finding.text == "wq: the first module whose output differs; it differs by 5.0e-01 on all ranks"
    assert finding.look_at == 'Linear.forward (linear.py:1); code.py:12: split(model, "wq")'
    part = Difference("outputs", "wq|1|0", apart=0.5, reductions=[("sum", ("model",), ())])
    (text,) = said(found(0, part, last), found(1, part, last))
    assert text.startswith("the model: the first module"), "a row-parallel layer leaves a part of a sum"


def test_a_report_is_json_and_text() -> None:
    gone = Difference("weights", "wq.weight", "gone")
    report = concluded("code.py", {"data": 2}, "float64", [found(rank, gone, draws=True) for rank in range(2)], 1.0)
    shown = json.loads(report.as_json())
    assert shown["agrees"] is False and shown["findings"][0]["name"] == "wq.weight"
    assert shown["text"] == str(report).splitlines()
    assert "wq.weight: weight is not there after parallelize" in str(report) and "dropout" in report.note
