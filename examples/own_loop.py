"""The loop of own_loop_plain.py with every device in step; compare the two to see what changes.

python examples/own_loop.py                             starts two processes itself
torchrun --nproc_per_node=2 examples/own_loop.py        uses the processes torchrun has started
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset, random_split

import lockstep


def main(run: lockstep.Run) -> None:
    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    train, val = random_split(dataset, [0.8, 0.2], torch.Generator().manual_seed(0))

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = run.setup(model, optimizer)
    run.restore()  # goes on where launch was given the folder of a run that has a checkpoint

    def accuracy(batch: list[Tensor]) -> dict[str, Tensor]:
        x, y = batch
        return {"accuracy": (run.module(x).argmax(dim=1) == y).float()}

    for epoch in run.epochs(10):
        for x, y in run.batches(train, batch_size=64):
            loss = F.cross_entropy(model(x), y)
            run.backward(loss)
            run.step(optimizer)
            run.log(loss=loss)
        validation = run.evaluate(accuracy, val, batch_size=64)
        if run.is_main:
            print(f"epoch {epoch}: validation accuracy {validation['accuracy']:.3f}")
        run.checkpoint()


if __name__ == "__main__":
    lockstep.launch(main, processes=2)
