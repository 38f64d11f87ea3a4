"""GPT-2 (124 million parameters) on one GPU: step time under each framework, and what Lockstep has to keep there.

python benchmarks/gpu.py --out FILE      on a machine with an NVIDIA GPU; about five minutes
python benchmarks/gpu.py --tiny          anywhere: the same code with a tiny model on the CPU, which measures nothing
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
import torch
import yaml

TASK = Path(__file__).with_name("gpu_task.py")
GPT2 = {"layers": 12, "heads": 12, "width": 768, "context": 1024, "vocab": 50304, "max_bytes": 4_000_000, "lr": 6e-4}
TINY = {"layers": 1, "heads": 2, "width": 16, "context": 16, "vocab": 256, "max_bytes": 20_000, "lr": 1e-3}
BLOCK = 30  # steps between two looks at the clock, as in gpu_task.py: three rows of Lockstep's log

NAMES = {
    "plain-eager": "plain PyTorch, eager",
    "plain-compiled": "plain PyTorch, compiled",
    "accelerate-compiled": "Accelerate, compiled",
    "lockstep-eager": "Lockstep Trainer, eager",
    "lockstep-compiled": "Lockstep Trainer, compiled",
}

NOTES = """\
bf16 autocast, fused AdamW, no clipping, {batch} x {context} tokens per step. The median over blocks of 30 steps, the
device waited for at each end, after {warm_up} steps to warm up. Plain and Accelerate load with torch's `DataLoader`
(pinned memory) and log nothing; Lockstep logs every 10 steps, its default. The ceiling, {ceiling:.0f} TFLOP/s, was
measured just before with bf16 matrices of {side} x {side}; a token is counted as 6 x parameters + 12 x layers x width x
context operations."""


def main() -> None:
    parser = report.options(__doc__, repeats=1)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, to prove the code")
    parser.add_argument("--only", nargs="+", choices=list(NAMES), help="measure these alone")
    parser.add_argument("--out", type=Path, help="write what is printed there as well")
    parser.add_argument("--child", nargs=2, metavar=("NAME", "FILE"), help=argparse.SUPPRESS)
    chosen = report.parse(parser)
    chosen.tiny = chosen.tiny or chosen.quick
    if chosen.child:
        name, file = chosen.child
        CHILDREN[name](chosen.tiny, file)
        return
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        speed, raw = compare(chosen, Path(folder))
        checks = [resume_check(chosen.tiny, Path(folder)), digits_check(chosen.tiny, Path(folder))]
    device = "a tiny model on the CPU" if chosen.tiny else torch.cuda.get_device_name()
    verdicts = "\n".join(f"- {text}" for _, text in checks)
    text = f"On {device}:\n\n{speed}\n\n{verdicts}"
    report.publish(text, {"device": device, "seconds": time.monotonic() - began, **raw}, chosen.json)
    if chosen.out:
        chosen.out.write_text(f"{text}\n\n{report.provenance()}\n", encoding="utf-8")
    sys.exit(0 if all(good for good, _ in checks) else 1)


# Speed


def compare(chosen: argparse.Namespace, folder: Path) -> tuple[str, dict[str, Any]]:
    """The table of step times, and everything that was measured for it."""
    tiny = chosen.tiny
    ceiling = in_child("ceiling", tiny, folder)
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    names = [name for name in NAMES if not name.startswith("accelerate") or report.installed("accelerate")]
    names = [name for name in names if not chosen.only or name in chosen.only]
    for name in report.interleaved(names, chosen):
        try:
            found[name].append(
                trained_by_lockstep(name, tiny, folder) if "lockstep" in name else in_child(name, tiny, folder)
            )
        except report.MeasurementFailed as failure:  # the others are worth having
            print(f"{name} failed: {failure}", file=sys.stderr)
    header = ["", "step", "tokens/s", "of the ceiling", "peak memory"]
    rows = [[NAMES[name], *cells(found[name], tiny, ceiling["ceiling"])] for name in names]
    size = size_of(tiny)
    notes = NOTES.format(warm_up=steps_of(tiny)[0], context=size["context"], batch=batch_size(tiny), **ceiling)
    return f"{report.table(header, rows)}\n\n{notes}", {"ceiling": ceiling, "found": found}


def cells(found: list[dict[str, Any]], tiny: bool, ceiling: float) -> list[str]:
    if not found:
        return ["failed", "-", "-", "-"]
    size, tokens = size_of(tiny), batch_size(tiny) * size_of(tiny)["context"]
    stamps = [each["stamps"][steps_of(tiny)[0] // BLOCK :] for each in found]
    blocks = [(after - before) / BLOCK for each in stamps for before, after in itertools.pairwise(each)]
    step = statistics.median(blocks)
    parameters = 12 * size["layers"] * size["width"] ** 2 + size["vocab"] * size["width"]
    operations = 6 * parameters + 12 * size["layers"] * size["width"] * size["context"]
    share = tokens * operations / step / (ceiling * 1e12)
    peak = max(each["peak"] for each in found)
    return [f"{step * 1e3:.1f} ms", f"{tokens / step / 1e3:.0f} k", f"{share:.0%}", f"{peak / 2**30:.1f} GiB"]


def size_of(tiny: bool) -> dict[str, Any]:
    return TINY if tiny else GPT2


def batch_size(tiny: bool) -> int:
    return 4 if tiny else 32


def steps_of(tiny: bool) -> tuple[int, int]:
    """Steps to warm up, and steps to measure."""
    return (30, 30) if tiny else (30, 90)


def in_child(name: str, tiny: bool, folder: Path) -> dict[str, Any]:
    file = folder / f"{name}.json"
    command = [sys.executable, __file__, "--child", name, str(file), *(["--tiny"] if tiny else [])]
    report.run(command, limit=400)
    return dict(json.loads(file.read_text(encoding="utf-8")))


def trained_by_lockstep(name: str, tiny: bool, folder: Path) -> dict[str, Any]:
    stamps = folder / f"{name}.json"
    steps = sum(steps_of(tiny))
    task = {"steps": steps, "stamps": str(stamps), **size_of(tiny)}
    training = {"steps": steps + 1, "compile": name.endswith("compiled"), "batch_size": batch_size(tiny)}
    run = lockstep_train(name, tiny, folder, {"type": f"{TASK}:TimedText", **task}, training)
    shutil.rmtree(run / "checkpoints")
    return dict(json.loads(stamps.read_text(encoding="utf-8")))


def lockstep_train(
    name: str, tiny: bool, folder: Path, task: dict[str, Any], training: dict[str, Any], **settings: Any
) -> Path:
    """Train through the command line; the run's folder."""
    config = {
        "task": task,
        "runtime": "cpu" if tiny else "cuda",
        "processes": 1,
        "train": {"precision": "bf16", **training},
        "data": {"pin_memory": not tiny, "drop_last": True},
        "checkpoint": {"every": None},
        **settings,
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    report.run([*report.lockstep(), "train", str(file), f"--out={folder / name}"], limit=400)
    return max((folder / name).iterdir())


# What has to hold


def resume_check(tiny: bool, folder: Path) -> tuple[bool, str]:
    """Train 20 steps; go on from the checkpoint of step 10 in a copy of the folder; the losses must be the same."""
    task = {"type": f"{TASK}:TimedText", "deterministic": True, **size_of(tiny)}
    training = {"steps": 20, "batch_size": 4 if tiny else 8}
    settings = {"checkpoint": {"every": "10 steps", "keep": {"last": 2}}, "log": {"every": "1 step"}}
    try:
        first = lockstep_train("resume", tiny, folder, task, training, **settings)
        copy = first.with_name("copy")
        shutil.copytree(first, copy)
        shutil.rmtree(copy / "checkpoints" / "step-00000020")
        report.run([*report.lockstep(), "resume", str(copy)], limit=400)
    except report.MeasurementFailed as failure:
        return False, f"save and resume: failed\n\n```\n{failure}\n```"
    before, after = losses(first), losses(copy)
    furthest = max(abs(before[step] - after[step]) for step in range(11, 21))
    same = "bit for bit the same" if furthest == 0 else f"DIFFERENT, by up to {furthest:g}"
    return furthest == 0, f"resumed from the checkpoint of step 10: the losses of steps 11 to 20 are {same}"


def losses(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {row["step"]: row["train/loss"] for row in rows if "examples_per_second" in row}


def digits_check(tiny: bool, folder: Path) -> tuple[bool, str]:
    """A small network in bf16 must learn."""
    training = {"epochs": 5, "batch_size": 64}
    settings = {"data": {"split": {"train": 0.8, "val": 0.2}}}
    try:
        run = lockstep_train("digits", tiny, folder, {"type": f"{TASK}:NoisyDigits"}, training, **settings)
    except report.MeasurementFailed as failure:
        return False, f"noisy digits: failed\n\n```\n{failure}\n```"
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    accuracy = summary["metrics"]["val/accuracy"]
    return (
        accuracy > 0.9,
        f"noisy digits, bf16, on {summary['runtime']}: validation accuracy {accuracy:.3f} after 5 epochs",
    )


# In a child process


def measure_ceiling(tiny: bool, file: str) -> None:
    """The fastest that this device multiplies large bf16 matrices."""
    side, device = (256, "cpu") if tiny else (8192, "cuda")
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))

    def block() -> float:
        began = time.perf_counter()
        for _ in range(20):
            left @ right
        if not tiny:
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / 20

    block()
    best = min(block() for _ in range(10))
    Path(file).write_text(json.dumps({"ceiling": 2 * side**3 / best / 1e12, "side": side}), encoding="utf-8")


def plain(compiled: bool) -> Callable[[bool, str], None]:
    def train(tiny: bool, file: str) -> None:
        task, loader = _task_and_loader(tiny, file)
        device = torch.device("cpu" if tiny else "cuda")
        model = task.model().to(device)
        optimizer = task.optimizer(model)
        if compiled:
            model.compile()
        for batch in itertools.islice(loader, task.steps + 1):
            on_device = [each.to(device, non_blocking=True) for each in batch]
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = task.loss(model, on_device)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


def accelerate_compiled(tiny: bool, file: str) -> None:
    from accelerate import Accelerator

    task, loader = _task_and_loader(tiny, file)
    accelerator = Accelerator(cpu=tiny, mixed_precision="bf16", dynamo_backend="inductor")
    model = task.model()
    model, optimizer, loader = accelerator.prepare(model, task.optimizer(model), loader)
    for batch in itertools.islice(loader, task.steps + 1):
        accelerator.backward(task.loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()


def _task_and_loader(tiny: bool, file: str) -> tuple[Any, Any]:
    from gpu_task import TimedText
    from torch.utils.data import DataLoader

    torch.manual_seed(0)
    task = TimedText(steps=sum(steps_of(tiny)), stamps=file, **size_of(tiny))
    data = task.train_data()
    return task, DataLoader(data, batch_size(tiny), shuffle=True, drop_last=True, pin_memory=not tiny)


CHILDREN = {
    "ceiling": measure_ceiling,
    "plain-eager": plain(compiled=False),
    "plain-compiled": plain(compiled=True),
    "accelerate-compiled": accelerate_compiled,
}

if __name__ == "__main__":
    main()
