"""Time and memory of a GPT's head and loss on one GPU, forward and backward: whole, in parts, and by Liger's kernel.

python benchmarks/gpu_losses.py     on a machine with an NVIDIA GPU; with liger-kernel where it is installed
python benchmarks/gpu_losses.py --tiny     anywhere: a few rows on the CPU, which measures nothing
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import report
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.nn import linear_cross_entropy

ROWS, WIDTH = 16 * 1024, 2048
CLASSES = (50_304, 128_256)
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def whole(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


def in_parts(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, weight, target)


def ways() -> dict[str, Loss]:
    found: dict[str, Loss] = {
        "`F.linear` and `F.cross_entropy`, eager": whole,
        "`F.linear` and `F.cross_entropy`, compiled": torch.compile(whole, dynamic=False),
        "`lockstep.nn.linear_cross_entropy`, eager": in_parts,
        "`lockstep.nn.linear_cross_entropy`, compiled": torch.compile(in_parts, dynamic=False),
    }
    if hasattr(F, "linear_cross_entropy"):
        found["torch's `F.linear_cross_entropy`, eager"] = lambda hidden, weight, target: F.linear_cross_entropy(
            hidden, weight, target
        )
    if report.installed("liger_kernel") and torch.cuda.is_available():
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Liger

        # Sums of the weight's gradient in float32, as in the others.
        found["Liger's kernel, sums in float32"] = lambda hidden, weight, target: Liger.apply(
            hidden, weight, target, None, None, -100, 0.0, 0.0, "mean", None, False, torch.float32
        )[0]
    return found


def measured(loss: Loss, classes: int, tiny: bool) -> tuple[float, float, float, float]:
    """Returns milliseconds, GiB above the inputs, the loss, and the norm of the weight's gradient."""
    rows, width = (64, 16) if tiny else (ROWS, WIDTH)
    device = "cpu" if tiny else "cuda"
    torch.manual_seed(0)
    hidden = torch.randn(rows, width, device=device, requires_grad=True)
    master = (torch.randn(classes, width, device=device) / width**0.5).requires_grad_()
    target = torch.randint(0, classes, (rows,), device=device)

    def work() -> Tensor:
        hidden.grad = master.grad = None
        with torch.autocast(device, dtype=torch.bfloat16):
            value = loss(hidden.bfloat16(), master.bfloat16(), target)
        value.backward()
        return value.detach()

    for _ in range(3):
        value = work()
    if not tiny:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = 0 if tiny else torch.cuda.memory_allocated()
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(1 if tiny else 5):
            work()
        if not tiny:
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - began) / (1 if tiny else 5))
    peak = 0 if tiny else torch.cuda.max_memory_allocated() - before
    assert master.grad is not None
    return statistics.median(seconds) * 1e3, peak / 2**30, float(value), float(master.grad.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    tiny = parser.parse_args().tiny
    for classes in (300, 500) if tiny else CLASSES:
        print(f"\n| {classes:,} classes | time | to compiled | memory | loss | norm of the gradient |")
        print("| --- " + "| ---: " * 5 + "|")
        rows = {text: measured(loss, classes, tiny) for text, loss in ways().items()}
        plain = rows["`F.linear` and `F.cross_entropy`, compiled"][0]
        for text, (time_taken, memory, value, norm) in rows.items():
            print(f"| {text} | {time_taken:.1f} ms | {time_taken / plain:.2f} | {memory:.2f} GiB | "
                  f"{value:.4f} | {norm:.4f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
