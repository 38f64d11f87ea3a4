"""What ranks do in tests of several models, of sums and counts, and of models that are used in unusual ways."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep


def points(count: int = 50, width: int = 4) -> TensorDataset:
    inputs = torch.randn(count, width, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def sentences(count: int = 21) -> TensorDataset:
    """Padded text: between 1 and 7 tokens of it are real."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 11, (count, 7), generator=generator)
    lengths = torch.randint(1, 8, (count,), generator=generator)
    return TensorDataset(tokens, (torch.arange(7) < lengths[:, None]).float())


class Tagger(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 6, sparse=sparse), nn.Linear(6, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens))  # type: ignore[no-any-return]


def token_means(run: lockstep.Run) -> dict[str, Any]:
    """A loss that is a mean over real tokens, of which every share of a batch has another number: in 1, 2 and 3
    micro-batches, by a model each."""
    data, found = sentences(), {}
    for accumulate in (1, 2, 3):
        torch.manual_seed(0)
        name, model = f"in {accumulate}", Tagger()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        wrapped, optimizer = run.setup(model, optimizer, name=name, clip_norm=5.0)
        for _ in range(2):
            for tokens, mask in run.batches(data, 8, accumulate=accumulate, shuffle=False, name=name):
                each = F.cross_entropy(wrapped(tokens).flatten(0, 1), tokens.flatten(), reduction="none")
                total, count = (each * mask.flatten()).sum(), mask.sum()
                run.log(**{name: lockstep.Mean(total, count)})
                run.backward(total, count=count)
                run.step(optimizer)
        weights = [each.detach().flatten().tolist() for each in model.parameters()]
        found[name] = [number for each in weights for number in each]

    def measure(batch: list[Tensor]) -> dict[str, Any]:
        right = (model(batch[0]).argmax(2) == batch[0]).float() * batch[1]
        return {"accuracy": lockstep.Mean(right.sum(), batch[1].sum())}

    return {"weights": found, **run.evaluate(measure, data, 5)}


def token_means_by_hand() -> list[float]:
    """The same with nothing but torch: the mean over the real tokens of every whole batch."""
    torch.manual_seed(0)
    model, (tokens, mask) = Tagger(), sentences().tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        for start in range(0, len(tokens), 8):
            chosen, real = tokens[start : start + 8], mask[start : start + 8]
            each = F.cross_entropy(model(chosen).flatten(0, 1), chosen.flatten(), reduction="none")
            ((each * real.flatten()).sum() / real.sum()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
    return [number for each in model.parameters() for number in each.detach().flatten().tolist()]


def two_models(run: lockstep.Run) -> dict[str, Any]:
    """Two models with an optimizer each, in turns, in micro-batches, with a last batch that is short."""
    first, second = nn.Linear(4, 3), nn.Linear(3, 1)
    one = torch.optim.SGD(first.parameters(), lr=0.05)
    two = torch.optim.AdamW(second.parameters(), lr=0.01)
    run.setup(first, one, name="first")
    run.setup(second, two, name="second")
    for _ in run.epochs(2):
        for inputs, targets in run.batches(points(), 12, accumulate=2):
            hidden = run.modules["first"](inputs).detach()  # before the step, of which micro-batches see one side each
            with run.frozen(run.models["second"]):
                run.backward(F.mse_loss(run.models["second"](run.models["first"](inputs)), targets))
            run.step(one)
            run.backward(F.mse_loss(run.models["second"](hidden), targets))
            run.step(two)
    weights = [each.detach().flatten().tolist() for each in (*first.parameters(), *second.parameters())]
    return {"weights": weights, "step": run.progress.step}


def left_half_way(run: lockstep.Run) -> list[float]:
    """Out of an accumulated batch in its midst, then on without: replicas must not drift."""
    model = nn.Linear(4, 1)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
    data = points()
    for inputs, targets in run.batches(data, 12, accumulate=3):
        run.backward(F.mse_loss(run.model(inputs), targets))
        run.step()
        break
    for inputs, targets in run.batches(data, 12):
        run.backward(F.mse_loss(run.model(inputs), targets))
        run.step()
    run.checkpoint()
    weight = model.weight.detach()
    return [each.item() for each in getattr(weight, "full_tensor", lambda: weight)().flatten()]


def sparse_embedding(run: lockstep.Run) -> list[float]:
    model = Tagger(sparse=True)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), clip_norm=0.5, on_nan="skip")
    for tokens, _ in run.batches(sentences(), 8):
        run.backward(F.cross_entropy(run.model(tokens).flatten(0, 1), tokens.flatten()))
        run.step()
    return [float(each.detach().sum()) for each in model.parameters()]


class Meets(torch.autograd.Function):
    """A collective in the forward pass, as SyncBatchNorm has it: every rank must come as often as the others."""

    @staticmethod
    def forward(context: Any, inputs: Tensor) -> Tensor:
        total = inputs.detach().sum().reshape(1)
        torch.distributed.all_reduce(total)
        return inputs * 1.0

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return gradients[0]


def collective_in_forward(run: lockstep.Run) -> int:
    """On 2 ranks, a last batch of 3: shares of 1 and 2, in 2 micro-batches each."""
    model = nn.Linear(4, 1)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for inputs, targets in run.batches(points(11), 8, accumulate=2):
        run.backward(F.mse_loss(Meets.apply(run.model(inputs)), targets))  # type: ignore[no-untyped-call]
        run.step()
    return run.progress.step


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.there, self.back = nn.Linear(4, 2), nn.Linear(2, 4)
        self.width = 2

    def encode(self, inputs: Tensor) -> Tensor:
        return self.there(inputs)  # type: ignore[no-any-return]

    def forward(self, inputs: Tensor) -> Tensor:
        return self.back(self.encode(inputs))  # type: ignore[no-any-return]

    def reconstruct(self, inputs: Tensor) -> Tensor:
        return self(inputs)  # type: ignore[no-any-return]


def other_methods(run: lockstep.Run) -> dict[str, Any]:
    """Methods of the model on its wrapper, with gradients that are exchanged as by a call of the model itself."""
    model = Coder()
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    wrapped: Any = run.model
    for inputs, _ in run.batches(points(), 10):
        run.backward(F.mse_loss(wrapped.reconstruct(inputs), inputs))
        run.step()
    with torch.no_grad():
        code = wrapped.encode(torch.ones(1, 4))
    run.checkpoint()  # compares the replicas
    return {"weights": [each.detach().flatten().tolist() for each in model.parameters()], "code": code.shape[1],
            "width": wrapped.width}  # fmt: skip


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.used(inputs)  # type: ignore[no-any-return]


def unused_parameters(run: lockstep.Run) -> None:
    """Two backward passes in a step, neither of which reaches all parameters."""
    model = HalfUsed()
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for inputs, targets in run.batches(points(), 10):
        run.backward(F.mse_loss(run.model(inputs), targets))
        run.backward(F.mse_loss(run.model(inputs), targets))
        run.step()


def uneven_shares(run: lockstep.Run) -> list[float]:
    """A batch size that the ranks do not divide."""
    model = nn.Linear(4, 1)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for _ in run.epochs(2):
        for inputs, targets in run.batches(points(), 10):
            run.backward(F.mse_loss(run.model(inputs), targets))
            run.step()
    return [each.item() for each in model.weight.flatten().detach()]
