"""Training loops as people write them, once with Lockstep and once in plain torch on one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sharded_bodies import put_together
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

from lockstep import Run, Task
from lockstep.errors import ConfigError

WIDTH, BATCH = 6, 9  # the last of three batches has 6 examples, and two ranks never have equal shares

Weights = dict[str, list[float]]


def examples() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(24, WIDTH, generator=generator), torch.randn(24, WIDTH, generator=generator))


def in_plain_torch() -> Iterator[list[Tensor]]:
    return iter(torch.utils.data.DataLoader(examples(), BATCH))


def weights_of(model: nn.Module) -> Weights:
    return {name: put_together(each).flatten().double().tolist() for name, each in model.state_dict().items()}


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(3)
        return make()

    return made


def mlp() -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    return nn.Sequential(block(), block(), nn.Linear(WIDTH, 1))


# A contrastive loss over the examples of all ranks, with a scalar parameter


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        image, text = F.normalize(self.image(images), dim=1), F.normalize(self.text(texts), dim=1)
        return image, text, self.logit_scale.exp()


def contrast(scale: Tensor, mine: Tensor, theirs: Tensor, first: int) -> Tensor:
    return F.cross_entropy(scale * mine @ theirs.T, torch.arange(first, first + len(mine)))


def clip(run: Run, everywhere: bool = False) -> Weights:
    """With `everywhere`, every rank computes the loss of all examples; else, that of its own against all."""
    model = run._engine.strategy.build(seeded(Towers))
    name = f"clip {everywhere}"
    model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.5), name=name)
    for images, texts in run.batches(examples(), BATCH, shuffle=False, name=name):
        image, text, scale = model(images, texts)
        every_image, every_text = run.all_gather(image), run.all_gather(text)
        first = int(run.all_gather(torch.tensor([len(image)]))[: run.dp_rank].sum())
        if everywhere:
            image, text, first = every_image, every_text, 0
        loss = contrast(scale, image, every_text, first) + contrast(scale, text, every_image, first)
        run.backward(loss)
        run.step(optimizer)
    return weights_of(run.modules[name])


def plain_clip() -> Weights:
    model = seeded(Towers)()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for images, texts in in_plain_torch():
        image, text, scale = model(images, texts)
        optimizer.zero_grad()
        (contrast(scale, image, text, 0) + contrast(scale, text, image, 0)).backward()
        optimizer.step()
    return weights_of(model)


# A second backward pass through the graph of the first


def penalised(model: nn.Module, inputs: Tensor) -> Tensor:
    inputs = inputs.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    return model(inputs).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()


def critic() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def penalty(run: Run, make: Callable[[], nn.Module] = mlp) -> Weights:
    model, name = run._engine.strategy.build(seeded(make)), f"penalty of {make.__name__}"
    model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), name=name)
    for inputs, _ in run.batches(examples(), BATCH, shuffle=False, name=name):
        run.backward(penalised(model, inputs))
        run.step(optimizer)
    return weights_of(run.modules[name])


def plain_penalty(make: Callable[[], nn.Module] = mlp) -> Weights:
    model = seeded(make)()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, _ in in_plain_torch():
        optimizer.zero_grad()
        penalised(model, inputs).backward()
        optimizer.step()
    return weights_of(model)


# BatchNorm whose forward does more than that


class NormAndReLU(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return F.relu(super().forward(input))


class NormByFunction(nn.BatchNorm1d):
    """As timm writes it."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.sigmoid(
            F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum or 0.0
            )
        )


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 8), NormAndReLU(8), nn.Linear(8, 8), NormByFunction(8), nn.BatchNorm1d(8), nn.Linear(8, 1)
    )


def norms(run: Run) -> Weights:
    model = run._engine.strategy.build(seeded(normed))
    model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), name="norms")
    for inputs, _ in run.batches(examples(), BATCH, shuffle=False, name="norms"):
        run.backward(model(inputs).square().mean())
        run.step(optimizer)
    return weights_of(run.modules["norms"])


def plain_norms() -> Weights:
    model = seeded(normed)()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, _ in in_plain_torch():
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return weights_of(model)


# A teacher that nobody trains


class Odd(nn.Module):
    """Frozen weights and buffers of which backends, norms and layouts know little."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Parameter(torch.full((2, 2), -torch.inf).triu(1))
        self.short = nn.Parameter(torch.arange(4.0).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("number", torch.arange(4, dtype=torch.int16))
        self.register_buffer("seen", torch.rand(1, 1).expand(64, 4096), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + 0 * self.seen[0, 0]  # type: ignore[no-any-return]


def student_and_teacher() -> tuple[nn.Module, nn.Module]:
    student, teacher = seeded(mlp)(), nn.Sequential(mlp(), Odd())
    return student, teacher.requires_grad_(False)


def distil(run: Run) -> Weights:
    student, teacher = run._engine.strategy.build(student_and_teacher)
    student, optimizer = run.setup(student, torch.optim.SGD(student.parameters(), lr=0.1), name="student")
    teacher = run.setup(teacher, name="teacher")
    for inputs, _ in run.batches(examples(), BATCH, shuffle=False, name="distil"):
        with torch.no_grad():
            wanted = teacher(inputs)
        through = teacher(student(inputs).expand(-1, WIDTH))  # gradients flow through a teacher to the student
        run.backward((student(inputs) - wanted).square().mean() + through.mean())
        run.step(optimizer)
    return weights_of(nn.ModuleDict({name: run.modules[name] for name in ("student", "teacher")}))


def plain_distil() -> Weights:
    student, teacher = student_and_teacher()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    for inputs, _ in in_plain_torch():
        optimizer.zero_grad()
        through = teacher(student(inputs).expand(-1, WIDTH))
        ((student(inputs) - teacher(inputs)).square().mean() + through.mean()).backward()
        optimizer.step()
    return weights_of(nn.ModuleDict({"student": student, "teacher": teacher}))


# Several backward passes in a step


def passes(run: Run) -> Weights:
    """Two forward passes before the first of two backward passes."""
    model = run._engine.strategy.build(seeded(mlp))
    model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), name="passes")
    for inputs, others in run.batches(examples(), BATCH, shuffle=False, name="passes"):
        one, other = model(inputs).square().mean(), model(others).square().mean()
        run.backward(one)
        run.backward(other)
        run.step(optimizer)
    return weights_of(run.modules["passes"])


def plain_passes() -> Weights:
    model = seeded(mlp)()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, others in in_plain_torch():
        optimizer.zero_grad()
        (model(inputs).square().mean() + model(others).square().mean()).backward()
        optimizer.step()
    return weights_of(model)


# Optimizers that compute the loss themselves


class Sam(torch.optim.SGD):
    """Steps by the gradient at the worst point nearby: sharpness-aware minimisation."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        loss = closure()
        parameters = [each for group in self.param_groups for each in group["params"]]
        before = [each.clone() for each in parameters]
        norm = torch.stack([whole(each.grad.square().sum()) for each in parameters]).sum().sqrt()
        for each in parameters:
            each.add_(each.grad * float(0.05 / norm))
        closure()
        for each, value in zip(parameters, before, strict=True):
            each.copy_(value)
        super().step()
        return loss


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # type: ignore[no-any-return]


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


def sam(parameters: Any) -> torch.optim.Optimizer:
    return Sam(parameters, lr=0.2)


def closure(run: Run, make: Callable[[Any], torch.optim.Optimizer], counts: bool, clip_norm: float | None) -> Weights:
    name = f"{make.__name__} {counts}"
    model = run._engine.strategy.build(seeded(mlp))
    model, optimizer = run.setup(model, make(model.parameters()), name=name, clip_norm=clip_norm)
    for inputs, _ in run.batches(examples(), BATCH, shuffle=False, name=name):

        def compute(inputs: Tensor = inputs) -> None:
            found = model(inputs).square()
            run.backward(found.sum(), count=len(found)) if counts else run.backward(found.mean())

        run.step(optimizer, compute)
    return weights_of(run.modules[name])


def plain_closure(make: Callable[[Any], torch.optim.Optimizer], clip_norm: float | None = None) -> Weights:
    model = seeded(mlp)()
    optimizer = make(model.parameters())
    for inputs, _ in in_plain_torch():

        def compute(inputs: Tensor = inputs) -> Tensor:
            optimizer.zero_grad()
            with torch.enable_grad():
                loss = model(inputs).square().mean()
                loss.backward()
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            return loss

        optimizer.step(compute)  # type: ignore[arg-type]
    return weights_of(model)


# An optimizer that steps in the backward pass


def hooks_at_setup(run: Run) -> int | str:
    model, fired = mlp(), []
    for parameter in model.parameters():
        if run.devices.strategy != "fsdp":  # which refuses them
            parameter.register_hook(lambda gradient: fired.append(1))
        parameter.register_post_accumulate_grad_hook(lambda parameter: fired.append(1))
    try:
        run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), name="hooks")
    except ConfigError as error:
        return str(error)
    return len(fired)


# Collectives of one's own


def collective(run: Run) -> float:
    total = torch.ones(())
    dist.all_reduce(total)
    return float(total) / run.world_size


def gathered(run: Run) -> str:
    """Of tensors that differ between ranks in more than their length."""
    try:
        return str(list(run.all_gather(torch.ones(2, 3 + run.rank)).shape))
    except ConfigError as error:
        return str(error)


def dtype_of_norm(run: Run) -> str:
    model = run.setup(nn.BatchNorm1d(2), name="norm alone")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return str(model(torch.ones(4, 2, dtype=torch.bfloat16)).dtype)


LOOPS: dict[str, tuple[Callable[[Run], Weights], Callable[[], Weights]]] = {
    "penalty": (penalty, plain_penalty),
    "penalty of norms": (lambda run: penalty(run, critic), lambda: plain_penalty(critic)),
    "norms": (norms, plain_norms),
    "distil": (distil, plain_distil),
    "passes": (passes, plain_passes),
    "clip": (clip, plain_clip),
    "clip everywhere": (lambda run: clip(run, everywhere=True), plain_clip),
    "sam": (lambda run: closure(run, sam, False, None), lambda: plain_closure(sam)),
}
WHOLE = {  # what needs whole parameters
    "lbfgs": (lambda run: closure(run, lbfgs, False, None), lambda: plain_closure(lbfgs)),
    "lbfgs by counts": (lambda run: closure(run, lbfgs, True, 0.1), lambda: plain_closure(lbfgs, 0.1)),
}


def loops(strategy: str) -> dict[str, tuple[Callable[[Run], Weights], Callable[[], Weights]]]:
    return LOOPS if strategy == "fsdp" else LOOPS | WHOLE


def all_loops(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = {"hooks": hooks_at_setup(run), "collective": collective(run)}
    found |= {"gathered": gathered(run), "dtype of norm": dtype_of_norm(run)}
    for name, (loop, _) in loops(run.devices.strategy).items():
        found[name] = loop(run)
    run.checkpoint()  # of every kind of model and optimizer above
    return found


class Line(Task):
    """Which LBFGS finds in one step, where it is given the loss of the whole batch."""

    def model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def train_data(self) -> TensorDataset:
        inputs = torch.randn(20, 2, generator=torch.Generator().manual_seed(1))
        return TensorDataset(inputs, inputs @ torch.tensor([[2.0], [-1.0]]) + 3)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])
