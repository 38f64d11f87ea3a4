"""Every example runs, as its README says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from conftest import ROOT, Project, summary

EXAMPLES = ROOT / "examples"


def run_script(script: str, folder: Path) -> str:
    finished = subprocess.run(
        [sys.executable, str(EXAMPLES / script)], cwd=folder, capture_output=True, text=True, timeout=180
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.requirement("D12")
def test_digits_is_learned_by_two_processes(project: Project) -> None:
    finished = project.run("train", EXAMPLES / "digits.yaml")
    assert finished.code == 0, finished.text
    end = summary(project.only_run())
    assert end["world_size"] == 2
    assert end["metrics"]["val/accuracy"] > 0.95


def test_mnist_on_made_up_data(project: Project) -> None:
    finished = project.run("train", EXAMPLES / "mnist.yaml", "--set", "train.epochs=1", "--set", "task.examples=1024")
    assert finished.code == 0, finished.text


def test_mnist_says_which_files_it_looked_for(project: Project) -> None:
    finished = project.run("train", EXAMPLES / "mnist.yaml", "--set", "task={type: mnist.py:Mnist, folder: nowhere}")
    assert finished.code != 0
    assert "train-images-idx3-ubyte" in finished.err


@pytest.mark.parametrize("config", ["gpt.yaml", "gpt-gpu.yaml"])
def test_a_small_gpt(project: Project, config: str) -> None:
    small = ["layers=1", "heads=2", "width=32", "context=32", "max_bytes=60000"]
    sizes = [argument for each in small for argument in ("--set", f"task.{each}")]
    limits = "train={steps: 4, batch_size: 8}"
    finished = project.run("train", EXAMPLES / config, *sizes, "--set", limits, "--set", "runtime=cpu")
    assert finished.code == 0, finished.text
    assert summary(project.only_run())["step"] == 4


def test_own_loops(tmp_path: Path) -> None:
    plain, ours = run_script("own_loop_plain.py", tmp_path), run_script("own_loop.py", tmp_path)
    for text in (plain, ours):
        last = text.strip().splitlines()[-1]
        assert "validation accuracy" in text and float(text.split("validation accuracy")[-1].split()[0]) > 0.9, last


def test_an_ordinary_ddp_script_ends_alike_under_torchrun_and_under_lockstep_run(project: Project) -> None:
    script = str(EXAMPLES / "torchrun_ddp.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script]
    theirs = subprocess.run(torchrun, cwd=project.folder, capture_output=True, text=True, timeout=180)
    assert theirs.returncode == 0, theirs.stderr
    ours = project.run("run", "--processes", "2", script)
    assert ours.code == 0, ours.text
    assert ours.out.strip().splitlines()[-1] == theirs.stdout.strip().splitlines()[-1]


@pytest.mark.requirement("D11")
@pytest.mark.requirement("D12")
def test_the_tutorial_notebook_runs_from_start_to_end(tmp_path: Path) -> None:
    notebook = nbformat.read(EXAMPLES / "tutorial.ipynb", as_version=4)
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    assert not [cell for cell in notebook.cells if cell.get("outputs") and cell.outputs[-1].output_type == "error"]
