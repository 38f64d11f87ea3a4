"""A training loop in plain PyTorch, for one process: what own_loop.py starts from.

python examples/own_loop_plain.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split


def main() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    train, val = random_split(dataset, [0.8, 0.2], torch.Generator().manual_seed(0))

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def accuracy(x: Tensor, y: Tensor) -> Tensor:
        return (model(x).argmax(dim=1) == y).float()

    for epoch in range(10):
        for x, y in DataLoader(train, batch_size=64, shuffle=True):
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            correct = [accuracy(x.to(device), y.to(device)) for x, y in DataLoader(val, batch_size=64)]
        print(f"epoch {epoch}: validation accuracy {torch.cat(correct).mean().item():.3f}")
        torch.save(model.state_dict(), "own_loop_plain.pt")


if __name__ == "__main__":
    main()
