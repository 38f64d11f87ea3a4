"""What each way of making a step faster brings by itself: a plain loop over a GPT on one GPU, one change at a time.

python benchmarks/gpu_speed.py --out FILE            on a machine with an NVIDIA GPU of 80 GB or more; about ten minutes
python benchmarks/gpu_speed.py --only large          the larger model alone; names of variants as well
python benchmarks/gpu_speed.py --tiny                anywhere: tiny models on the CPU, to prove the code

The first step is timed twice, in two processes: with an empty cache of compiled code, and with what the first one left.
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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import report
from gpt_sizes import size_of, text_bytes


@dataclass(frozen=True)
class Variant:
    """A plain loop with some of its parts exchanged."""

    name: str
    model: str  # small or large
    compile: str = "whole"  # none, whole, blocks (each by itself), regions (one program, blocks compiled once)
    options: dict[str, Any] = field(default_factory=dict)  # of torch's compiler
    optimizer: str = "fused"  # fused, foreach, or compiled
    loss: str = "logits"  # or parts: never all logits at once
    float8: str = ""  # a recipe of torchao's
    graphs: bool = False
    clip: bool = True
    steps: int = 120


AUTOTUNE = {"max_autotune": True, "coordinate_descent_tuning": True, "epilogue_fusion": True}
VARIANTS = [
    Variant("plain", "small"),
    Variant("without clipping", "small", clip=False),
    Variant("foreach", "small", optimizer="foreach"),
    Variant("compiled optimizer", "small", optimizer="compiled"),
    Variant("blocks", "small", "blocks"),
    Variant("regions", "small", "regions"),
    Variant("loss in parts", "small", loss="parts"),
    Variant("coordinate descent", "small", options={"coordinate_descent_tuning": True}),
    Variant("max-autotune", "small", options=AUTOTUNE),
    Variant("graphs", "small", graphs=True),
    Variant("float8", "small", float8="tensorwise"),
    Variant("plain", "large", steps=40),
    Variant("loss in parts", "large", loss="parts", steps=40),
    Variant("regions", "large", "regions", steps=40),
    Variant("float8", "large", float8="tensorwise", steps=40),
    Variant("float8 by rows", "large", float8="rowwise", steps=40),
    Variant("float8, max-autotune", "large", options=AUTOTUNE, float8="tensorwise", steps=40),
]

NOTES = """\
bf16 autocast, AdamW, gradients clipped to a norm of 1 unless it says otherwise, {small} x 1024 tokens per step for the
small model (124 million parameters), {large} x 1024 for the large one (1.3 billion). The median over blocks of 10 steps
after the first two, the device waited for at each end. First steps are from the beginning of the process to the end of
its first step, imports included: cold with an empty cache of compiled code, warm in a second process with the same."""


def main() -> None:
    parser = report.options(__doc__, repeats=1)
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU, to prove the code")
    parser.add_argument("--only", nargs="+", help="small, large, or names of variants")
    parser.add_argument("--out", type=Path, help="write what is printed there as well")
    parser.add_argument("--limit", type=float, default=240, help="seconds that one process may take")
    parser.add_argument("--child", nargs=2, metavar=("VARIANT", "FILE"), help=argparse.SUPPRESS)
    chosen = report.parse(parser)
    chosen.tiny = chosen.tiny or chosen.quick
    if chosen.child:
        train(VARIANTS[int(chosen.child[0])], Path(chosen.child[1]), chosen.tiny)
        return
    began = time.monotonic()
    wanted = [each for each in VARIANTS if not chosen.only or {each.model, each.name} & set(chosen.only)]
    if chosen.tiny and not chosen.only:  # compiling for a CPU takes long, and proves as much with two
        wanted = [each for each in wanted if each.model == "small" and each.name in ("plain", "loss in parts")]
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="gpu-speed-") as folder:
        for index in report.interleaved([VARIANTS.index(each) for each in wanted], chosen):
            each = VARIANTS[index]
            found[f"{each.model}: {each.name}"] = measured(index, Path(folder), chosen)
    text = shown(wanted, found, chosen.tiny)
    report.publish(text, {"seconds": time.monotonic() - began, "found": found}, chosen.json)
    if chosen.out:
        chosen.out.write_text(f"{text}\n\n{report.provenance()}\n", encoding="utf-8")


def measured(index: int, folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """One variant, in two processes; one that fails says why in its row: the others are worth having."""
    cache = folder / f"cache-{index}"
    runs = []
    for attempt in ("cold", "warm"):
        file = folder / f"{index}-{attempt}.json"
        tiny = ["--tiny"] if chosen.tiny else []
        try:
            report.run(
                [sys.executable, __file__, "--child", str(index), str(file), *tiny], limit=chosen.limit,
                TORCHINDUCTOR_CACHE_DIR=str(cache), TRITON_CACHE_DIR=str(cache / "triton"),
                LOCKSTEP_BENCH_BEGAN=str(time.time()),
            )  # fmt: skip
        except report.MeasurementFailed as failure:
            print(f"{VARIANTS[index].name} failed: {failure}", file=sys.stderr, flush=True)
            return {"failed": str(failure).strip().splitlines()[-1][:100]}
        runs.append(json.loads(file.read_text(encoding="utf-8")))
    return {**runs[1], "cold": runs[0]["first"], "warm": runs[1]["first"]}


def shown(variants: list[Variant], found: dict[str, dict[str, Any]], tiny: bool) -> str:
    header = ["", "step", "of plain", "peak memory", "first step, cold", "warm", "loss at the end"]
    parts = []
    for model, title in (("small", "124 million parameters"), ("large", "1.3 billion parameters")):
        plain = found.get(f"{model}: plain", {}).get("step")
        rows = [[each.name, *cells(found[f"{model}: {each.name}"], plain)] for each in variants if each.model == model]
        if rows:
            parts.append(f"{title}:\n\n{report.table(header, rows)}")
    parts.append(NOTES.format(small=batch_size("small", tiny), large=batch_size("large", tiny)))
    return "\n\n".join(parts)


def cells(found: dict[str, Any], plain: float | None) -> list[str]:
    if "failed" in found:
        return [found["failed"], *["-"] * 5]
    return [
        f"{found['step'] * 1e3:.1f} ms", f"{found['step'] / plain:.3f}" if plain else "-",
        f"{found['peak'] / 2**30:.1f} GiB", f"{found['cold']:.1f} s", f"{found['warm']:.1f} s", f"{found['loss']:.4f}",
    ]  # fmt: skip


def batch_size(model: str, tiny: bool) -> int:
    return 4 if tiny else 32 if model == "small" else 16


# In a child process


def train(variant: Variant, file: Path, tiny: bool) -> None:
    import torch

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    from gpt import TextModel

    device = torch.device("cpu" if tiny else "cuda")
    torch.manual_seed(0)
    size = size_of(variant.model, tiny)
    task = TextModel(**size, max_bytes=text_bytes(tiny), lr=2e-4)
    with device:
        model = task.model()
    if variant.float8:
        use_float8(model, variant.float8, tiny)
    step = make_step(variant, task, model)
    data = task.train_data().tensors[0]
    count, batch = 12 if tiny else variant.steps, batch_size(variant.model, tiny)
    stamps, first, loss = [], 0.0, torch.zeros(())
    for number in range(count):
        if number == 1:
            wait(device)
            first = time.time() - float(os.environ["LOCKSTEP_BENCH_BEGAN"])
        if number >= 2 and (number - 2) % 10 == 0:
            wait(device)
            stamps.append(time.perf_counter())
        rows = torch.arange(number * batch, (number + 1) * batch) % len(data)
        loss = step(data[rows].to(device, non_blocking=True))
    wait(device)
    stamps.append(time.perf_counter())
    times = [(after - before) / 10 for before, after in itertools.pairwise(stamps[:-1])] or [0.0]
    peak = 0 if tiny else torch.cuda.max_memory_allocated()
    result = {"step": statistics.median(times), "peak": peak, "first": first, "loss": float(loss)}
    file.write_text(json.dumps(result), encoding="utf-8")


def wait(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


def make_step(variant: Variant, task: Any, model: Any) -> Callable[[Any], Any]:
    """One step of training: what is exchanged by a variant is exchanged here."""
    import torch

    optimizer = task.optimizer(model)
    for group in optimizer.param_groups:
        group["fused"] = True if variant.optimizer == "fused" else None
        group["lr"] = torch.tensor(group["lr"]) if variant.optimizer == "compiled" else group["lr"]
    update = torch.compile(optimizer.step) if variant.optimizer == "compiled" else optimizer.step
    forward = compiled(variant, model, in_parts(model) if variant.loss == "parts" else model.forward)
    parameters = list(model.parameters())

    def step(windows: Any) -> Any:
        tokens = windows.long()
        if variant.graphs:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
            loss = forward(tokens[:, :-1], tokens[:, 1:]).mean()
        loss.backward()
        if variant.clip:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        update()
        optimizer.zero_grad()
        return loss.detach()

    return step


def compiled(variant: Variant, model: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    options = {**variant.options, **({"triton.cudagraphs": True} if variant.graphs else {})}
    if variant.compile == "none":
        return forward
    if variant.compile == "blocks":
        for block in model.blocks:
            block.forward = torch.compile(block.forward, options=options or None)
        return forward
    if variant.compile == "regions":
        block = type(model.blocks[0])
        block.forward = torch.compiler.nested_compile_region(block.forward)
    return torch.compile(forward, options=options or None)


def in_parts(model: Any) -> Callable[..., Any]:
    """The model's own forward, with the loss worked out without all logits in memory."""
    import torch

    import lockstep

    def forward(tokens: Any, targets: Any) -> Any:
        x = model.tokens(tokens) + model.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in model.blocks:
            x = block(x)
        return lockstep.nn.linear_cross_entropy(model.norm(x), model.head.weight, targets)

    return forward


def use_float8(model: Any, recipe: str, tiny: bool) -> None:
    from torch import nn
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=True) if tiny else Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: "blocks." in name and isinstance(module, nn.Linear)
    )


if __name__ == "__main__":
    main()
