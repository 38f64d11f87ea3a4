"""Hugging Face's Llama, small and from a config of its own, trained as it is."""

from __future__ import annotations

from typing import Any

import torch
from sharded_bodies import whole
from torch.utils.data import TensorDataset

import lockstep


def config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip


def llama() -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(config())


def trained(run: lockstep.Run, activation_checkpointing: str | None = None) -> dict[str, list[float]]:
    data = TensorDataset(torch.randint(0, 96, (40, 16), generator=torch.Generator().manual_seed(3)))
    model = run._engine.strategy.build(llama)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = run.setup(model, optimizer, clip_norm=1.0, activation_checkpointing=activation_checkpointing)
    for (tokens,) in run.batches(data, 8):
        run.backward(model(input_ids=tokens, labels=tokens).loss)
        run.step()
    run.checkpoint()
    return {name: whole(each) for name, each in run.module.named_parameters()}
