"""What the same bits cost: steps of a GPT with train.exact and train.deterministic, beside the same steps without.

python benchmarks/exact.py                  1, 2 and 4 processes on the CPU: exact beside ddp
python benchmarks/exact.py --device cuda    one GPU: both beside plain accumulation, eager and compiled
python benchmarks/exact.py --quick          a tiny model: proves the code, measures nothing

Every case prints a digest of the weights after its steps. Those of exact must be the same on any number of processes.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import report
import torch

import lockstep

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import TextModel, token_losses

LEAVES = 8
SIZES = {
    "tiny": {"layers": 2, "heads": 2, "width": 32, "context": 32},
    "cpu": {"layers": 4, "heads": 4, "width": 256, "context": 128},
    "cuda": {"layers": 12, "heads": 12, "width": 768, "context": 1024, "vocab": 50304},
}


def train(run: lockstep.Run, size: str, steps: int, accumulate: int, compiled: bool) -> dict[str, Any]:
    """Trains on a few steps: seconds of each, the digest of the weights and the peak of memory."""
    task = TextModel(**SIZES[size])
    torch.manual_seed(0)
    plain = task.model().to(run.device)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    model, optimizer = run.setup(
        plain, optimizer, clip_norm=1.0, compile=compiled, precision="bf16" if size == "cuda" else "float32"
    )
    seconds, began = [], time.perf_counter()
    for batch in run.batches(task.train_data(), 32, accumulate=accumulate):
        windows = batch[0].long()
        tokens, targets = windows[:, :-1], windows[:, 1:]
        with run.autocast():
            logits = model(tokens)
        loss = token_losses(logits.float(), targets).mean()
        run.backward(loss)
        if not run.step(optimizer):
            continue
        if run.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
        if len(seconds) == steps:
            break
    digest = hashlib.sha256()
    for parameter in run.module.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    peak = torch.cuda.max_memory_allocated() if run.device.type == "cuda" else 0
    return {"ms": 1000 * statistics.median(seconds[2:]), "digest": digest.hexdigest()[:12], "GiB": peak / 2**30}


def measured(case: dict[str, Any], size: str, steps: int, device: str) -> dict[str, Any]:
    exact = case["how"] == "exact"
    accumulate = 1 if exact else LEAVES // case["processes"]
    main = partial(train, size=size, steps=steps, accumulate=accumulate, compiled=case["compiled"])
    settings = {"exact": LEAVES if exact else None, "deterministic": case["how"] == "deterministic"}
    with tempfile.TemporaryDirectory() as out:
        found = lockstep.launch(
            main, processes=case["processes"], runtime=device, out=out, train=settings,
            launch={"threads": 1, "share_devices": case["processes"] > 1 and device == "cuda"},
            log={"every": "1000 steps"},
        )  # fmt: skip
    return {**case, **found[0]}


def main() -> None:
    parser = report.options(__doc__, repeats=3)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--case", type=json.loads, help="measure this one here, and print it")
    chosen = report.parse(parser)
    size = "tiny" if chosen.quick else chosen.device
    if chosen.case:
        print("ROW", json.dumps(measured(chosen.case, size, 5 if chosen.quick else chosen.steps, chosen.device)))
        return
    if chosen.device == "cuda":
        cases = [(1, how, compiled) for compiled in (False, True) for how in ("plain", "deterministic", "exact")]
        cases.insert(3, (2, "exact", False))  # two processes share the GPU: for its bits, not its time
    else:
        cases = [(processes, how, False) for processes in (1, 2, 4) for how in ("plain", "exact")]
    rows: list[dict[str, Any]] = []
    for processes, how, compiled in report.interleaved(cases, chosen, shuffled=chosen.device == "cpu"):
        case = {"processes": processes, "how": how, "compiled": compiled}
        # In a process of its own: nothing of the case before is left in memory.
        command = [sys.executable, __file__, *sys.argv[1:], "--case", json.dumps(case)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows += [json.loads(line.removeprefix("ROW ")) for line in output.splitlines() if line.startswith("ROW ")]
        print(json.dumps(rows[-1]), flush=True)
        if chosen.json:
            chosen.json.write_text(json.dumps(rows))
    print("\n| processes | compiled | | step | of plain | peak | bits |")
    print("| ---: | --- | --- | ---: | ---: | ---: | --- |")
    found: dict[tuple[int, str, bool], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["processes"], row["how"], row["compiled"]), []).append(row)
    for (processes, how, compiled), same in sorted(found.items()):
        plain = min((each["ms"] for each in found.get((processes, "plain", compiled), [])), default=float("nan"))
        ms, digests = min(each["ms"] for each in same), sorted({each["digest"] for each in same})
        print(f"| {processes} | {'yes' if compiled else 'no'} | {how} | {ms:.1f} ms | {ms / plain:.3f} | "
              f"{same[0]['GiB']:.1f} GiB | {', '.join(digests)} |")  # fmt: skip
    bits = {each["digest"] for each in rows if each["how"] == "exact" and not each["compiled"]}
    if len(bits) != 1:
        sys.exit(f"exact: {len(bits)} different results: {bits}")


if __name__ == "__main__":
    main()
