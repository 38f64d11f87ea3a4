"""A model that begins with somebody else's weights, on ranks that have all of it or a part."""

from __future__ import annotations

from typing import Any

import torch
from sharded_bodies import whole
from torch import nn

import lockstep


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 16), *(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)), nn.Linear(16, 3)
    )


def meta_net(seed: int) -> nn.Module:
    with torch.device("meta"):
        return net(seed)


def begun(run: lockstep.Run, path: str, meta: bool = False, save: bool = False) -> dict[str, Any]:
    """All weights after setup; each rank other than the first would have made others."""
    model = run._engine.strategy.build(lambda: (meta_net if meta else net)(run.rank))
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), init_from=path)
    if save:
        run.restore()
        run.checkpoint()
    return {name: whole(each) for name, each in run.module.named_parameters()}
