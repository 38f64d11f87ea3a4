"""A transformer with dropout, trained deterministically. Arguments: FOLDER DEVICE COMPILE KILL_AT"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep


class Words(nn.Module):
    """What differs from run to run on a GPU by default: an embedding's gradient and attention's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 128)
        self.layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.1, batch_first=True)
        self.head = nn.Linear(128, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(tokens)))


def train(run: lockstep.Run, compiled: bool, kill_at: int) -> str:
    torch.manual_seed(0)
    model = Words().to(run.device)
    run.setup(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), precision="bf16", clip_norm=1.0, compile=compiled
    )  # fmt: skip
    run.restore()
    tokens = torch.randint(0, 64, (256, 257), generator=torch.Generator().manual_seed(1))
    for _ in run.epochs(3):
        for (batch,) in run.batches(TensorDataset(tokens), 32):
            with run.autocast():
                logits = run.model(batch[:, :-1])
            run.backward(nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten()))
            run.step()
            if run.progress.step % 4 == 0:
                run.checkpoint()
            if run.progress.step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    digest = hashlib.sha256()
    for parameter in run.module.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    folder, device, compiled, kill_at = sys.argv[1:]
    main = partial(train, compiled=compiled == "compiled", kill_at=int(kill_at))
    found = lockstep.launch(main, processes=1, runtime=device, folder=folder, train={"deterministic": True})
    print("DIGEST", found[0])
