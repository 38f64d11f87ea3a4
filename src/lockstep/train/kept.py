"""The parts of a run that a checkpoint holds, and the way back into them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.checkpoint.stateful import Stateful
from lockstep.data.progress import Progress
from lockstep.errors import ConfigError
from lockstep.record.journal import Journal


@dataclass
class Kept:
    """Everything with a state that goes on bit for bit; the generators and the clock are added by whoever saves."""

    progress: Progress
    journal: Journal
    module: nn.Module | None = None
    optimizer: Optimizer | None = None
    attached: dict[str, Stateful] = field(default_factory=dict)

    def model_and_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The weights, which are most of it, and all the rest."""
        assert self.module is not None
        tensors = self.module.state_dict()
        model = {name: each for name, each in tensors.items() if isinstance(each, Tensor)}
        state = {
            "progress": self.progress.state_dict(),
            "model_extra": {name: each for name, each in tensors.items() if name not in model},
            "optimizer": self.optimizer.state_dict() if self.optimizer is not None else None,
            "attached": {name: part.state_dict() for name, part in self.attached.items()},
            "journal": self.journal.state_dict(),
        }
        return model, state

    def load(self, model: Mapping[str, Any], state: Mapping[str, Any], source: str) -> None:
        self._load_model({**model, **state["model_extra"]}, source)
        if self.optimizer is not None and state["optimizer"] is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        for name, part in self.attached.items():
            if name in state["attached"]:
                part.load_state_dict(state["attached"][name])
        self.progress.load_state_dict(state["progress"])
        self.journal.start_at(self.progress.step, state["journal"])

    def _load_model(self, state: Mapping[str, Any], source: str) -> None:
        assert self.module is not None
        try:
            self.module.load_state_dict(state)
        except RuntimeError as error:
            raise ConfigError(
                f"{source}: the saved weights do not fit this model: {error}. "
                "Resume with the task that the run was started with, or start a new run"
            ) from None
