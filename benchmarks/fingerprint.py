"""What comparing the replicas costs: a fingerprint of 100 million parameters, beside a training step of that model.

Every measurement is a process of its own, on the CPU and, where there is one, on a GPU. Fingerprints and steps take
turns in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report

WIDTH = 1024
BLOCKS = 12  # of 1024-4096-1024, as the feed-forward half of a GPT block: 8.4 million parameters each

# What a step is, from the cheapest that anybody could take to an ordinary small one.
STEPS = {
    "sgd": ("plain SGD, 16 rows", "SGD", 16),
    "adamw": ("AdamW, 64 rows", "AdamW", 64),
}

NOTES = """\
A stack of {blocks} x {width}-{inner}-{width} (Linear, GELU, Linear, with a residual connection), float32,
{parameters:.1f} million parameters in {tensors} tensors; a row is what a token is to a GPT, and there is no attention.
Batches as small as these make steps cheaper than any that one would train with, so the shares are upper bounds.
Fingerprint: `lockstep.strategy.fingerprint` of all parameters; the exchange of one number per rank, as much as
`run.gather` costs, is not in it. Medians. Share: of the time of 1000 steps, after which replicas are compared by
default. One thread on the CPU; `bandwidth` is how fast the fingerprint reads the parameters."""


def main() -> None:
    parser = report.options(__doc__, repeats=3)
    parser.add_argument("--child", nargs=2, metavar=("CASE", "FILE"), help=argparse.SUPPRESS)
    chosen = report.parse(parser)
    blocks = 1 if chosen.quick else BLOCKS
    if chosen.child:
        case, file = chosen.child
        device, kind = case.split("-")
        measured = measure_here(device, kind, blocks, rounds=2 if chosen.quick else 3)
        Path(file).write_text(json.dumps(measured), encoding="utf-8")
        return
    cases = [f"{device}-{kind}" for device in devices() for kind in STEPS]
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for case in report.interleaved(cases, chosen):
        found[case].append(measure(case, chosen.quick))
    notes = NOTES.format(blocks=blocks, width=WIDTH, inner=4 * WIDTH, **found[cases[0]][0]["model"])
    report.publish(f"{make_table(found)}\n\n{notes}", {"found": found}, chosen.json)


def devices() -> list[str]:
    import torch

    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def measure(case: str, quick: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="fingerprint-") as folder:
        file = Path(folder) / "found.json"
        options = ["--quick"] if quick else []
        report.run([sys.executable, __file__, *options, "--child", case, str(file)], limit=600, OMP_NUM_THREADS="1")
        return dict(json.loads(file.read_text(encoding="utf-8")))


def make_table(found: dict[str, list[dict[str, Any]]]) -> str:
    header = ["device, step", "fingerprint", "bandwidth", "step", "fingerprint in steps", "share, every 1000 steps"]
    rows = []
    for case, measured in found.items():
        _, kind = case.split("-")
        mine = statistics.median(each for one in measured for each in one["fingerprint"])
        step = statistics.median(each for one in measured for each in one["step"])
        bandwidth = 4e6 * measured[0]["model"]["parameters"] / mine / 1e9
        cells = [f"{1e3 * mine:.1f} ms", f"{bandwidth:.0f} GB/s", f"{1e3 * step:.1f} ms", f"{mine / step:.2f}"]
        rows.append([f"{measured[0]['device']}, {STEPS[kind][0]}", *cells, f"{mine / (1000 * step + mine):.4%}"])
    return report.table(header, sorted(rows, reverse=True))


# In the child process


def measure_here(device: str, kind: str, blocks: int, rounds: int) -> dict[str, Any]:
    """Seconds of every fingerprint and of every step, one after the other."""
    import torch

    from lockstep.strategy.fingerprint import fingerprint

    model, step = make_training(device, kind, blocks)
    parameters = dict(model.named_parameters())
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def seconds(action: Callable[[], Any]) -> float:
        wait()
        began = time.perf_counter()
        action()
        wait()
        return time.perf_counter() - began

    step(), fingerprint(parameters)  # allocates, compiles, warms up
    fingerprints, steps = [], []
    for _ in range(rounds * (10 if device == "cuda" else 1)):
        fingerprints.append(seconds(lambda: fingerprint(parameters)))
        steps.append(seconds(step))
    count = sum(each.numel() for each in parameters.values())
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    about = {"parameters": count / 1e6, "tensors": len(parameters)}
    return {"device": name, "fingerprint": fingerprints, "step": steps, "model": about}


def make_training(device: str, kind: str, blocks: int) -> tuple[Any, Callable[[], None]]:
    import torch
    from torch import Tensor, nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs + self.net(inputs)

    torch.manual_seed(0)
    _, name, rows = STEPS[kind]
    model = nn.Sequential(*(Block() for _ in range(blocks))).to(device)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-4)
    batch = torch.randn(rows, WIDTH, device=device)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


if __name__ == "__main__":
    main()
