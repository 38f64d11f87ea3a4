"""The example programs on PJRT CPU, as docs/examples.md starts them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from xla_ways import needs_torch_xla

from conftest import ROOT, summary

pytestmark = needs_torch_xla

EXAMPLES = ROOT / "examples"
(DOCUMENTED,) = re.findall(r"^```bash\n(.*?)^```", (ROOT / "docs" / "examples.md").read_text(), re.M | re.S)
LIMIT = 600.0
SMALL = ["--examples", "640", "--batch_size", "64", "--epochs", "1"]


def finish(command: list[str], folder: Path, **env: str) -> str:
    finished = subprocess.run(
        command, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, timeout=LIMIT
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def train_on_mesh(folder: Path, out: str, *arguments: str) -> str:
    return finish([sys.executable, str(EXAMPLES / "mnist_xla.py"), out, *arguments], folder, PJRT_DEVICE="CPU")


def losses(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"(?:Loss: |Loss=)(\S+)", text)]


@pytest.mark.requirement("X02")
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(each, marks=pytest.mark.long if "resnet50" in each and "--ddp" in each else ())
        for each in DOCUMENTED.splitlines()
    ],
)
def test_the_programs_run_with_nothing_but_pjrt_device(tmp_path: Path, command: str) -> None:
    (tmp_path / "examples").symlink_to(EXAMPLES)
    variable, python, *arguments = shlex.split(command)
    assert (variable, python) == ("PJRT_DEVICE=CPU", "python")
    text = finish([sys.executable, *arguments], tmp_path, PJRT_DEVICE="CPU")
    assert losses(text)
    over_mesh = "mnist_xla" in command
    assert ("Running on XLA device: xla:0" if over_mesh else "| Training Device=xla:0/0 Epoch=1 Step=0 Loss=") in text
    (run,) = (tmp_path / ("output" if over_mesh else "runs")).iterdir()
    end = summary(run)
    ways = ("ddp", 2) if "--ddp" in command else ("spmd" if over_mesh else "single", 1)
    assert (end["runtime"], end["strategy"], end["world_size"]) == ("xla", *ways)


@pytest.mark.requirement("X02")
def test_mnist_prints_the_same_losses_on_xla_on_the_cpu_and_with_ddp(tmp_path: Path) -> None:
    small = ["--fake_data", "--examples", "512", "--log_steps", "1"]
    command = [sys.executable, str(EXAMPLES / "mnist.py"), *small]
    reference = losses(finish(command, tmp_path))
    assert len(reference) == 4
    for more in ([], ["--ddp"]):
        found = losses(finish([*command, *more], tmp_path, PJRT_DEVICE="CPU"))
        assert found == pytest.approx(reference, rel=1e-4)


@pytest.mark.requirement("P05")
@pytest.mark.requirement("P09")
@pytest.mark.parametrize(
    "devices", [4, pytest.param(2, marks=pytest.mark.long), pytest.param(8, marks=pytest.mark.long)]
)
def test_the_program_over_a_mesh_prints_the_lines_and_the_losses_of_the_cpu(tmp_path: Path, devices: int) -> None:
    arguments = [*SMALL, "--log_every", "2"]
    expected = train_on_mesh(tmp_path, "cpu", "--runtime", "cpu", *arguments)
    text = train_on_mesh(tmp_path, "xla", "--devices", str(devices), *arguments)
    lines = [line for line in text.splitlines() if line.startswith("0 ")]
    assert lines[:2] == ["0 Running on XLA device: xla:0", "0 Starting training..."]
    assert lines[-1] == "0 Training finished!"
    assert re.fullmatch(r"0 Train Epoch: 1 \[0/640 \(0%\)\]\tLoss: \d\.\d{6}", lines[2])
    # The first weights depend on the machine's random numbers: what counts is that the CPU has the same loss.
    assert losses(lines[2]) == pytest.approx(losses(expected)[:1], abs=1e-4)
    assert [line.partition("Loss: ")[0] for line in lines[3:-1]] == [
        f"0 Train Epoch: 1 [{128 * number}/640 ({20 * number}%)]\t" for number in range(1, 5)
    ]
    assert losses(text) == pytest.approx(losses(expected), rel=1e-4)
    (run,) = (tmp_path / "xla").iterdir()
    end = summary(run)
    assert (end["runtime"], end["strategy"]) == ("xla", "spmd")
    assert "compiled anew" not in (run / "logs" / "rank-0.log").read_text()
    assert list((run / "profile" / "proc_0").rglob("*.xplane.pb")), "a trace of the tenth step"


SHARDINGS = """
import json
import sys

import mnist_xla
import torch
from mnist import Mnist

import lockstep


def main(run):
    import torch_xla

    model = mnist_xla.MNISTNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.setup(model, optimizer, shard=mnist_xla.shard_rules(run.devices.global_device_count))
    images, _ = next(run.batches(Mnist(fake_data=True, examples=64).train_data(), 64))
    tensors = {**dict(model.named_parameters()), "images": images}
    return {name: torch_xla._XLAC._get_xla_sharding_spec(each) for name, each in tensors.items()}


settings = mnist_xla.launch_settings(mnist_xla.parse(["out", "--devices", sys.argv[1]]))
print(json.dumps(lockstep.launch(main, processes=1, **settings)[0]))
"""


@pytest.mark.requirement("P05")
@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        # Tiles per dimension; one number more than dimensions is over how many devices each tile is repeated.
        (4, {"conv": [2, 1, 1, 1, 2], "fc1": [2, 1, 2], "fc2": [2, 2], "images": [2, 1, 1, 2]}),
        (8, {"conv": [4, 1, 1, 1, 2], "fc1": [4, 1, 2], "fc2": [1, 2, 4], "images": [4, 1, 1, 2]}),
    ],
)
def test_xla_holds_the_weights_and_the_images_split_as_the_specs_say(
    tmp_path: Path, devices: int, expected: dict[str, list[int]]
) -> None:
    script = tmp_path / "shardings.py"
    script.write_text(SHARDINGS)
    path = os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    text = finish([sys.executable, str(script), str(devices)], tmp_path, PJRT_DEVICE="CPU", PYTHONPATH=path)
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    tiles = {name: re.search(r"devices=\[([\d,]+)\]", each) for name, each in found.items()}
    split = {name: [int(part) for part in each[1].split(",")] for name, each in tiles.items() if each is not None}
    assert split == {
        "conv1.weight": expected["conv"],
        "conv2.weight": expected["conv"],
        "fc1.weight": expected["fc1"],
        "fc2.weight": expected["fc2"],
        "images": expected["images"],
    }


@pytest.mark.requirement("P08")
def test_a_line_for_every_batch_compiles_no_more_than_a_line_for_the_first(tmp_path: Path) -> None:
    """Counted by torch_xla itself, over the whole program: reading the loss is outside of what the guard watches."""
    script = tmp_path / "counted.py"
    script.write_text(
        "import sys\nimport mnist_xla\nmnist_xla.main(sys.argv[1:])\n"
        "import torch_xla.debug.metrics as metrics\nprint('programs', metrics.metric_data('CompileTime')[0])\n"
    )
    path = os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    counts = []
    for every in ("1", "1000"):
        command = [sys.executable, str(script), "out", *SMALL, "--log_every", every]
        text = finish(command, tmp_path, PJRT_DEVICE="CPU", PYTHONPATH=path)
        assert len(losses(text)) == (10 if every == "1" else 1)
        counts.append(int(text.split("programs ")[-1]))
    assert counts[0] == counts[1]
