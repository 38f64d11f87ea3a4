"""examples/finetune_text.yaml: a model of transformers goes on learning, by YAML alone; others open what came of it."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from conftest import ROOT, Project, summary

EXAMPLE = ROOT / "examples" / "finetune_text.yaml"
SMALL = ["--set", "train={steps: 4, batch_size: 4}", "--set", "validate={every: 2 steps}", "--set", "runtime=cpu"]


@pytest.mark.parametrize("forms", [["hf"], pytest.param(["onnx", "torch-export"], marks=pytest.mark.long)], ids=len)
def test_the_example_is_trained_by_two_processes_and_opened_by_others(project: Project, forms: list[str]) -> None:
    from transformers import AutoModelForCausalLM

    assert project.start_python(EXAMPLE.with_suffix(".py"), "pretrained").wait().code == 0
    finished = project.run("train", EXAMPLE, *SMALL)
    assert finished.code == 0, finished.text
    run = project.only_run()
    assert summary(run)["world_size"] == 2
    assert len([each.parent.name for each in (run / "samples").rglob("*.txt")]) == 2
    for form in forms:
        exported = project.run("export", run, "--to", form, "--out", f"tuned.{form}")
        assert exported.code == 0, exported.text
    if "hf" not in forms:
        return
    weights = load_file(max((run / "checkpoints").glob("step-*")) / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(project.folder / "tuned.hf")
    assert all(torch.equal(each, weights[name]) for name, each in model.named_parameters())
    (project.folder / "prompts.txt").write_text("7:\n42:\n")
    told = project.run("predict", run, "--input", "prompts.txt", "--out", "said.jsonl")
    assert told.code == 0, told.text
    rows = [json.loads(line) for line in (project.folder / "said.jsonl").read_text().splitlines()]
    assert [each["prompt"] for each in rows] == ["7:", "42:"] and all("answer" in each for each in rows)
