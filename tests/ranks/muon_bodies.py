"""What ranks do in tests of Muon, which needs whole matrices."""

from __future__ import annotations

import copy
from typing import Any

import torch
from sharded_bodies import Language, sentences, token_loss, whole

import lockstep


def matrices_and_others(model: torch.nn.Module) -> tuple[list[Any], list[Any]]:
    inside = {id(each) for each in model.layers.parameters() if each.dim() == 2}
    trained = [each for each in model.parameters() if each.requires_grad]
    return [each for each in trained if id(each) in inside], [each for each in trained if id(each) not in inside]


def optimizer_of(model: torch.nn.Module) -> lockstep.CombinedOptimizer:
    matrices, others = matrices_and_others(model)
    muon = torch.optim.Muon(matrices, lr=0.02, adjust_lr_fn="match_rms_adamw")
    return lockstep.CombinedOptimizer(muon, torch.optim.AdamW(others, lr=1e-2))


def trained(run: lockstep.Run, epochs: int = 2, optimizer_of: Any = optimizer_of) -> dict[str, Any]:
    """Two epochs with short batches, in parts, by tokens, clipped; saved after each, and restored if it can be.

    In float64: where bfloat16 begins, gradients that differ in their last bits are the same.
    """
    model = Language().double()
    model, optimizer = run.setup(model, optimizer_of(model), clip_norm=0.5)
    run.restore()
    data = sentences()
    for _ in run.epochs(epochs):
        for batch in run.batches(data, 9, accumulate=2):
            total, count = token_loss(model, batch)
            run.backward(total, count=count)
            run.step(optimizer)
        run.checkpoint()
    return {"weights": {name: whole(each) for name, each in run.module.named_parameters()}, "step": run.progress.step}


def beside_plain_torch(run: lockstep.Run) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Trains one model in a run, and a copy of it by torch's two optimizers alone."""
    model = Language().double()
    other = copy.deepcopy(model)
    optimizers = optimizer_of(other).parts
    model, optimizer = run.setup(model, optimizer_of(model))
    for batch in run.batches(sentences(), 9):
        for each, backward in ((model, run.backward), (other, torch.Tensor.backward)):
            total, count = token_loss(each, batch)
            backward(total / count)
        run.step(optimizer)
        for each in optimizers:
            each.step()
            each.zero_grad()
    return tuple({name: whole(each) for name, each in one.named_parameters()} for one in (run.module, other))


def measured(run: lockstep.Run) -> dict[str, Any]:
    """Counts the matrices that this rank makes orthogonal, and what it holds of their momentum."""
    from lockstep.strategy import muon

    made: list[tuple[int, ...]] = []
    original = muon._zeropower_via_newtonschulz

    def counted(matrix: torch.Tensor, *rest: Any) -> torch.Tensor:
        made.append(tuple(matrix.shape))
        return original(matrix, *rest)

    muon._zeropower_via_newtonschulz = counted
    model = Language().double()
    model, optimizer = run.setup(model, optimizer_of(model))
    for batch in run.batches(sentences(9), 9):
        total, count = token_loss(model, batch)
        run.backward(total, count=count)
        run.step(optimizer)
    return {"made": made}


class Whitened(torch.optim.Optimizer):
    """Stands for SOAP and Shampoo: preconditioners of both sides, eigenvectors, and a count of steps in the group."""

    whole_matrices = True

    def __init__(self, parameters: Any, lr: float = 0.02) -> None:
        super().__init__(parameters, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for each in group["params"]:
                if each.grad is None:
                    continue
                state = self.state[each]
                if not state:
                    sides = enumerate(each.shape)
                    state["sides"] = {side: torch.eye(size, dtype=each.dtype) * 0.1 for side, size in sides}
                    state["fixed"] = (0.1, [0.5])
                    state["mean"] = torch.zeros_like(each)
                (rate, (momentum,)), (left, right) = state["fixed"], (state["sides"][side] for side in range(2))
                assert isinstance(state["fixed"], tuple)
                left.lerp_(each.grad @ each.grad.T, rate)
                right.lerp_(each.grad.T @ each.grad, rate)
                state["mean"].lerp_(each.grad, momentum)
                update = state["mean"]
                for side, sign in ((left, "left"), (right, "right")):
                    values, vectors = torch.linalg.eigh(side)
                    root = vectors @ torch.diag(values.clamp_min(1e-12) ** -0.25) @ vectors.T
                    update = root @ update if sign == "left" else update @ root
                each.add_(update, alpha=-group["lr"] / group["steps"] ** 0.5)


def whitened_of(model: torch.nn.Module) -> lockstep.CombinedOptimizer:
    matrices, others = matrices_and_others(model)
    return lockstep.CombinedOptimizer(Whitened(matrices), torch.optim.AdamW(others, lr=1e-2))
