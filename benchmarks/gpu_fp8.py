"""What `precision: fp8` gains, and what limits it: products, layers and one block of a GPT, by way of scaling.

python benchmarks/gpu_fp8.py --json FILE     on a machine with an NVIDIA GPU from Hopper on, and torchao; two minutes
python benchmarks/gpu_fp8.py --tiny          anywhere: tiny matrices on the CPU, which measures nothing

All parts compile at the same time, each in its own process, and are measured one after another. --json FILE is written
after every part.
"""

from __future__ import annotations

import argparse
import contextlib
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
import torch
import turns
from gpt_sizes import size_of
from torch import Tensor, nn

BLOCKS = [
    "bf16", "Lockstep", "Lockstep, fast backward", "Lockstep, without attention.out", "Lockstep, cast by inductor",
    "torchao", "torchao, fast backward", "torchao, rows", "torchao, rows, weight gradients in bf16",
    "torchao, tuned casts",
]  # fmt: skip
LAYERS = ["bf16", "Lockstep", "torchao"]
TOKENS = 16 * 1024
SIDES = [(768, 3072), (1024, 4096), (1536, 1536), (1536, 6144), (2048, 2048), (2048, 6144), (2048, 8192), (8192, 2048)]
HEAD = (2048, 50304)


def main() -> None:
    parser = report.options(__doc__, repeats=1)
    parser.add_argument("--tiny", action="store_true", help="tiny matrices on the CPU, to prove the code")
    parser.add_argument("--only", nargs="+", help="names of parts, as they are printed")
    parser.add_argument("--limit", type=float, default=200, help="seconds after which what is not measured is left out")
    parser.add_argument("--child", nargs=2, metavar=("PART", "FILE"), help=argparse.SUPPRESS)
    chosen = report.parse(parser)
    chosen.tiny = chosen.tiny or chosen.quick
    if chosen.child:
        part, file = chosen.child
        in_this_process(part, file, chosen.tiny)
        return
    names = [*(f"block: {each}" for each in BLOCKS), *(f"layers: {each}" for each in LAYERS), "products"]
    names = [each for each in chosen.only or names if not chosen.tiny or "torchao" not in each]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="gpu-fp8-") as folder:
        tiny = ["--tiny"] if chosen.tiny else []

        def command(name: str) -> list[str]:
            return [sys.executable, __file__, "--child", name, str(Path(folder) / f"{name}.json"), *tiny]

        for name, failure in turns.taken({name: command(name) for name in names}, Path(folder), chosen.limit):
            file = Path(folder) / f"{name}.json"
            found[name] = {"failed": failure} if failure else json.loads(file.read_text(encoding="utf-8"))
            print(f"{name}: {failure or found[name]}"[:3000], file=sys.stderr, flush=True)
            if chosen.json is not None:
                chosen.json.write_text(json.dumps(found), encoding="utf-8")
    report.publish(shown(found), {"found": found}, chosen.json)


def shown(found: dict[str, Any]) -> str:
    good = {name: each for name, each in found.items() if "failed" not in each}
    parts = []
    blocks = {name.removeprefix("block: "): each for name, each in good.items() if name.startswith("block: ")}
    if blocks:
        plain = blocks.get("bf16", {}).get("seconds")
        kinds = sorted({kind for each in blocks.values() for kind in each["kinds"]})
        rows = [
            [
                name, f"{each['seconds'] * 1e3:.2f} ms", f"{plain / each['seconds']:.2f}" if plain else "-",
                *(f"{each['kinds'].get(kind, 0) * 1e3:.2f}" for kind in kinds),
                *(f"{each['errors'][which]:.2%}" for which in ("output", "input", "weights")),
            ] for name, each in blocks.items()
        ]  # fmt: skip
        header = [
            "a block",
            "forward, backward",
            "times bf16",
            *kinds,
            "output off by",
            "gradient of input",
            "of weights",
        ]
        parts.append(report.table(header, rows))
    layers = {name.removeprefix("layers: "): each for name, each in good.items() if name.startswith("layers: ")}
    if "bf16" in layers:
        sides = list(layers["bf16"])
        rows = [
            [
                side,
                *(  # on a CPU there are no kernels to add up
                    f"{each[side] * 1e3:.3f} ms ({layers['bf16'][side] / (each[side] or 1):.2f})"
                    for each in layers.values()
                ),
            ]
            for side in sides
        ]
        parts.append(report.table(["a layer", *layers], rows))
    if "products" in good:
        header = ["a product", *next(iter(good["products"]["products"].values()))]
        rows = [[name, *(f"{each:.0f}" for each in row.values())] for name, row in good["products"]["products"].items()]
        parts.append(report.table(header, rows) + "\n\nTFLOP/s.")
        rows = [[name, f"{each:.2f}"] for name, each in good["products"]["casts"].items()]
        parts.append(report.table(["casting and transposing", "TB/s"], rows))
    return "\n\n".join(parts)


# In a child process


def in_this_process(name: str, file: str, tiny: bool) -> None:
    torch.manual_seed(0)
    kind, _, way = name.partition(": ")
    device = torch.device("cpu" if tiny else "cuda")
    result = {"block": block, "layers": layers, "products": products}[kind](way, device)
    Path(file).write_text(json.dumps(result), encoding="utf-8")
    turns.end(device)


def convert(model: nn.Module, way: str, device: torch.device) -> None:
    """Exchanges the linear layers of a module, in one of the ways that are compared."""
    if way == "bf16":
        return
    if way.startswith("torchao"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.config import Float8GemmConfig

        fast = Float8GemmConfig(use_fast_accum=True)
        config = (
            Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
            if "gradients in bf16" in way
            else Float8LinearConfig.from_recipe_name("rowwise")
            if "rows" in way
            else Float8LinearConfig(gemm_config_grad_input=fast, gemm_config_grad_weight=fast)
            if "fast" in way
            else Float8LinearConfig()
        )
        convert_to_float8_training(model, config=config)
        return
    from lockstep.strategy import float8

    float8._LEAST_WEIGHTS = 2048 * 2048 + 1 if "without" in way else 0
    if "fast backward" in way:
        multiply = float8._multiply
        float8._multiply = lambda *given, fast, **more: multiply(*given, fast=True, **more)
    if "inductor" in way:
        float8._is_on_one_gpu = lambda values: False
    float8.use_float8(nn.ModuleList([model]), None, device)


def block(way: str, device: torch.device) -> dict[str, Any]:
    """Forward and backward of one block of the 1.3 billion parameter model."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    from gpt import Block

    size, batch = size_of("large", device.type == "cpu"), 1 if device.type == "cpu" else 16
    with device:
        model = Block(size["width"], size["heads"])
        given = torch.randn(batch, size["context"], size["width"], requires_grad=True)
        slope = torch.randn(batch, size["context"], size["width"]) * 1e-4
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02 / (48**0.5 if name.endswith("out.weight") else 1))

    def step(forward: Callable[..., Any] = model) -> Tensor:
        model.zero_grad()
        given.grad = None
        with torch.autocast(device.type, dtype=torch.bfloat16):
            output = forward(given)
        output.backward(slope)
        return output.detach()

    def results() -> dict[str, Tensor]:
        output = step(current) - given.detach()
        assert given.grad is not None
        weights = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
        return {"output": output, "input": given.grad - slope, "weights": weights}

    current: Any = model
    wanted = results()
    convert(model, way, device)
    options: dict[str, Any] | None = {"max_autotune_pointwise": True} if "tuned" in way else None
    current = torch.compile(model, options=options)
    found = results()
    errors = {name: float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted}
    del found, wanted
    for _ in range(3):
        step(current)
    turns.begin(device)
    seconds = timed(lambda: step(current), device)
    kinds, kernels = profiled(lambda: step(current), device)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {"seconds": seconds, "kinds": kinds, "kernels": kernels, "errors": errors, "peak": peak}


def layers(way: str, device: torch.device) -> dict[str, float]:
    """Forward and backward of single layers."""
    tokens, made = (32, []) if device.type == "cpu" else (TOKENS, [])
    for wide, high in [(32, 64)] if device.type == "cpu" else SIDES:
        with device:
            model = nn.Sequential(nn.Linear(wide, high))
            given = torch.randn(tokens, wide, dtype=torch.bfloat16, requires_grad=True)
            slope = torch.randn(tokens, high, dtype=torch.bfloat16)
        convert(model, way, device)
        current = torch.compile(model, dynamic=False)

        def step(model: Any = model, current: Any = current, given: Tensor = given, slope: Tensor = slope) -> None:
            model.zero_grad()
            given.grad = None
            with torch.autocast(device.type, dtype=torch.bfloat16):
                output = current(given)
            output.backward(slope)

        step()
        step()
        made.append((f"{wide} to {high}", step))
    turns.begin(device)
    # Single layers are too short for the host to keep up with: kernels alone.
    return {name: sum(profiled(step, device)[0].values()) for name, step in made}


def products(_: str, device: torch.device) -> dict[str, Any]:
    """The matrix products of the layers by themselves, in TFLOP/s, and casting with transposing, in TB/s."""
    if device.type == "cpu":
        return {"products": {"none": {"bf16": 0.0}}, "casts": {}}
    shapes = {}
    for wide, high in [(2048, 2048), (2048, 6144), (2048, 8192), (8192, 2048), HEAD]:
        for text, shape in (
            ("forward", (TOKENS, wide, high)), ("input gradient", (TOKENS, high, wide)),
            ("weight gradient", (high, TOKENS, wide)),
        ):  # fmt: skip
            shapes[f"{wide} to {high}, {text}: {' x '.join(map(str, shape))}"] = shape
    found: dict[str, dict[str, float]] = {}
    turns.begin(device)
    for text, (high, inner, wide) in shapes.items():
        left = torch.randn(high, inner, device=device, dtype=torch.bfloat16)
        right = torch.randn(wide, inner, device=device, dtype=torch.bfloat16)
        left8, right8 = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=device)
        rows = (torch.ones(high, 1, device=device), torch.ones(1, wide, device=device))
        right = right.t()
        ways: dict[str, Callable[[], Any]] = {"bf16": lambda left=left, right=right: left @ right}
        for name, scales in (("fp8", (one, one)), ("fp8 by rows", rows)):
            for fast in (True, False):
                ways[f"{name}{', fast' if fast else ''}"] = lambda left=left8, right=right8, scales=scales, fast=fast: (
                    torch._scaled_mm(left, right, *scales, out_dtype=torch.bfloat16, use_fast_accum=fast)
                )
        found[text] = {}
        for name, way in ways.items():
            seconds = float("inf")
            with contextlib.suppress(RuntimeError):
                seconds = timed(way, device, 10)
            found[text][name] = 2 * high * inner * wide / seconds / 1e12
    return {"products": found, "casts": casts(device)}


def casts(device: torch.device) -> dict[str, float]:
    from lockstep.strategy import float8_kernel as kernel

    found = {}
    scale = torch.tensor(3.0, device=device)
    for width in (2048, 8192):
        given = torch.randn(TOKENS, width, device=device, dtype=torch.bfloat16)
        straight, transposed = kernel.cast_both(given, scale, torch.float8_e4m3fn)
        wanted = (given.float() * scale).to(torch.float8_e4m3fn)
        right = torch.equal(straight.view(torch.uint8), wanted.view(torch.uint8)) and torch.equal(
            transposed.view(torch.uint8), wanted.t().contiguous().view(torch.uint8)
        )
        for kernel._TILE_ROWS, kernel._TILE_COLUMNS, kernel._WARPS in (
            (64, 64, 4), (128, 64, 4), (64, 128, 4), (128, 128, 4), (128, 128, 8), (256, 64, 8), (64, 256, 8),
        ):  # fmt: skip
            seconds = timed(lambda given=given: kernel.cast_both(given, scale, torch.float8_e4m3fn), device, 20)
            text = f"{TOKENS} x {width}, tiles {kernel._TILE_ROWS} x {kernel._TILE_COLUMNS}, {kernel._WARPS} warps"
            found[f"{text}{'' if right else ', WRONG'}"] = given.numel() * 4 / seconds / 1e12
    return found


def timed(step: Callable[[], Any], device: torch.device, count: int = 20) -> float:
    """The median over five times so many steps, in seconds."""
    if device.type == "cpu":
        began = time.perf_counter()
        step()
        return time.perf_counter() - began
    for _ in range(3):
        step()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / count / 1e3)
    return statistics.median(times)


def profiled(step: Callable[[], Any], device: torch.device) -> tuple[dict[str, float], list[Any]]:
    """Seconds of kernels in a step, by kind and for the longest by name."""
    if device.type == "cpu":
        return {}, []
    from torch.profiler import ProfilerActivity, profile

    count = 5
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(count):
            step()
        torch.cuda.synchronize()
    kinds: dict[str, float] = defaultdict(float)
    kernels = []
    for each in profiler.key_averages():
        seconds = each.self_device_time_total / 1e6 / count
        kinds[kind_of(each.key)] += seconds
        kernels.append((each.key[:160], each.count / count, seconds))
    return dict(kinds), sorted(kernels, key=lambda each: -each[2])[:40]


def kind_of(kernel: str) -> str:
    low = kernel.lower()
    if (
        any(text in low for text in ("nvjet", "gemm", "cutlass", "cublas"))
        and "flash" not in low
        and "cudnn" not in low
    ):
        return "products"
    if any(text in low for text in ("cudnn", "flash", "fmha", "attention")):
        return "attention"
    return "the rest"


if __name__ == "__main__":
    main()
