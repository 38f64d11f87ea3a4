"""What ranks do in tests of context parallel."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from sharded_bodies import whole
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from conftest import ROOT

sys.path.append(str(ROOT / "examples"))
WORDS, LENGTH = 20, 16


class Convolved(nn.Module):
    """A block with attention, and a convolution over positions; not in the first block, where `mixes` is 0."""

    def __init__(self, mixes: int = 1) -> None:
        super().__init__()
        self.mix, self.out = nn.Conv1d(8, 8, 2 * mixes + 1, padding=mixes), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.scaled_dot_product_attention(x, x, x)
        return x + self.out(self.mix(x.transpose(1, 2)).transpose(1, 2))


class Hidden(Convolved):
    """It shows only once the last layer has learned."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)


class Dropped(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.up, self.drop = nn.Linear(8, 8), nn.Dropout(0.5 * number)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.up(F.scaled_dot_product_attention(x, x, x)))  # type: ignore[no-any-return]


class Masked(nn.Module):
    """Attention with a mask that the block is given."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        heads = x.unsqueeze(1)
        mask = mask if mask.dim() == 2 and len(mask) == mask.size(1) else mask[:, None, None, :]
        return x + self.up(F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask).squeeze(1))  # type: ignore[no-any-return]


class Stack(nn.Module):
    def __init__(self, block: Any, mask: str = "") -> None:
        super().__init__()
        self.mask = mask
        self.embed, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.layers = nn.ModuleList(block(number) if block in (Convolved, Dropped) else block() for number in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        length = tokens.size(1)
        masks = {"causal": torch.ones(length, length, dtype=torch.bool).tril(), "keys": torch.ones_like(tokens).bool()}
        for each in self.layers:
            x = each(x, masks[self.mask]) if self.mask else each(x)
        return self.head(x)  # type: ignore[no-any-return]


class Own(nn.Module):
    """Attention by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.first(x) @ x.mT).softmax(-1) @ x)  # type: ignore[no-any-return]


def model_of(kind: str, dropout: float = 0.0) -> nn.Module:
    if kind == "gpt":
        from gpt import GPT

        return GPT(vocab=WORDS, context=LENGTH, layers=2, heads=2, width=16)
    if kind == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=LENGTH, attention_dropout=dropout,
                tie_word_embeddings=True,
            )
        )  # fmt: skip
    if kind in ("causal", "keys"):
        return Stack(Masked, kind)
    return Stack({"convolved": Convolved, "hidden": Hidden, "dropped": Dropped, "own": Own}[kind])


def trained(
    run: lockstep.Run, kind: str = "gpt", length: int = LENGTH, padded: bool = False, **options: Any
) -> dict[str, Any]:
    """Two epochs with a short batch, in parts, by tokens, clipped; in float64, and measured at the end."""
    torch.manual_seed(0)
    dropout = options.pop("dropout", 0.0)
    model = model_of(kind, dropout).double()
    model, optimizer = run.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2), clip_norm=0.5, **options)
    tokens = torch.randint(WORDS, (22, length + 1), generator=torch.Generator().manual_seed(1))
    lengths = torch.randint(4, length + 1, (22, 1), generator=torch.Generator().manual_seed(2))
    real = (torch.arange(length) < lengths) if padded else torch.ones(22, length, dtype=torch.bool)
    data = TensorDataset(tokens, real)

    def loss(model: nn.Module, batch: Any) -> lockstep.Mean:
        tokens, real = batch
        more = {"attention_mask": real.long()} if padded else {}
        logits = model(tokens[:, :-1], **more)
        each = F.cross_entropy(
            getattr(logits, "logits", logits).flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        )
        return lockstep.Mean((each * real.flatten()).sum(), real.sum())

    if kind == "dropped":  # in evaluation there is no dropout to be seen
        run.evaluate(lambda batch: {"loss": loss(run.module, batch)}, data, 8)
    for _ in range(2):
        for batch in run.batches(data, 8, accumulate=2):
            run.backward(loss(model, batch))
            run.step(optimizer)
    measured = run.evaluate(lambda batch: {"loss": loss(run.module, batch)}, data, 8)
    return {
        "weights": {name: whole(each) for name, each in run.module.named_parameters()},
        **measured,
    }
