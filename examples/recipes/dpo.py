"""DPO: a policy learns to prefer one answer to another, beside a frozen copy of where it began."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep


class Language(nn.Module):
    """Stands for a language model: logits for the next of 12 tokens. Load a trained one in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(12, 16), nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


def log_chance(model: nn.Module, tokens: Tensor, prompt: int) -> Tensor:
    """Returns the log probability of each answer, which follows the prompt."""
    each = model(tokens)[:, :-1].log_softmax(2).gather(2, tokens[:, 1:].unsqueeze(2)).squeeze(2)
    return each[:, prompt - 1 :].sum(1)


class Dpo(lockstep.Task):
    def __init__(self, beta: float = 0.1) -> None:
        self.beta = beta

    def model(self) -> dict[str, nn.Module]:
        policy = Language()
        return {"policy": policy, "reference": copy.deepcopy(policy).requires_grad_(False)}

    def train_data(self) -> Dataset:
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(12, (640, 4), generator=generator)
        rejected = torch.randint(12, (640, 4), generator=generator)
        return TensorDataset(
            torch.cat([prompts, prompts], 1), torch.cat([prompts, rejected], 1)
        )  # echoes are preferred

    def training_step(self, run: lockstep.Run, batch: Any) -> dict[str, Tensor]:
        both = torch.cat(batch)  # chosen answers, then rejected ones: one forward pass for both
        policy = log_chance(run.models["policy"], both, prompt=4)
        with torch.no_grad():
            reference = log_chance(run.models["reference"], both, prompt=4)
        chosen, rejected = (self.beta * (policy - reference)).chunk(2)
        loss = -F.logsigmoid(chosen - rejected).mean()
        run.backward(loss)
        run.step()
        return {"loss": loss, "preferred": (chosen > rejected).float().mean()}
