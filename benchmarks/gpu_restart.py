"""From the SIGKILL of a training process to its next step, with compiled code at hand: Lockstep beside torchrun.

python benchmarks/gpu_restart.py --out FILE    on a machine with an NVIDIA GPU; about four minutes
python benchmarks/gpu_restart.py --tiny        anywhere: a tiny model on the CPU, not compiled

Both train the GPT of 124 million parameters on one GPU, save every 10 steps and are killed after step 25. torchrun's
script writes with torch.save and reads what it wrote, as one writes it by hand.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import report
import yaml
from gpt_sizes import size_of, text_bytes

EVERY, KILLED_AFTER, STEPS = 10, 25, 60
LIMIT = 300.0
NAMES = {"lockstep": "Lockstep, `launch.max_restarts: 1`", "torchrun": "torchrun, `--max-restarts=1`"}


def main() -> None:
    parser = report.options(__doc__, repeats=2)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, to prove the code")
    parser.add_argument("--out", type=Path, help="write what is printed there as well")
    parser.add_argument("--script", nargs=2, metavar=("FOLDER", "SIZE"), help=argparse.SUPPRESS)
    chosen = report.parse(parser)
    chosen.tiny = chosen.tiny or chosen.quick
    if chosen.script:
        by_hand(Path(chosen.script[0]), chosen.script[1] == "tiny")
        return
    found: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="gpu-restart-") as folder:
        for number, name in enumerate(report.interleaved(list(NAMES), chosen)):
            place = Path(folder) / f"{number}-{name}"
            place.mkdir()
            found[name].append(seconds_to_the_next_step(name, place, chosen.tiny))
    best = statistics.median(found["torchrun"])
    rows = [[NAMES[name], f"{statistics.median(each):.1f} s", f"{statistics.median(each) / best:.2f}"]
            for name, each in sorted(found.items())]  # fmt: skip
    text = report.table(["", "SIGKILL to the next step", "of torchrun"], rows)
    report.publish(text, {"found": found}, chosen.json)
    if chosen.out:
        chosen.out.write_text(f"{text}\n\n{report.provenance()}\n", encoding="utf-8")


def seconds_to_the_next_step(name: str, folder: Path, tiny: bool) -> float:
    stamps = folder / "stamps.jsonl"
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            command(name, folder, tiny), stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder.parent / f"cache-{name}")},
        )  # fmt: skip
    try:
        victim = awaited(stamps, lambda each: each["step"] >= KILLED_AFTER, process, folder)
        os.kill(victim["pid"], signal.SIGKILL)
        killed = time.time()
        after = awaited(stamps, lambda each: each["pid"] != victim["pid"], process, folder)
        return float(after["time"] - killed)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def awaited(stamps: Path, wanted: Any, process: subprocess.Popen[bytes], folder: Path) -> dict[str, Any]:
    """The first step that was wanted, once it is noted."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        lines = stamps.read_text(encoding="utf-8").splitlines(keepends=True) if stamps.exists() else []
        noted = (json.loads(line) for line in lines if line.endswith("\n"))
        if found := next(filter(wanted, noted), None):
            return dict(found)
        if process.poll() is not None:
            break
        time.sleep(0.02)
    raise report.MeasurementFailed((folder / "output.txt").read_text(encoding="utf-8", errors="replace")[-4000:])


def command(name: str, folder: Path, tiny: bool) -> list[str]:
    if name == "torchrun":
        script = [__file__, "--script", str(folder), "tiny" if tiny else "whole"]
        return [*report.torchrun(1), "--max-restarts=1", *script]
    config = {
        "task": {
            "type": f"{Path(__file__).with_name('gpu_task.py')}:NotedText",
            "file": str(folder / "stamps.jsonl"),
            **size_of("small", tiny),
            "max_bytes": text_bytes(tiny),
        },
        "runtime": "cpu" if tiny else "cuda",
        "processes": 1,
        "train": {"steps": STEPS, "batch_size": 4 if tiny else 32, "precision": "bf16", "compile": not tiny},
        "data": {"drop_last": True},
        "checkpoint": {"every": f"{EVERY} steps"},
        "launch": {"max_restarts": 1},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return [*report.lockstep(), "train", str(folder / "config.yaml"), f"--out={folder / 'runs'}"]


def by_hand(folder: Path, tiny: bool) -> None:
    """A script for torchrun: the newest file of its own is where it goes on."""
    import torch
    from gpu_task import NotedText
    from torch.utils.data import DataLoader

    torch.manual_seed(0)
    device = torch.device("cpu" if tiny else "cuda")
    task = NotedText(file=str(folder / "stamps.jsonl"), **size_of("small", tiny), max_bytes=text_bytes(tiny))
    model = task.model().to(device)
    optimizer = task.optimizer(model)
    saved, step = folder / "checkpoint.pt", 0
    if saved.exists():
        state = torch.load(saved, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    if not tiny:
        model.compile()
    loader = DataLoader(task.train_data(), 4 if tiny else 32, shuffle=True, drop_last=True)
    for batch in itertools.islice(itertools.cycle(loader), STEPS - step):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = task.loss(model, [each.to(device) for each in batch])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)


if __name__ == "__main__":
    main()
