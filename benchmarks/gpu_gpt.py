"""GPTs of 124 million and 1.3 billion parameters on one GPU: sharding, recomputing and compiling, beside FSDP2 by hand.

python benchmarks/gpu_gpt.py --out FILE   on a machine with an NVIDIA GPU of 80 GB or more; about seven minutes
python benchmarks/gpu_gpt.py --tiny       anywhere: the same code with tiny models on the CPU, which measures nothing
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report
from gpt_sizes import size_of, text_bytes


@dataclass(frozen=True)
class Case:
    """One row: a model, who trains it, and how."""

    text: str
    model: str  # small or large
    way: str  # single, ddp, fsdp, or hand
    steps: int
    activation_checkpointing: bool = False
    compiled: bool = True
    param_dtype: str = "float32"

    @property
    def block(self) -> int:
        """Steps between two looks at the clock, for which the device has to be waited for."""
        return 30 if self.model == "small" else 10


CASES = [
    Case("Lockstep, single", "small", "single", 150),
    Case("Lockstep, ddp on one process", "small", "ddp", 150),
    Case("Lockstep, fsdp over a mesh of one", "small", "fsdp", 150),
    Case("by hand, FSDP2", "small", "hand", 150, param_dtype="bf16"),
    Case("Lockstep, fsdp: as it is", "large", "fsdp", 40, compiled=False),
    Case(
        "Lockstep, fsdp: activation checkpointing", "large", "fsdp", 40, activation_checkpointing=True, compiled=False
    ),
    Case("Lockstep, fsdp: compile", "large", "fsdp", 40),
    Case("Lockstep, fsdp: activation checkpointing and compile", "large", "fsdp", 100, activation_checkpointing=True),
    Case("Lockstep, fsdp: compile, `param_dtype: bf16`", "large", "fsdp", 40, param_dtype="bf16"),
    Case(
        "Lockstep, fsdp: activation checkpointing and compile, `param_dtype: bf16`",
        "large",
        "fsdp",
        100,
        activation_checkpointing=True,
        param_dtype="bf16",
    ),
    Case("by hand, FSDP2: compile", "large", "hand", 40),
    Case("by hand, FSDP2: compile, `param_dtype: bf16`", "large", "hand", 40, param_dtype="bf16"),
    Case(
        "by hand, FSDP2: activation checkpointing and compile, `param_dtype: bf16`",
        "large",
        "hand",
        100,
        activation_checkpointing=True,
        param_dtype="bf16",
    ),
]

NOTES = """\
bf16, fused AdamW, gradients clipped to a norm of 1; {small} x 1024 tokens per step for the small model, {large} x 1024
for the large one. `compile: blocks`, `activation_checkpointing: blocks`; by hand the same by torch's own means
(checkpoint_wrapper,
torch.compile and fully_shard per block). Weights are gathered in float32 unless it says otherwise. The median over
blocks of 30 steps (small) and 10 (large) after the first, with the device waited for at each end; first step: seconds
from the model to its end, with all compiling. Peak memory is that of torch's allocator while training."""


def main() -> None:
    parser = report.options(__doc__, repeats=1)
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU, to prove the code")
    parser.add_argument(
        "--only", nargs="+", choices=["small", "large", "single", "ddp", "fsdp", "hand"], help="these alone"
    )
    parser.add_argument("--cases", nargs="+", type=int, help="these alone, by their place in CASES, in this order")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no case begins")
    parser.add_argument("--out", type=Path, help="write what is printed there as well")
    parser.add_argument("--child", nargs=2, metavar=("CASE", "FILE"), help=argparse.SUPPRESS)
    chosen = report.parse(parser)
    chosen.tiny = chosen.tiny or chosen.quick
    if chosen.child:
        train(CASES[int(chosen.child[0])], Path(chosen.child[1]), chosen.tiny)
        return
    began = time.monotonic()
    cases = [case for case in CASES if not chosen.only or {case.model, case.way} & set(chosen.only)]
    if chosen.cases:
        cases = [CASES[number] for number in chosen.cases]
    found: dict[str, list[dict[str, Any]]] = {case.text: [] for case in cases}
    with tempfile.TemporaryDirectory(prefix="gpu-gpt-") as folder:
        for index in report.interleaved([CASES.index(case) for case in cases], chosen, shuffled=chosen.repeats > 1):
            if time.monotonic() - began > chosen.seconds:
                print(f"{CASES[index].text} is left out: no time", file=sys.stderr)
                continue
            file = Path(folder) / f"{index}.json"
            tiny = ["--tiny"] if chosen.tiny else []
            try:
                report.run([sys.executable, __file__, "--child", str(index), str(file), *tiny], limit=240)
                found[CASES[index].text].append(json.loads(file.read_text(encoding="utf-8")))
                row = [CASES[index].text, *cells(CASES[index], found[CASES[index].text], chosen.tiny)]
                print(" | ".join(row), file=sys.stderr, flush=True)
                if chosen.json is not None:
                    chosen.json.write_text(json.dumps({"found": found}), encoding="utf-8")
            except report.MeasurementFailed as failure:  # the others are worth having
                print(f"{CASES[index].text} failed: {failure}", file=sys.stderr)
    text = shown(cases, found, chosen.tiny)
    report.publish(text, {"seconds": time.monotonic() - began, "found": found}, chosen.json)
    if chosen.out:
        chosen.out.write_text(f"{text}\n\n{report.provenance()}\n", encoding="utf-8")
    sys.exit(0 if all(found.values()) else 1)


def shown(cases: list[Case], found: dict[str, list[dict[str, Any]]], tiny: bool) -> str:
    header = ["", "step", "tokens/s", "peak memory", "first step", "loss at the end"]
    parts = []
    for model, title in (("small", "124 million parameters"), ("large", "1.3 billion parameters")):
        rows = [[case.text, *cells(case, found[case.text], tiny)] for case in cases if case.model == model]
        if rows:
            parts.append(f"{title}:\n\n{report.table(header, rows)}")
    parts.append(NOTES.format(small=batch_size("small", False), large=batch_size("large", False)))
    return "\n\n".join(parts)


def cells(case: Case, found: list[dict[str, Any]], tiny: bool) -> list[str]:
    if not found:
        return ["failed", *["-"] * 4]
    stamps = [each["stamps"] for each in found]
    # The first interval has the compiling in it.
    steps = [(after - before) / case.block for each in stamps for before, after in itertools.pairwise(each[1:])]
    step = statistics.median(steps)
    tokens = batch_size(case.model, tiny) * size_of(case.model, tiny)["context"]
    peak, first = max(each["peak"] for each in found), min(each["first"] for each in found)
    return [
        f"{step * 1e3:.1f} ms", f"{tokens / step / 1e3:.1f} k", f"{peak / 2**30:.1f} GiB", f"{first:.0f} s",
        f"{found[0]['loss']:.3f}",
    ]  # fmt: skip


def batch_size(model: str, tiny: bool) -> int:
    return 4 if tiny else 32 if model == "small" else 16


# In a child process


class Clock:
    """Waits for the device and notes the time before every so many steps, and what the first one took."""

    def __init__(self, case: Case, on_gpu: bool) -> None:
        self._case, self._on_gpu = case, on_gpu
        self._began, self._stamps, self._first = time.perf_counter(), [], 0.0

    def before(self, step: int) -> None:
        if step == 0 and self._on_gpu:
            import torch

            torch.cuda.reset_peak_memory_stats()
        if step == 1:
            self._first = self._now() - self._began
        if step % self._case.block == 0:
            self._stamps.append(self._now())

    def ended(self, file: Path, loss: float) -> None:
        import torch

        self.before(self._case.steps)
        peak = torch.cuda.max_memory_allocated() if self._on_gpu else 0
        found = {"stamps": self._stamps, "first": self._first, "peak": peak, "loss": loss}
        file.write_text(json.dumps(found), encoding="utf-8")

    def _now(self) -> float:
        if self._on_gpu:
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()


def train(case: Case, file: Path, tiny: bool) -> None:
    import torch

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    from gpt import TextModel

    torch.manual_seed(0)
    task = TextModel(**size_of(case.model, tiny), max_bytes=text_bytes(tiny), lr=2e-4)
    (by_hand if case.way == "hand" else by_lockstep)(case, task, file, tiny)


def by_lockstep(case: Case, task: Any, file: Path, tiny: bool) -> None:
    import torch
    from fsdp_by_hand import fill

    import lockstep

    def loop(run: Any) -> None:
        clock = Clock(case, not tiny)
        # On the GPU: on the host, drawing the values would take longer than the training.
        with torch.device("cpu" if tiny else "cuda"):
            model = task.model()
        fill(model.named_parameters())
        model, optimizer = run.setup(
            model, task.optimizer(model), precision="bf16", clip_norm=1.0,
            compile="blocks" if case.compiled else False,
            activation_checkpointing="blocks" if case.activation_checkpointing else None,
        )  # fmt: skip
        data, size = task.train_data(), batch_size(case.model, tiny)
        step = 0
        for _ in run.epochs(None):
            for batch in run.batches(data, size, drop_last=True):
                clock.before(step)
                with run.autocast():
                    loss = task.loss(model, batch)
                run.backward(loss)
                run.log(loss=loss)
                run.step(optimizer)
                step += 1
                if step == case.steps:
                    clock.ended(file, loss.item())
                    return

    mesh = {"type": "fsdp", "mesh": {"data": -1}, "param_dtype": case.param_dtype}
    strategy = mesh if case.way == "fsdp" else case.way
    with tempfile.TemporaryDirectory(prefix="gpu-gpt-run-") as folder:
        lockstep.launch(loop, processes=1, runtime="cpu" if tiny else "cuda", strategy=strategy, out=folder)


def by_hand(case: Case, task: Any, file: Path, tiny: bool) -> None:
    import torch
    import torch.distributed as dist
    from fsdp_by_hand import mesh_of_all, sharded
    from torch.utils.data import DataLoader

    device = "cpu" if tiny else "cuda"
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"})
    os.environ.setdefault("MASTER_PORT", "29517")
    mesh = mesh_of_all(device)
    clock = Clock(case, not tiny)
    model = sharded(
        task.model, "blocks", mesh, case.activation_checkpointing, case.compiled, bf16=case.param_dtype == "bf16"
    )
    optimizer = task.optimizer(model)
    loader = DataLoader(task.train_data(), batch_size(case.model, tiny), True, drop_last=True, pin_memory=not tiny)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for step, batch in enumerate(itertools.islice(batches, case.steps)):
        clock.before(step)
        on_device = [each.to(device, non_blocking=True) for each in batch]
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = task.loss(model, on_device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    clock.ended(file, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
