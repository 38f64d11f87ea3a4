"""torchtitan's Llama 3 on one GPU: under torchtitan's own trainer and under `lockstep train`.

python benchmarks/gpu_titan.py --out FILE    on a machine with an NVIDIA GPU of 140 GB and torchtitan==0.2.2
python benchmarks/gpu_titan.py --only 1.5B   one of the two models
python benchmarks/gpu_titan.py --tiny        anywhere with torchtitan: a tiny model on the CPU, which measures nothing

All begin with the same weights, compile block by block and the loss, clip to a norm of 1 and log every 10 steps. Those
of the small model compile at the same time and are then measured alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import lockstep

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "examples"), str(Path(__file__).resolve().parent)]
import turns  # noqa: E402
from gpt import read_text  # noqa: E402

SEED = 0
WARM = 10  # steps before the first look at the clock
PARTS = "lockstep, nn.linear_cross_entropy"
WHO = ("torchtitan", "lockstep", PARTS)
LLAMA_8B = {"dim": 4096, "n_layers": 32, "ffn_dim_multiplier": 1.3, "multiple_of": 1024}
LLAMA_1B = {"dim": 2048, "n_layers": 16, "ffn_dim_multiplier": 1.5}
SHAPE = {"n_heads": 32, "n_kv_heads": 8, "rope_theta": 500000}


@dataclasses.dataclass(frozen=True)
class Size:
    text: str
    model: dict[str, Any]
    batch: int
    context: int
    dtype: str = "float32"  # of weights and of Adam's state; products are in bf16
    recompute: bool = False
    block: int = 10  # steps between two looks at the clock
    blocks: int = 3

    @property
    def steps(self) -> int:
        return WARM + self.block * self.blocks


SIZES = {
    "1.5B": Size("1.5 billion parameters, float32 weights, 8 x 2048 tokens", {**LLAMA_1B, **SHAPE}, 8, 2048),
    "8B": Size(
        "8 billion parameters, bf16 weights, activation checkpointing, 4 x 4096 tokens",
        {**LLAMA_8B, **SHAPE}, 4, 4096, "bfloat16", recompute=True, block=5, blocks=2,
    ),
    "tiny": Size(
        "tiny", {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 256}, 2, 16, block=2, blocks=2
    ),
}  # fmt: skip


class Clock:
    """Notes the time before every so many steps, after waiting for the device, and writes all down at the end."""

    def __init__(self, size: Size, file: str) -> None:
        self._size, self._file, self._calls = size, file, 0
        self._stamps: list[float] = []
        self._peak = 0

    def tick(self, loss: Tensor | None) -> None:
        size, device = self._size, "cuda" if torch.cuda.is_available() else "cpu"
        if self._calls == WARM:
            turns.begin(device)
        if device == "cuda":  # before every step, since torchtitan starts its count anew whenever it logs
            self._peak = max(self._peak, torch.cuda.max_memory_allocated())
        if self._calls >= WARM and (self._calls - WARM) % size.block == 0:
            turns.wait(device)
            self._stamps.append(time.perf_counter())
        if self._calls == size.steps:
            found = {"stamps": self._stamps, "peak": self._peak, "loss": None if loss is None else float(loss)}
            Path(self._file).write_text(json.dumps(found), encoding="utf-8")
            turns.end(device)
        self._calls += 1


def windows(size: Size) -> Tensor:
    """Text in bytes, a row for each example: its inputs and, one further, its targets."""
    text = torch.frombuffer(bytearray(read_text(None, 8_000_000)), dtype=torch.uint8)
    rows = text[: len(text) // (size.context + 1) * (size.context + 1)].view(-1, size.context + 1)
    return rows[: (size.steps + 2) * size.batch]


# Lockstep


class WithLoss(nn.Module):
    """The model and its loss, so that both are compiled."""

    def __init__(self, model: Any, in_parts: bool) -> None:
        super().__init__()
        self.model = model
        self.head = model.output if in_parts else None
        if in_parts:
            model.output = None  # so that the model returns what goes into it

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        found = self.model(tokens)
        if self.head is not None:
            return lockstep.nn.linear_cross_entropy(found, self.head.weight, targets)
        return nn.functional.cross_entropy(found.flatten(0, 1).float(), targets.flatten())


class Llama(lockstep.Task):
    def __init__(self, size: str, file: str, in_parts: bool) -> None:
        self._size, self._in_parts = SIZES[size], in_parts
        self._clock = Clock(self._size, file)
        self._last: Tensor | None = None

    def model(self) -> nn.Module:
        use_cpu_without_cuda()
        from torchtitan.models.llama3 import Transformer, TransformerModelArgs

        size = self._size
        arguments = TransformerModelArgs(**size.model, max_seq_len=size.context)
        torch.set_default_dtype(getattr(torch, size.dtype))
        with torch.device("meta"):
            model = Transformer(arguments)
        torch.set_default_dtype(torch.float32)
        model.to_empty(device="cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(SEED)
        with torch.no_grad():
            model.init_weights()
        return WithLoss(model, self._in_parts)

    def train_data(self) -> TensorDataset:
        return TensorDataset(windows(self._size))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=torch.cuda.is_available()
        )

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        self._clock.tick(self._last)
        tokens = batch[0].long()
        loss: Tensor = model(tokens[:, :-1], tokens[:, 1:])
        self._last = loss.detach()
        return loss


def lockstep_command(name: str, who: str, folder: Path) -> list[str]:
    size = SIZES[name]
    config = {
        "task": {
            "type": f"{Path(__file__).resolve()}:Llama", "size": name, "file": str(folder / f"{who}.json"),
            "in_parts": who == PARTS,
        },
        "runtime": "cuda" if torch.cuda.is_available() else "cpu",
        "processes": 1,
        "train": {
            "steps": size.steps + 1, "batch_size": size.batch, "compile": "blocks", "precision": "bf16",
            "clip_norm": 1.0, "activation_checkpointing": "blocks" if size.recompute else None,
        },
        "data": {"shuffle": False, "drop_last": True},
        "log": {"every": "10 steps"},
        "checkpoint": {"every": None},
    }  # fmt: skip
    file = folder / f"{who}.yaml"
    file.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    return [sys.executable, "-m", "lockstep", "train", str(file), f"--out={folder / who}"]


# torchtitan


def use_cpu_without_cuda() -> None:
    """torchtitan takes CUDA for granted where it finds no device, and measures the memory of one."""
    if torch.cuda.is_available():
        return
    torch._utils._get_available_device_type = lambda: "cpu"
    from torchtitan.components import metrics
    from torchtitan.distributed import utils

    utils.set_pg_timeouts = lambda *_, **__: None
    nothing = metrics.DeviceMemStats(*[0.0] * len(metrics.DeviceMemStats._fields))
    metrics.build_device_memory_monitor = lambda: types.SimpleNamespace(
        device_name="cpu", get_peak_stats=lambda: nothing, reset_peak_stats=lambda: None
    )


class Windows(IterableDataset[Any]):
    def __init__(self, size: Size) -> None:
        self._rows = windows(size)

    def __iter__(self) -> Iterator[Any]:
        for row in self._rows.long():
            yield {"input": row[:-1]}, row[1:]


def train_with_torchtitan(name: str, file: str) -> None:
    use_cpu_without_cuda()
    import torchtitan.protocols.train_spec as specs
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.config import ConfigManager
    from torchtitan.models import llama3
    from torchtitan.tools.logging import init_logger
    from torchtitan.train import Trainer

    size = SIZES[name]
    init_logger()
    spec = llama3.get_train_spec()
    arguments = {"bench": llama3.TransformerModelArgs(**size.model)}
    specs.register_train_spec(
        "bench",
        dataclasses.replace(
            spec,
            model_args=arguments,
            build_tokenizer_fn=None,
            build_dataloader_fn=lambda dp_world_size, dp_rank, tokenizer, job_config: ParallelAwareDataloader(
                Windows(size), dp_rank, dp_world_size, batch_size=size.batch
            ),
        ),
    )
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    options = {
        "job.dump_folder": tempfile.mkdtemp(prefix="titan-"),
        "model.name": "bench",
        "model.flavor": "bench",
        "training.local_batch_size": size.batch,
        "training.seq_len": size.context,
        "training.steps": size.steps + 1,
        "training.dtype": size.dtype,
        "debug.seed": SEED,
        "optimizer.lr": 1e-4,
        "optimizer.implementation": "fused" if torch.cuda.is_available() else "foreach",
        "lr_scheduler.warmup_steps": 0,
        "lr_scheduler.decay_ratio": 0.0,
        "activation_checkpoint.mode": "full" if size.recompute else "none",
        "metrics.log_freq": 10,
    }
    flags = itertools.chain.from_iterable((f"--{key}", str(value)) for key, value in options.items())
    config = ConfigManager().parse_args([*flags, "--compile.enable"])

    class Timed(Trainer):  # type: ignore[misc]
        clock = Clock(size, file)
        last: Tensor | None = None

        def train_step(self, data_iterator: Any) -> None:
            self.clock.tick(self.last)
            super().train_step(data_iterator)

        def forward_backward_step(self, **given: Any) -> Tensor:
            loss = super().forward_backward_step(**given)
            self.last = loss.detach()
            return loss

    Timed(config).train()


# The comparison


def measured(name: str, together: bool, limit: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="titan-") as folder:
        here = Path(folder)
        commands = {
            who: [sys.executable, __file__, "--child", name, str(here / "torchtitan.json")]
            if who == "torchtitan"
            else lockstep_command(name, who, here)
            for who in WHO
        }
        rounds = [commands] if together else [{who: command} for who, command in commands.items()]
        for each in rounds:
            for who, failure in turns.taken(each, here, limit):
                if failure:
                    print(f"{name}, {who} failed: {failure}", file=sys.stderr, flush=True)
                    continue
                found[who] = json.loads((here / f"{who}.json").read_text(encoding="utf-8"))
                print(name, who, json.dumps(found[who]), file=sys.stderr, flush=True)
    return found


def table(name: str, found: dict[str, Any]) -> str:
    size = SIZES[name]
    steps = {
        who: statistics.median((late - early) / size.block for early, late in itertools.pairwise(each["stamps"]))
        for who, each in found.items()
    }
    lines = [f"| {size.text} | step | to torchtitan | tokens/s | peak memory | loss |", "| --- " + "| ---: " * 5 + "|"]
    for who, step in steps.items():
        ratio = f"{step / steps['torchtitan']:.3f}" if "torchtitan" in steps else "-"
        speed, peak, loss = size.batch * size.context / step, found[who]["peak"] / 2**30, found[who]["loss"]
        lines.append(f"| {who} | {step * 1e3:.1f} ms | {ratio} | {speed / 1e3:.1f} k | {peak:.1f} GiB | {loss:.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", nargs="+", default=["1.5B", "8B"], choices=list(SIZES))
    parser.add_argument("--limit", type=float, default=240, help="seconds for a command")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", nargs=2, metavar=("SIZE", "FILE"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        train_with_torchtitan(*chosen.child)
        return
    text, complete = "", True
    for name in ["tiny"] if chosen.tiny else chosen.only:
        found = measured(name, name != "8B", chosen.limit)
        complete = complete and len(found) == len(WHO)
        text += table(name, found) + "\n\n"
        if chosen.out:
            chosen.out.write_text(text, encoding="utf-8")
    print(text)
    sys.exit(0 if complete else 1)


if __name__ == "__main__":
    main()
