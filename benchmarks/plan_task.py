"""The tasks of plan.py: those of the examples, which note down how much memory torch's allocator has given out."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lockstep
from lockstep.adapters.huggingface import SYNTHETIC, CausalLM
from lockstep.evaluation.means import Mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT, TextModel
from resnet50 import ImageNet


class Notes:
    """What the allocator has given out, before every batch; after so many, the process ends, and saves nothing."""

    def __init__(self, file: str, batches: int) -> None:
        self._file, self._left = file, batches

    def write(self) -> None:
        if not self._file:
            return
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        found = {
            "peak": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "used": total - free,  # of the device, by every process on it
            "complete": self._left == 0,
        }
        Path(self._file).write_text(json.dumps(found), encoding="utf-8")
        if self._left == 0:
            os._exit(0)
        self._left -= 1


class InParts(GPT):
    """Never has all logits in memory."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return super().forward(tokens)
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return lockstep.nn.linear_cross_entropy(self.norm(x), self.head.weight, targets)


class Text(TextModel):
    def __init__(
        self, notes: str = "", batches: int = 0, parts: bool = False, short: bool = False, **size: Any
    ) -> None:
        super().__init__(**size)
        self._notes, self._parts, self._short = Notes(notes, batches), parts, bool(notes) and short

    def model(self) -> nn.Module:
        return (InParts if self._parts else GPT)(self.vocab, self.context, self.layers, self.heads, self.width)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self._notes.write()
        if self._short:  # the optimizer's state is there from the second step on: the first need not be long
            self._short, (windows,) = False, batch
            batch = [windows[:1, :1025]]
        return super().loss(model, batch)


class Images(ImageNet):
    def __init__(self, notes: str = "", batches: int = 0, **size: Any) -> None:
        super().__init__(**size)
        self._notes = Notes(notes, batches)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self._notes.write()
        return super().loss(model, batch)


@dataclass(kw_only=True, eq=False)
class Llama(CausalLM):
    """A model of transformers with random weights, on random tokens."""

    data: str = SYNTHETIC
    init: str = "config"
    notes: str = ""
    batches: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._notes = Notes(self.notes, self.batches)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Mean:
        self._notes.write()
        return super().loss(model, batch)
