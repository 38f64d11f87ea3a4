"""`lockstep verify FILE.py` as a user runs it."""

from __future__ import annotations

import json

from conftest import Project

PROGRAM = """
import torch
import torch.distributed as dist
from torch import nn

def model():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

def batch(step):
    return torch.randn(4, 4), torch.randint(2, (4,))

def loss(model, batch):
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)

def parallelize(model, mesh):
    group = mesh.get_group("data")

    def average(parameter):
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= DIVISOR

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(average)
"""


def test_a_program_agrees_or_its_fault_is_named(project: Project) -> None:
    file = project.folder / "averaged.py"
    file.write_text(PROGRAM.replace("DIVISOR", "group.size()"))
    finished = project.run("verify", file, "--steps", "2", "--processes", "2")
    assert finished.code == 0, finished.text
    assert "all 2 steps agree (loss, 4 outputs, 4 gradients, 4 weights)" in finished.out
    file.write_text(PROGRAM.replace("DIVISOR", "1"))
    finished = project.run("verify", file, "--mesh", "data=2", "--json")
    assert finished.code == 1, finished.text
    found = json.loads(finished.out)
    (finding,) = found["findings"]
    assert (finding["name"], finding["ranks"], found["agrees"]) == ("0.weight", [0, 1], False)
    assert abs(finding["factor"] - 2) < 1e-9 and finding["also"] == ["0.bias", "2.weight", "2.bias"]


def test_mistakes_are_named_without_a_traceback(project: Project) -> None:
    file = project.folder / "incomplete.py"
    file.write_text(PROGRAM.split("def parallelize")[0])
    finished = project.run("verify", file)
    assert finished.code == 2 and "there is no function parallelize(model, mesh)" in finished.err, finished.text
    assert "Traceback" not in finished.text
    finished = project.run("verify", file, "--only", "cpu-*")
    assert finished.code == 2 and "--only is for a config, and not for" in finished.err
    finished = project.run("verify", project.config(), "--mesh", "data=2")
    assert finished.code == 2 and "--mesh is for a FILE.py, and not for" in finished.err
