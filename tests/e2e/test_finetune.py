"""examples/finetune_text.py: a model of transformers goes on learning; transformers and peft open what came of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import lockstep
from conftest import ROOT, Project, summary
from lockstep.cli import main

EXAMPLE = ROOT / "examples" / "finetune_text.py"
SMALL = ["--set", "train={steps: 6, batch_size: 16}", "--set", "task.sample_every=3", "--set", "runtime=cpu"]
INPUT = torch.tensor([[52, 50, 58]])


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path, folder = list(sys.path), tmp_path_factory.mktemp("models") / "pretrained"
    sys.path.insert(0, str(EXAMPLE.parent))
    import finetune_text

    finetune_text.make(str(folder))
    yield folder
    sys.path[:] = path


def export(run: Path, form: str, out: Path) -> None:
    result = CliRunner().invoke(main, ["export", str(run), "--to", form, "--out", str(out), "--json"])
    assert result.exit_code == 0, result.output


def test_an_adapter_is_trained_and_opened_by_peft(tmp_path: Path, pretrained: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    found = lockstep.train(
        EXAMPLE.with_suffix(".yaml"), processes=1, runtime="cpu", out=tmp_path / "runs", init_from=str(pretrained),
        task={"folder": str(pretrained), "lora": 4, "sample_every": 3}, train={"steps": 6, "batch_size": 16},
    )  # fmt: skip
    (saved,) = (found["folder"] / "checkpoints").glob("step-*/model.safetensors")
    assert all("lora_" in name for name in load_file(saved))
    log = (found["folder"] / "logs" / "rank-0.log").read_text()
    assert "21 of the model's 49 weights loaded; 28 stay as they are" in log
    assert [each.parent.name for each in (found["folder"] / "samples").rglob("*.txt")]
    export(found["folder"], "hf", tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(pretrained)
    before = base(INPUT).logits
    after = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(INPUT).logits
    assert not torch.allclose(before, after, atol=1e-5)


@pytest.mark.long
def test_all_weights_are_trained_by_two_processes_and_opened_by_transformers(
    project: Project, pretrained: Path
) -> None:
    from transformers import AutoModelForCausalLM

    begins = ["--set", f"task.folder={pretrained}", "--set", f"init_from={pretrained}"]
    finished = project.run("train", EXAMPLE.with_suffix(".yaml"), *begins, *SMALL)
    assert finished.code == 0, finished.text
    run = project.only_run()
    assert summary(run)["world_size"] == 2
    for form, out in (("hf", "tuned"), ("onnx", "tuned.onnx"), ("torch-export", "tuned.pt2")):
        export(run, form, project.folder / out)
    weights = load_file(max((run / "checkpoints").glob("step-*")) / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(project.folder / "tuned")
    assert all(torch.equal(each, weights[name]) for name, each in model.named_parameters())
    (project.folder / "prompts.txt").write_text("7:\n42:\n")
    told = project.run("predict", run, "--input", "prompts.txt", "--out", "said.jsonl")
    assert told.code == 0, told.text
    rows = [json.loads(line) for line in (project.folder / "said.jsonl").read_text().splitlines()]
    assert [each["prompt"] for each in rows] == ["7:", "42:"]
