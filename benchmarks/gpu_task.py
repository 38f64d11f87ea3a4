"""The tasks that gpu.py and gpu_restart.py train: the GPT of the examples with a clock in it, and noisy digits."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "examples"), str(Path(__file__).resolve().parent)]
import turns  # noqa: E402
from gpt import TextModel  # noqa: E402

COMPILED = 3  # steps after which nothing is compiled any more
IMPORTED = time.time()


class TimedText(TextModel):
    """Waits for the device and notes the time before every so many steps; writes all down before the last."""

    def __init__(
        self,
        steps: int = 0,
        stamps: str = "",
        block: int = 30,
        deterministic: bool = False,
        heartbeat: bool = True,
        **size: Any,
    ) -> None:
        super().__init__(**size)
        self.steps, self._file, self._block = steps, stamps, block
        self._calls, self._stamps = 0, []
        self._loss, self._losses = torch.zeros(()), []
        # By the clock that whoever started this process has as well.
        self.phases = {"imports": IMPORTED, "task": time.time()}
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=True)
        if not heartbeat:
            from lockstep.distributed.watch.heartbeat import Heartbeat

            Heartbeat._send = lambda self: None  # type: ignore[method-assign]

    def model(self) -> nn.Module:
        self.phases["until model"] = time.time()
        made = super().model()
        self.phases["model"] = time.time()
        return made

    def train_data(self) -> Any:
        self.phases["until data"] = time.time()
        data = super().train_data()
        self.phases["data"] = time.time()
        return data

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if self._file and self._calls == 1:
            self._wait()
            self.phases["backward, optimizer"] = time.time()
        if self._file and self._calls == COMPILED:
            turns.begin("cuda" if torch.cuda.is_available() else "cpu")
        if self._file and self._calls % self._block == 0:
            self._look_at_the_clock()
        self._calls += 1
        if self._calls > 1:
            loss = super().loss(model, batch)
        else:
            self._wait()
            self.phases["until step"] = time.time()
            loss = super().loss(model, batch)
            self._wait()
            self.phases["forward"] = time.time()
        self._loss = loss.detach()
        return loss

    @staticmethod
    def _wait() -> bool:
        """For the device; whether it is a GPU."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return torch.cuda.is_available()

    def _look_at_the_clock(self) -> None:
        on_gpu = self._wait()
        self._stamps.append(time.perf_counter())
        self._losses.append(self._loss.item())
        if self._calls == self.steps:
            peak = torch.cuda.max_memory_allocated() if on_gpu else 0
            found = {"stamps": self._stamps, "peak": peak, "losses": self._losses, "phases": self.phases}
            Path(self._file).write_text(json.dumps(found), encoding="utf-8")
            turns.end("cuda" if on_gpu else "cpu")


class Curve(TextModel):
    """Writes down the loss of every step."""

    def __init__(self, steps: int = 0, file: str = "", **size: Any) -> None:
        super().__init__(**size)
        self._steps, self._file = steps, file
        self._losses: list[Tensor] = []

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        device = batch[0].device
        if len(self._losses) == COMPILED:
            turns.begin(device)
        if len(self._losses) == self._steps:
            losses = torch.stack(self._losses).tolist()
            Path(self._file).write_text(json.dumps(losses), encoding="utf-8")
            turns.end(device)
        loss = super().loss(model, batch)
        self._losses.append(loss.detach())
        return loss


class NotedText(TextModel):
    """Notes the end of every step with the process that made it, once the device has done it."""

    def __init__(self, file: str = "", **size: Any) -> None:
        super().__init__(**size)
        self._file = file
        self._steps = 0  # of this process

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if self._steps:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            noted = {"step": self._steps, "pid": os.getpid(), "time": time.time()}
            with Path(self._file).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(noted) + "\n")
        self._steps += 1
        return super().loss(model, batch)


class NoisyDigits(lockstep.Task):
    """Ten patterns of 8 x 8 under noise: as easy to learn as scikit-learn's digits, without scikit-learn."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def train_data(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(0, 10, (2048,), generator=generator)
        patterns = torch.randn(10, 64, generator=generator)
        return TensorDataset(patterns[labels] + torch.randn(2048, 64, generator=generator), labels)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(model(inputs), labels)

    def metrics(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
        inputs, labels = batch
        return {"accuracy": (model(inputs).argmax(dim=1) == labels).float()}
