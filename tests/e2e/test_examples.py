"""Every example runs, as its README says."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from torch.utils.data import DataLoader

from conftest import ROOT, Project, Started, summary

EXAMPLES = ROOT / "examples"


def run_script(script: str, folder: Path, *arguments: str) -> str:
    finished = finish(script, folder, *arguments)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def finish(script: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180)


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


@pytest.mark.parametrize("config", ["gpt.yaml", pytest.param("gpt-gpu.yaml", marks=pytest.mark.long)])
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


def test_mnist_as_a_program_prints_the_same_losses_with_and_without_ddp(tmp_path: Path) -> None:
    found = []
    for more in ([], ["--ddp"]):
        arguments = ["--fake_data", "--examples", "256", "--batch_size", "64", "--log_steps", "1", *more]
        text = run_script("mnist.py", tmp_path, *arguments)
        losses = re.findall(
            r"^\| Training Device=cpu/0 Epoch=1 Step=\d Loss=(\S+) Rate=\S+ GlobalRate=\S+ Time=", text, re.M
        )
        found.append([float(loss) for loss in losses])
        assert re.search(r"^Epoch 1 test end \S+, Accuracy=\d+\.\d\d$", text, re.M)
        assert re.search(r"^Max Accuracy: \d+\.\d\d%$", text, re.M)
    assert len(found[0]) == 4
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_resnet50_as_a_program(tmp_path: Path) -> None:
    small = ["--image_size", "32", "--examples", "8", "--batch_size", "4", "--log_steps", "1"]
    text = run_script("resnet50.py", tmp_path, "--fake_data", *small)
    assert text.count("| Training Device=cpu/0 Epoch=1 Step=") == 2
    assert "Max Accuracy: " in text


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("mnist.py", [], "one of the arguments --fake_data --datadir is required"),
        ("mnist.py", ["--datadir", "nowhere"], "mnist.py: No train-images-idx3-ubyte or train-images-idx3-ubyte.gz in"),
        ("resnet50.py", ["--fake_data", "--examples", "4"], "--examples 4 does not fill one batch of --batch_size 128"),
    ],
)
def test_programs_say_what_is_wrong_with_their_options(
    tmp_path: Path, script: str, arguments: list[str], message: str
) -> None:
    finished = finish(script, tmp_path, *arguments)
    assert finished.returncode == 2, finished.stderr
    assert message in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.requirement("P09")
def test_mnist_xla_without_its_argument_prints_its_usage(tmp_path: Path) -> None:
    finished = finish("mnist_xla.py", tmp_path)
    assert finished.returncode == 2
    assert finished.stderr == "Usage: python mnist_xla.py /path/to/shared/output_folder\n"


@pytest.mark.requirement("P07")
@pytest.mark.requirement("P09")
def test_every_host_prints_the_losses_of_a_loop_by_hand_on_its_own_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts with a process each. Without XLA, which cannot span processes on a CPU: the loop is the same."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["out", "--runtime", "cpu", "--examples", "160", "--batch_size", "64", "--log_every", "1"]
    command = [sys.executable, str(EXAMPLES / "mnist_xla.py"), *arguments]
    hosts = []
    for rank in range(2):
        place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank}
        env = {
            **place,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": 1,
            "LOCKSTEP_SECRET": "x" * 32,
        }
        hosts.append(Started(command, folder_of(tmp_path, rank), {name: str(value) for name, value in env.items()}))
    lines = []
    for host, started in enumerate(hosts):
        finished = started.wait()
        assert finished.code == 0, finished.text
        lines.append([line[2:] for line in finished.out.splitlines() if line.startswith(f"{host} ")])
    assert lines[0] == lines[1]
    assert [line.partition("Loss: ")[0] for line in lines[0]] == [
        "Running on device: cpu",
        "Starting training...",
        "Train Epoch: 1 [0/160 (0%)]\t",
        "Train Epoch: 1 [64/160 (33%)]\t",  # the third batch is a short one, and has no line
        "Train Epoch: 2 [0/160 (0%)]\t",
        "Train Epoch: 2 [64/160 (33%)]\t",
        "Training finished!",
    ]
    printed = [float(line.partition("Loss: ")[2]) for line in lines[0] if "Loss: " in line]
    monkeypatch.syspath_prepend(EXAMPLES)
    assert printed == pytest.approx(losses_by_hand(160, 64), abs=2e-6)


def losses_by_hand(examples: int, batch_size: int) -> list[float]:
    """The loop of the document that mnist_xla.py follows, on one device: the losses of the full batches."""
    import mnist
    import mnist_xla

    torch.manual_seed(12)
    data = mnist.Mnist(fake_data=True, examples=examples).train_data()
    loader = DataLoader(data, batch_size=batch_size, shuffle=True)
    model = mnist_xla.MNISTNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    found = []
    for _ in range(2):
        for images, target in loader:
            optimizer.zero_grad()
            loss = torch.nn.NLLLoss()(model(mnist_xla.normalised(images)), target)
            loss.backward()
            optimizer.step()
            found += [loss.item()] if len(target) == batch_size else []
    return found


def folder_of(parent: Path, rank: int) -> Path:
    folder = parent / f"host-{rank}"
    folder.mkdir()
    return folder


@pytest.mark.long
@pytest.mark.requirement("D11")
@pytest.mark.requirement("D12")
def test_the_tutorial_notebook_runs_from_start_to_end(tmp_path: Path) -> None:
    notebook = nbformat.read(EXAMPLES / "tutorial.ipynb", as_version=4)
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    assert not [cell for cell in notebook.cells if cell.get("outputs") and cell.outputs[-1].output_type == "error"]
