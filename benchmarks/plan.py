"""Peak memory as `lockstep plan` says it, beside what torch's allocator gave out on a GPU: cases that differ.

python benchmarks/plan.py                on a machine with an NVIDIA GPU of 80 GB; some minutes
python benchmarks/plan.py --quick        anywhere: tiny models, planned alone, which measures nothing
python benchmarks/plan.py --planned-only --json plans.json    anywhere; then, on a GPU of that size, what was planned:
python benchmarks/plan.py --plans plans.json --only largest   batches and contexts just within an H200
python benchmarks/plan.py --only Llama   models of transformers: needs lockstep-train[text], and no weights
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import report
import torch
import yaml
from gpt_sizes import size_of, text_bytes

from lockstep.errors import LockstepError
from lockstep.planner.devices import target
from lockstep.planner.plan import traced

TASKS = Path(__file__).with_name("plan_task.py")
GIB = 2**30
BEGAN = time.monotonic()
STEPS = 4
SPARE = 1.4  # of what is planned: what the allocator keeps for itself, and a plan that is wrong
MOST_WRONG = 0.10

IMAGES = {"image_size": 224, "examples": 512}
TINY_IMAGES = {"image_size": 32, "examples": 64, "classes": 10}
FSDP = {"strategy": "fsdp"}
BY_BLOCKS = {"compile": "blocks"}
AGAIN = {"activation_checkpointing": "blocks"}
OFFLOAD = {"strategy": {"type": "fsdp", "offload": True}}
LORA = {"dtype": "bf16", "lora": {"r": 16}}
LLAMA = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
         "intermediate_size": 8192, "vocab_size": 32000}  # fmt: skip
TINY_LLAMA = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
              "intermediate_size": 64, "vocab_size": 256}  # fmt: skip


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    train: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    task: dict[str, Any] = field(default_factory=dict)
    steps: int = STEPS


CASES = [
    Case("GPT 124 M, batch 32", "124m", {"batch_size": 32}),
    Case("GPT 124 M, batch 96", "124m", {"batch_size": 96}),
    Case("GPT 124 M, batch 32 in 4 parts", "124m", {"batch_size": 32, "accumulate": 4}),
    Case("GPT 124 M, batch 16, float32", "124m", {"batch_size": 16, "precision": "float32"}),
    Case("GPT 124 M, batch 32, average of weights", "124m", {"batch_size": 32, "ema": {"decay": 0.999}}),
    Case("GPT 124 M, batch 32, compile", "124m", {"batch_size": 32, "compile": True}),
    Case("GPT 124 M, batch 96, compile", "124m", {"batch_size": 96, "compile": True}),
    Case("GPT 124 M, batch 64 in 2 parts, compile", "124m", {"batch_size": 64, "accumulate": 2, "compile": True}),
    Case("GPT 124 M, batch 32, activation checkpointing", "124m", {"batch_size": 32, **AGAIN}),
    Case("GPT 1.3 B, batch 16", "1.3b", {"batch_size": 16}),
    Case("GPT 1.3 B, batch 16, activation checkpointing", "1.3b", {"batch_size": 16, **AGAIN}),
    Case("GPT 1.3 B, batch 8, compile: blocks", "1.3b", {"batch_size": 8, **BY_BLOCKS}),
    Case("GPT 1.3 B, batch 32, fsdp, activation checkpointing, compile: blocks", "1.3b",
         {"batch_size": 32, **AGAIN, **BY_BLOCKS}, FSDP),
    Case("GPT 1.3 B, batch 16, fsdp, param_dtype: bf16", "1.3b", {"batch_size": 16},
         {"strategy": {"type": "fsdp", "param_dtype": "bf16"}}),
    Case("GPT 1.3 B, batch 16, fsdp, offload", "1.3b", {"batch_size": 16}, OFFLOAD),
    Case("Llama 1.1 B of transformers, batch 8 x 2048", "llama", {"batch_size": 8}),
    Case("Llama 1.1 B of transformers, batch 8 x 2048, LoRA", "llama", {"batch_size": 8}, task=LORA),
    Case("ResNet-50, batch 128, float32", "resnet", {"batch_size": 128, "precision": "float32"}),
    Case("ResNet-50, batch 256", "resnet", {"batch_size": 256}),
    Case("ResNet-50, batch 128, compile", "resnet", {"batch_size": 128, "compile": True}),
    Case("ResNet-50, batch 256 in 4 parts", "resnet", {"batch_size": 256, "accumulate": 4}),
]  # fmt: skip

# As many as `lockstep plan` says that an H200 holds of the large model (a percent fewer in parts), and 3 % more.
LARGEST = [
    ("batch", 55, {}, {}, {}),
    ("batch", 57, {}, {}, {}),
    ("context", 55, {}, {}, {}),
    ("context", 57, {}, {}, {}),
    ("batch", 182, AGAIN, {}, {}),
    ("batch", 188, AGAIN, {}, {}),
    ("batch", 440, AGAIN, {}, {"parts": True}),
    ("batch", 490, AGAIN, OFFLOAD, {"parts": True}),
    ("context", 176, AGAIN, {}, {}),
    ("batch", 460, AGAIN, {}, {"parts": True}),
]


def largest(what: str, count: int, train: dict[str, Any], settings: dict[str, Any], task: dict[str, Any]) -> Case:
    ways = ["activation_checkpointing"] * bool(train) + ["loss in parts"] * bool(task) + ["offload"] * bool(settings)
    size = {"batch_size": count if what == "batch" else 1, **train}
    length = {} if what == "batch" else {"context": count * 1024}
    text = f"batch {count}" if what == "batch" else f"context {count} x 1024"
    name = ", ".join([f"largest: GPT 1.3 B, {text}", *ways])
    return Case(name, "1.3b", size, settings, {"short": True, **length, **task}, steps=2)


CASES += [largest(*each) for each in LARGEST]


def main() -> None:
    parser = report.options(__doc__, repeats=1)
    parser.add_argument("--at-once", type=int, default=1, help="cases side by side; their memory is counted apart")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="cases with one of these in their name")
    parser.add_argument("--plans", type=Path, help="plans made before, as --planned-only --json writes them")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no case begins")
    parser.add_argument("--planned-only", action="store_true", help="plan, and measure nothing")
    chosen = report.parse(parser)
    cases = [each for each in CASES if not chosen.only or any(text in each.name for text in chosen.only)]
    measures = torch.cuda.is_available() and not chosen.quick and not chosen.planned_only
    device, size = gpu() if measures else ("no GPU: planned alone", 0)
    room = Room(size) if measures else None
    with tempfile.TemporaryDirectory(prefix="plan-") as folder, ThreadPoolExecutor(chosen.at_once) as pool:
        found = list(pool.map(lambda each: compared(each, Path(folder), chosen, room), cases))
    header = ["", "measured", "planned", "", "traced in"]
    text = report.table(header, [cells(case, each) for case, each in zip(cases, found, strict=True)])
    wrong = [abs(each["planned"] / each["measured"] - 1) for each in found if "measured" in each]
    if wrong:
        text += f"\n\nOn one {device}: at most {max(wrong):.1%} off, in the mean {sum(wrong) / len(wrong):.1%}."
    raw = {"device": device, "cases": {case.name: each for case, each in zip(cases, found, strict=True)}}
    report.publish(text, raw, chosen.json)
    sys.exit(1 if any(each > MOST_WRONG for each in wrong) or any("failed" in each for each in found) else 0)


def gpu() -> tuple[str, int]:
    """Its name and memory, by the driver: asking torch would take some of that memory."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    name, size = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].split(", ")
    return name, int(size) * 2**20


def cells(case: Case, found: dict[str, Any]) -> list[str]:
    if "failed" in found:
        return [case.name, found["failed"].strip().splitlines()[-1][:80], "-", "-", "-"]
    planned = f"{found['planned'] / GIB:.2f} GiB"
    if "measured" not in found:
        return [case.name, "-", planned, "-", f"{found['seconds']:.0f} s"]
    off = found["planned"] / found["measured"] - 1
    return [case.name, f"{found['measured'] / GIB:.2f} GiB", planned, f"{off:+.1%}", f"{found['seconds']:.0f} s"]


class Room:
    """The memory of the GPU, for cases that run side by side."""

    def __init__(self, size: int) -> None:
        self._free, self._size, self._changed = size, size, threading.Condition()

    @contextlib.contextmanager
    def taken(self, size: float) -> Iterator[None]:
        wanted = min(int(size), self._size)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= wanted)
            self._free -= wanted
        try:
            yield
        finally:
            with self._changed:
                self._free += wanted
                self._changed.notify_all()


def compared(case: Case, folder: Path, chosen: argparse.Namespace, room: Room | None) -> dict[str, Any]:
    if time.monotonic() - BEGAN > chosen.seconds:
        return {"failed": "left out: no time"}
    own = folder / case.name.replace(" ", "-").replace(":", "").replace(",", "")
    own.mkdir()
    found: dict[str, Any] = {}
    try:
        plans = json.loads(chosen.plans.read_text(encoding="utf-8"))["cases"] if chosen.plans else {}
        found = plans.get(case.name) or planned(case, own, chosen.quick)
        if room is not None:
            with room.taken(found["planned"] * SPARE + GIB):
                found = {**found, **measured(case, own)}
    except report.MeasurementFailed as failure:  # the others are worth having
        found = {**found, "failed": str(failure)}
    print(f"{time.monotonic() - BEGAN:.0f} s: {case.name}: {found}"[:1500], file=sys.stderr, flush=True)
    if chosen.json:
        with chosen.json.with_suffix(".lines").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({case.name: found}) + "\n")
    return found


def planned(case: Case, folder: Path, tiny: bool) -> dict[str, Any]:
    config = written(case, folder / "planned.yaml", tiny, notes="")
    try:
        step = traced(config, [], target("h200"))
    except LockstepError as error:
        raise report.MeasurementFailed(str(error)) from None
    return {"planned": step.peak, "seconds": step.seconds, "by_kind": step.by_kind}


def measured(case: Case, folder: Path) -> dict[str, Any]:
    """Trains in a process that is forked from one with torch in it: a start takes a second instead of ten."""
    notes = folder / "notes.json"
    config = written(case, folder / "measured.yaml", tiny=False, notes=str(notes))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "lockstep", "plan_task"])
    process = context.Process(target=train, args=(config, folder))
    process.start()
    process.join(500)
    process.kill()
    said = json.loads(notes.read_text(encoding="utf-8")) if notes.exists() else {}
    if not said.get("complete"):
        failure = folder / "failure"
        raise report.MeasurementFailed(failure.read_text(encoding="utf-8") if failure.exists() else "killed")
    return {"measured": said["peak"], "reserved": said["reserved"], "used": said["used"]}


def train(config: Path, folder: Path) -> None:
    import lockstep

    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        lockstep.train(config, out=folder / "run")
    except BaseException as failure:
        (folder / "failure").write_text(f"{type(failure).__name__}: {failure}"[:3000], encoding="utf-8")


def written(case: Case, file: Path, tiny: bool, notes: str) -> Path:
    batches = case.steps * case.train.get("accumulate", 1)
    config = {
        "task": {
            "notes": notes,
            "batches": batches,
            **task_of(case, file.parent, tiny),
        },
        "runtime": "cuda",
        "processes": 1,
        "launch": {"threads": 2},  # several at once share the cores
        "train": {"precision": "bf16", "steps": 100, **case.train, **({"batch_size": 16} if tiny else {})},
        "data": {"drop_last": True},
        "checkpoint": {"every": None},
        **({"optimizer": {"type": "torch.optim.SGD", "lr": 0.02, "momentum": 0.9}} if case.model == "resnet" else {}),
        **case.settings,
    }
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return file


def task_of(case: Case, folder: Path, tiny: bool) -> dict[str, Any]:
    if case.model == "resnet":
        return {"type": f"{TASKS}:Images", **(TINY_IMAGES if tiny else IMAGES)}
    if case.model == "llama":
        shape = folder / "config.json"
        shape.write_text(json.dumps({"model_type": "llama", **(TINY_LLAMA if tiny else LLAMA)}), encoding="utf-8")
        return {"type": f"{TASKS}:Llama", "folder": str(shape), "max_length": 16 if tiny else 2048, **case.task}
    size = {**size_of("small" if case.model == "124m" else "large", tiny), "max_bytes": text_bytes(tiny), "lr": 6e-4}
    return {"type": f"{TASKS}:Text", **size, **({} if tiny else case.task)}


if __name__ == "__main__":
    main()
