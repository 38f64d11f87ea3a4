"""A small GPT that learns to continue text, byte by byte."""

import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep

BYTES = 256
TEXT_SUFFIXES = {".txt", ".py", ".md"}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)  # each [batch, head, position, feature]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention, then a two-layer network; each reads a normalised copy and adds to what passes through."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.out(F.gelu(self.expand(self.norm2(x)), approximate="tanh"))


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of each token, [B, T]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


class GPT(nn.Module):
    def __init__(self, vocab: int, context: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        """As GPT-2: what adds to the residual stream starts smaller the more layers add to it."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                adds_to_residual = name.endswith("out.weight")
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if adds_to_residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits [B, T, vocab]; with targets, each token's loss [B, T] instead.

        The loss is worked out here, not by the caller, so that torch.compile can fuse it with the head: at
        GPT-2's vocabulary the logits are by far the largest tensor of a step.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return token_losses(logits, targets)


def read_text(source: str | None, max_bytes: int) -> bytes:
    """At most `max_bytes` of a file or a folder's texts; by default of Python's own standard library."""
    text = bytearray()
    for path in _text_files(source):
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    return bytes(text[:max_bytes])


def _text_files(source: str | None) -> Iterator[Path]:
    # Relative to the working directory, as on the command line.
    folder = Path(source) if source is not None else Path(sysconfig.get_path("stdlib"))
    if folder.is_file():
        yield folder
        return
    if not folder.is_dir():
        raise FileNotFoundError(f"text: {folder.absolute()} is neither a file nor a folder")
    # In sorted order, so that every rank and every run on this machine reads the same text.
    for path in sorted(folder.rglob("*")):
        # Installed packages live inside the standard library's folder but are not part of it.
        installed = {"site-packages", "dist-packages"} & set(path.relative_to(folder).parts)
        if path.suffix in TEXT_SUFFIXES and path.is_file() and not installed:
            yield path


class TextModel(lockstep.Task):
    """Predicts the next byte. A vocabulary above 256 goes unused, but gives the model the size of GPT-2."""

    def __init__(
        self,
        layers: int = 2,
        heads: int = 4,
        width: int = 128,
        context: int = 128,
        vocab: int = BYTES,
        text: str | None = None,
        max_bytes: int = 1_000_000,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
    ) -> None:
        if vocab < BYTES:
            raise ValueError(f"vocab must be at least {BYTES}, one token per byte; got {vocab}")
        if width % heads != 0:
            raise ValueError(f"width must be a multiple of heads; got width {width} and {heads} heads")
        self.layers, self.heads, self.width = layers, heads, width
        self.context, self.vocab = context, vocab
        self.text, self.max_bytes = text, max_bytes
        self.lr, self.weight_decay = lr, weight_decay

    def model(self) -> nn.Module:
        return GPT(self.vocab, self.context, self.layers, self.heads, self.width)

    def train_data(self) -> Dataset[Any]:
        text = torch.frombuffer(bytearray(read_text(self.text, self.max_bytes)), dtype=torch.uint8)
        if len(text) <= self.context:
            raise ValueError(f"the text has {len(text)} bytes, too few for one window of {self.context} + 1")
        # A window is its inputs and, one byte on, its targets; so it is one longer than the context, and the
        # next window starts with its last byte. Unfolding copies nothing, and bytes stay bytes until used.
        return TensorDataset(text.unfold(0, self.context + 1, self.context))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Weight decay on matrices only: it would pull biases and norms away from where they belong."""
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        vectors = [p for p in model.parameters() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        # Fused is one kernel for all parameters. The model may not be on its device yet, so ask torch.
        return torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95), fused=torch.cuda.is_available())

    def shard_rules(self) -> dict[str, Any]:
        """Over an axis `model`, where the mesh has one. Between the two layers of a block's network nothing looks
        across features, so that they stay split; attention's heads come as one matrix, and are put together."""
        return {
            "tokens.weight": ["model", None],
            "blocks.*.query_key_value.weight": ["model", None],
            "blocks.*.attention.out.weight": [None, "model"],
            "blocks.*.expand.weight": {"spec": ["model", None], "activations": "split"},
            "blocks.*.out.weight": {"spec": [None, "model"], "activations": "split"},
        }

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = self._inputs_and_targets(batch)
        return model(inputs, targets).mean()

    def evaluate_step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        inputs, targets = self._inputs_and_targets(batch)
        logits = model(inputs)
        token_loss = token_losses(logits, targets)
        correct = logits.argmax(dim=2) == targets
        return {"loss": token_loss.mean(dim=1), "accuracy": correct.float().mean(dim=1)}

    @staticmethod
    def _inputs_and_targets(batch: Any) -> tuple[Tensor, Tensor]:
        (windows,) = batch
        tokens = windows.long()
        return tokens[:, :-1], tokens[:, 1:]
