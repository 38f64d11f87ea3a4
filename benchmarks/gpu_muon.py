"""What Muon costs on one NVIDIA GPU, for a GPT of 1.3 billion parameters: the optimizer's step, and a training step.

python benchmarks/gpu_muon.py [--json FILE]; --tiny tries it on the CPU.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpt_sizes import size_of
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from lockstep.strategy import muon

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT

MICRO_BATCHES, STEPS = 8, 8


def wait(tiny: bool) -> None:
    if not tiny:
        torch.cuda.synchronize()


def milliseconds(work: Callable[[], Any], tiny: bool, repeats: int = 5) -> float:
    work()
    wait(tiny)
    begun = time.perf_counter()
    for _ in range(repeats):
        work()
    wait(tiny)
    return (time.perf_counter() - begun) / repeats * 1e3


def steps_of_optimizers(tiny: bool) -> dict[str, float]:
    """The matrices of all blocks, with gradients, and nothing else on the device."""
    size = size_of("large", tiny)
    width, device = size["width"], "cpu" if tiny else "cuda"
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * size["layers"]
    matrices = [nn.Parameter(torch.randn(shape, device=device) * 0.02) for shape in shapes]
    for each in matrices:
        each.grad = torch.randn_like(each) * 1e-3
    by_torch = torch.optim.Muon(matrices, lr=0.02)
    adamw = torch.optim.AdamW(matrices, lr=1e-3, fused=not tiny)
    return {
        "AdamW, fused": milliseconds(adamw.step, tiny),
        "torch.optim.Muon": milliseconds(by_torch.step, tiny),
        "Muon, Lockstep's step": milliseconds(partial(muon.step, by_torch), tiny),
    }


def trained(run: lockstep.Run, name: str, tiny: bool) -> dict[str, Any]:
    size = size_of("large", tiny)
    model = GPT(**size)
    matrices = [each for path, each in model.named_parameters() if each.dim() == 2 and re.search(r"\.\d+\.", path)]
    chosen = {id(each) for each in matrices}
    others = [each for each in model.parameters() if id(each) not in chosen]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if name == "Muon":
        hidden = torch.optim.Muon(matrices, lr=0.02, adjust_lr_fn="match_rms_adamw")
        optimizer = lockstep.CombinedOptimizer(hidden, torch.optim.AdamW(others, lr=1e-3))
    model, optimizer = run.setup(model, optimizer, precision="bf16", clip_norm=1.0)
    sequences = 16 if tiny else 128
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, size["vocab"], (sequences * STEPS, size["context"] + 1), generator=generator)
    times, begun = [], time.perf_counter()
    for (text,) in run.batches(TensorDataset(tokens), sequences, accumulate=MICRO_BATCHES):
        with run.autocast():
            loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1).float(), text[:, 1:].flatten())
        run.backward(loss)
        if run.step(optimizer):
            wait(tiny)
            times.append((time.perf_counter() - begun) * 1e3)
            begun = time.perf_counter()
    return {"matrices": len(matrices), "median": statistics.median(times[2:]), "all": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on the CPU")
    parser.add_argument("--json", type=Path, help="write what was measured to this file, after every case")
    options = parser.parse_args()
    found: dict[str, Any] = {}

    def note(name: str, value: Any) -> None:
        found[name] = value
        if options.json:
            options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")

    note("optimizers", steps_of_optimizers(options.tiny))
    print("| the step of the optimizer, matrices of all blocks | ms |\n| --- | ---: |")
    for name, value in found["optimizers"].items():
        print(f"| {name} | {value:.1f} |")
    print("\n| a training step of 8 micro-batches, eager | ms | |\n| --- | ---: | ---: |")
    for name in ("AdamW", "Muon"):
        with tempfile.TemporaryDirectory() as folder:
            (measured,) = lockstep.launch(
                partial(trained, name=name, tiny=options.tiny), processes=1, folder=Path(folder) / "run",
                runtime="cpu" if options.tiny else "cuda",
            )  # fmt: skip
        note(name, measured)
        print(f"| {name} | {measured['median']:.0f} | {measured['median'] / found['AdamW']['median']:.3f} |")


if __name__ == "__main__":
    main()
