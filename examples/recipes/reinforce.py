"""REINFORCE: episodes are the data set. Each brings its random numbers, so that any number of ranks plays the same."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import lockstep

MOVES = 10


class Episodes(Dataset):
    """Where an episode begins, and by which numbers its actions are drawn."""

    def __len__(self) -> int:
        return 640

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(2), torch.rand(MOVES, 3).clamp_min(1e-6)


class Reinforce(lockstep.Task):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3))

    def train_data(self) -> Dataset:
        return Episodes()

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        place, numbers = batch
        rewards, chances = [], []
        with torch.no_grad():  # play: the agent steps left, stays or steps right, and wants to be at its target
            states = []
            for move in range(MOVES):
                states.append(place)
                gumbel = -(-numbers[:, move].log()).log()
                action = (model(place) + gumbel).argmax(1)
                place = torch.stack([place[:, 0] + 0.2 * (action - 1), place[:, 1]], 1)
                rewards.append(-(place[:, 0] - place[:, 1]).abs())
                chances.append(action)
        returns = torch.stack(rewards, 1).flip(1).cumsum(1).flip(1)
        log_chances = model(torch.stack(states, 1)).log_softmax(2).gather(2, torch.stack(chances, 1).unsqueeze(2))
        loss = -(log_chances.squeeze(2) * returns).sum(1).mean()
        return loss, {"reward": torch.stack(rewards, 1).sum(1).mean()}
