"""`lockstep plan --on v4-32` with the real parts: torch_xla traces the step, libtpu compiles it. No TPU is needed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from xla_ways import needs_torch_xla

from conftest import Project
from lockstep.planner.devices import slice_of, target
from lockstep.planner.plan import NotPlanned, traced
from lockstep.planner.tpu import engine
from lockstep.planner.tpu.compile import COMPILED
from lockstep.planner.tpu.trace import PROGRAM

pytestmark = [
    needs_torch_xla,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu (lockstep-train[tpu-plan])"),
]

EXAMPLES = Path(__file__).parents[2] / "examples"
GPT = {"type": f"{EXAMPLES}/gpt.py:TextModel", "layers": 2, "heads": 2, "width": 256, "context": 64, "vocab": 512,
       "max_bytes": 20000}  # fmt: skip
FSDP = {"type": "fsdp", "mesh": {"data": -1}}
LIMIT = 240.0


def config(project: Project, **values: Any) -> Path:
    base: dict[str, Any] = {"task": GPT, "train": {"steps": 2, "batch_size": 32}, "data": {"drop_last": True}}
    return Path(project.config(**{**base, "optimizer": {"type": "torch.optim.AdamW", "lr": 0.001}, **values}))


def test_a_step_is_compiled_for_a_slice_that_nobody_has(project: Project) -> None:
    found = traced(config(project, strategy=FSDP), [], target("v4-32"))
    assert found.world_size == 16
    # AdamW has two numbers for each of a parameter's, and a count of steps for each parameter, on the host.
    numbers = 4 * found.parameters
    assert 2 * numbers <= found.optimizer_bytes < 2.01 * numbers
    # Each chip has a sixteenth, but for what is small and whole, in tiles of 8 x 128.
    assert numbers / 16 <= found.by_kind["weights"] < numbers / 16 + 2**20
    assert found.by_kind["optimizer"] == pytest.approx(2 * found.by_kind["weights"], rel=0.05)
    tokens = 32 * 64
    least = 6 * tokens * (12 * 2 * 256**2 + 512 * 256) / 16
    assert least <= found.flops < 2 * least  # the compiler counts every addition, not the products alone
    assert {each.axis for each in found.collectives} == {"data"}
    assert found.peak == pytest.approx(sum(found.by_kind.values()), rel=0.01) and found.by_kind["temporaries"] > 0


def test_a_replica_on_every_chip(project: Project, tmp_path: Path) -> None:
    """In two parts of a batch, with an average."""
    train = {"steps": 2, "batch_size": 32, "accumulate": 2, "ema": {"decay": 0.99}}
    made = engine._traced(config(project, train=train), [], slice_of("v4-32"), tmp_path)
    assert made.replicas == 16 and made.programs == 2
    assert {"weights", "optimizer", "averages", "gradients", "batch"} <= {each.kind for each in made.arguments}
    # Whatever a step writes to takes the place of what it was.
    written = [each for each in made.arguments if each.kind in ("weights", "optimizer", "averages")]
    assert all(each.result is not None for each in written)
    found = engine._compiled(made, slice_of("v4-32"), tmp_path)
    (reduced,) = [each for each in found.collectives if each.name == "all-reduce"]
    assert reduced.bytes >= 2 * 4 * found.parameters  # of both micro-batches, in float32
    (tmp_path / PROGRAM).write_bytes(b"\x08\x01 this is no program")
    (tmp_path / COMPILED).unlink()
    with pytest.raises(NotPlanned, match="v4-32") as raised:
        engine._compiled(made, slice_of("v4-32"), tmp_path)
    assert Path(str(raised.value).rpartition("All that was said: ")[2].strip()).read_text()


READS = """
from gpt import TextModel

class Reads(TextModel):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return loss if loss.item() > 0 else loss * 2
"""


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"strategy": {"type": "spmd", "mesh": {"data": 8, "model": 2}}}, "every host loads its own part of the batch"),
        ({"strategy": {"type": "spmd", "mesh": {"data": 6}}}, "is a mesh of 6 devices, but there are 16"),
        ({"task": {**GPT, "type": "reads.py:Reads"}}, r"reads\.py:8 \(return loss if loss\.item\(\) > 0"),
    ],
    ids=["mesh over hosts", "mesh of another size", "reads a value"],
)
def test_what_cannot_be_planned_is_told_in_a_sentence(project: Project, values: dict[str, Any], message: str) -> None:
    (project.folder / "reads.py").write_text(f"import sys\nsys.path.insert(0, {str(EXAMPLES)!r})" + READS)
    finished = project.run("plan", config(project, **values), "--on", "v4-32", limit=LIMIT)
    assert finished.code == 2
    assert re.search(message, finished.err), finished.err
    assert "Traceback" not in finished.err
