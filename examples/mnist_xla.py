"""MNIST as one program over a mesh of XLA devices (SPMD); every host runs the same command:

PJRT_DEVICE=TPU python examples/mnist_xla.py /path/to/shared/output_folder
"""

import argparse
import functools
import os
import sys
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from mnist import PIXEL_MEAN, PIXEL_STD, Mnist
from program import fail, mean_over_ranks, positive
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

import lockstep
from lockstep.distributed.topology import Topology

USAGE = "Usage: python mnist_xla.py /path/to/shared/output_folder"
EXAMPLES, CLASSES = 60_000, 10
EPOCHS, BATCH_SIZE, LEARNING_RATE, MOMENTUM, SEED = 2, 256, 0.01, 0.5, 12
# A CPU has one device, and pretends to have as many as it is asked for; the meshes need an even number.
DEVICES_ON_A_CPU = 4

# -1 is what the others leave over: with N devices these are (N/2, 2) and (N/2, 2, 1, 1).
LINEAR_MESH = {"data": -1, "model": 2}
CONV_MESH = {"data": -1, "dim1": 2, "dim2": 1, "dim3": 1}


class MNISTNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, kernel_size=3, stride=1)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3, stride=1)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2)
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        x = self.fc2(x)
        return F.log_softmax(x, dim=1)


def shard_rules(devices: int) -> dict[str, dict[str, Any]]:
    """How the weights are split: a mesh, and an axis of it for every dimension."""
    # Ten classes do not divide over the data axis of more than four devices; they are then kept together.
    classes = "data" if CLASSES % max(devices // 2, 1) == 0 else None
    return {
        "conv1.weight": {"mesh": "conv", "spec": ("data", None, None, None)},
        "conv2.weight": {"mesh": "conv", "spec": ("data", None, None, None)},
        "fc1.weight": {"mesh": "linear", "spec": ("data", None)},
        "fc2.weight": {"mesh": "linear", "spec": (classes, "model")},
    }


def strategy(hosts: int) -> dict[str, Any]:
    """The meshes. Batches are spread over the data axis of `mesh`.

    Where every host loads its own part of a batch, XLA can put it together only if that axis has all devices.
    """
    mesh = LINEAR_MESH if hosts == 1 else {"data": -1}
    return {"type": "spmd", "mesh": mesh, "meshes": {"linear": LINEAR_MESH, "conv": CONV_MESH}}


def normalised(images: Tensor) -> Tensor:
    """Bytes [B, 28, 28] as the network takes them; on the device, which is sent a quarter of what floats would be."""
    return (images.unsqueeze(1).float() / 255 - PIXEL_MEAN) / PIXEL_STD


def shuffled(data: Dataset[Any], epochs: int) -> list[Dataset[Any]]:
    """The data in the order of every epoch, drawn as a DataLoader with shuffle=True draws it.

    `run.batches` shuffles by itself. Here it does not, so that weights and batches are those of a loop by hand that
    calls torch.manual_seed first, and so are its losses.
    """
    loader = DataLoader(range(len(data)), batch_size=None, shuffle=True)  # type: ignore[arg-type, var-annotated]
    return [Subset(data, list(loader)) for _ in range(epochs)]


def train_mnist(chosen: argparse.Namespace, run: lockstep.Run) -> None:
    host = run.devices.process_index
    kind = "XLA device" if run.device.type == "xla" else "device"
    print(host, f"Running on {kind}: {run.device}", flush=True)

    train = Mnist(folder=chosen.data, fake_data=chosen.data is None, examples=chosen.examples).train_data()
    examples = len(train)  # type: ignore[arg-type]
    batches = -(-examples // chosen.batch_size)

    torch.manual_seed(SEED)
    model = MNISTNet()
    in_order = shuffled(train, chosen.epochs)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    model, optimizer = run.setup(model, optimizer, shard=shard_rules(run.devices.global_device_count))
    loss_fn = nn.NLLLoss()

    print(host, "Starting training...", flush=True)
    for epoch in run.epochs(chosen.epochs):
        for images, target in run.batches(in_order[epoch], chosen.batch_size, shuffle=False, name="train"):
            batch = run.progress.batch
            loss = loss_fn(model(normalised(images)), target)
            run.backward(loss)
            run.step(optimizer)
            # A short batch at the end comes in two parts of the usual shape, and neither has the loss of all of it.
            whole = (batch + 1) * chosen.batch_size <= examples
            if whole and batch % chosen.log_every == 0:
                print(
                    host,
                    f"Train Epoch: {epoch + 1} [{batch * chosen.batch_size}/{examples} "
                    f"({100.0 * batch / batches:.0f}%)]\tLoss: {mean_over_ranks(run, loss):.6f}",
                    flush=True,
                )
    print(host, "Training finished!", flush=True)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", nargs="?", help="where the run's folder is made; shared by all hosts")
    parser.add_argument(
        "--data", default=os.environ.get("MNIST_DATA"), metavar="FOLDER",
        help="where the idx files of MNIST are; else MNIST_DATA, else images are made up",
    )  # fmt: skip
    parser.add_argument(
        "--devices", type=positive,
        help=f"on a CPU, how many to pretend to have; else CPU_NUM_DEVICES, else {DEVICES_ON_A_CPU}",
    )  # fmt: skip
    parser.add_argument("--runtime", choices=["xla", "cpu"], default="xla", help="cpu: without XLA, to compare")
    parser.add_argument("--epochs", type=positive, default=EPOCHS)
    parser.add_argument("--batch_size", type=positive, default=BATCH_SIZE, help="over all hosts together")
    parser.add_argument("--examples", type=positive, default=EXAMPLES, help="how many to make up without --data")
    parser.add_argument("--log_every", type=positive, default=100, help="a line every so many batches")
    chosen = parser.parse_args(arguments)
    if chosen.output is None:
        parser.exit(2, f"{USAGE}\n")
    return chosen


def launch_settings(chosen: argparse.Namespace) -> dict[str, Any]:
    """How to launch: one process per host, with all of its devices."""
    if chosen.runtime == "cpu":
        return {"runtime": "cpu"}
    settings: dict[str, Any] = {"runtime": "xla", "strategy": strategy(Topology.from_env(os.environ).world_size)}
    on_a_cpu = os.environ.get("PJRT_DEVICE", "CPU").upper() == "CPU"
    if chosen.devices is not None:
        settings["devices"] = chosen.devices
    elif on_a_cpu and "CPU_NUM_DEVICES" not in os.environ:
        settings["devices"] = DEVICES_ON_A_CPU
    return settings


def main(arguments: list[str]) -> None:
    chosen = parse(arguments)
    train = functools.partial(train_mnist, chosen)
    try:
        settings = launch_settings(chosen)
        lockstep.launch(
            train,
            processes=1,
            out=chosen.output,
            name="mnist_xla",
            seed=SEED,
            log={"every": "1 epoch"},
            profile={"steps": 5},  # from the tenth step on, into profile/proc_<host>; port 9012 takes more on demand
            **settings,
        )
    except lockstep.LockstepError as error:
        fail(str(error), error.exit_code)


if __name__ == "__main__":
    main(sys.argv[1:])
