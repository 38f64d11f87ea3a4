"""Several models under the command line: the same losses on one and two processes, and bit for bit after a stop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conftest import ROOT, Project, rows, summary

GAN = ROOT / "examples" / "gan.yaml"
QUICK = ("--set", "train={epochs: 2, batch_size: 128}", "--set", "log.every=1 step", "--set", "task.hidden=32")
NAMES = ("train/generator", "train/discriminator", "val/made_taken_for_real", "lr/generator")


def train(project: Project, out: str, *more: str, code: int = 0) -> Path:
    finished = project.run("train", GAN, *QUICK, "--out", out, *more)
    assert finished.code == code, finished.text
    return project.only_run(out)


def logged(run: Path) -> dict[str, list[tuple[int, float]]]:
    return {name: [(row["step"], row[name]) for row in rows(run) if name in row] for name in NAMES}


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(max((run / "checkpoints").glob("step-*")) / "model.safetensors")


@pytest.mark.long
def test_a_gan_has_the_same_losses_on_one_and_two_processes_and_goes_on_bit_for_bit(project: Project) -> None:
    calm, alone = train(project, "two", "--set", "processes=2"), train(project, "one", "--set", "processes=1")
    for name, values in logged(calm).items():
        ours = logged(alone)[name]
        assert [step for step, _ in ours] == [step for step, _ in values]
        assert [value for _, value in ours] == pytest.approx([value for _, value in values], rel=1e-5), name
    assert summary(calm)["step"] == 26, "one step for every batch, whatever the number of optimizers"
    assert {name.split(".")[0] for name in weights(calm)} == {"generator", "discriminator"}

    run = train(project, "stopped", "--set", "processes=2", "--set", "train={steps: 9, batch_size: 128}")
    finished = project.run("resume", run, "--set", "train.steps=null", "--set", "train.epochs=2")
    assert finished.code == 0, finished.text
    trained = [[row for row in rows(each) if "examples_per_second" in row] for each in (run, calm)]
    mine, theirs = ([(row["step"], *(row.get(name) for name in NAMES)) for row in each] for each in trained)
    assert len(mine) == 26 and mine == theirs
    after, others = weights(run), weights(calm)
    assert after.keys() == others.keys() and all(torch.equal(after[name], others[name]) for name in after)
