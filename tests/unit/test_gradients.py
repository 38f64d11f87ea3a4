"""Gradients are those of plain PyTorch, with several models, optimizers and losses in a step."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.engine.run import Run
from lockstep.errors import ConfigError
from lockstep.evaluation.means import Mean

Runs = Callable[..., Run]
Pair = tuple[nn.Module, nn.Module]

DATA = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))


def pair() -> Pair:
    torch.manual_seed(0)
    return nn.Linear(3, 3), nn.Linear(3, 1)


def optimizers(models: Pair) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in models]


def set_up(run: Run) -> tuple[Pair, list[torch.optim.Optimizer]]:
    models = pair()
    made = optimizers(models)
    for name, model, optimizer in zip(("first", "second"), models, made, strict=True):
        run.setup(model, optimizer, name=name)
    return models, made


def weights(models: Pair) -> list[Tensor]:
    return [each.detach().clone() for model in models for each in model.parameters()]


def same(found: Pair, expected: Pair) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(found), weights(expected), strict=True))


def discriminated(models: Pair, batch: Tensor) -> Tensor:
    """The loss of the discriminator, which does not reach the generator."""
    return (models[1](batch).mean() - models[1](models[0](batch).detach()).mean()) ** 2


def generated(models: Pair, batch: Tensor) -> Tensor:
    """The loss of the generator, which reaches both."""
    return -models[1](models[0](batch)).mean()


def test_a_gan_loop_without_zero_grad_is_that_of_plain_torch(new_run: Runs) -> None:
    run = new_run()
    models, (generator, discriminator) = set_up(run)
    plain = pair()
    plain_generator, plain_discriminator = optimizers(plain)
    for _ in range(2):
        for (batch,) in run.batches(TensorDataset(DATA), 4, shuffle=False):
            run.backward(discriminated(models, batch))
            run.step(discriminator)
            run.backward(generated(models, batch))
            run.step(generator)
        for batch in DATA.split(4):
            plain_discriminator.zero_grad()
            discriminated(plain, batch).backward()
            plain_discriminator.step()
            plain_generator.zero_grad()
            generated(plain, batch).backward()
            plain_generator.step()
    assert same(models, plain)


@pytest.mark.parametrize("by", ["optimizer", "model"])
def test_where_zero_grad_decides_it_is_asked_for_and_honoured(new_run: Runs, by: str) -> None:
    """The generator steps first: whether the discriminator adds to what it got is up to zero_grad."""
    run = new_run()
    models, (generator, discriminator) = set_up(run)
    batches = run.batches(TensorDataset(DATA), 4, shuffle=False)
    (batch,) = next(batches)
    run.backward(generated(models, batch))
    run.step(generator)
    with pytest.raises(ConfigError, match=r"parameters of 'second' still hold gradients .* of first has stepped"):
        run.backward(discriminated(models, batch))
    (discriminator if by == "optimizer" else models[1]).zero_grad()
    run.backward(discriminated(models, batch))
    run.step(discriminator)

    plain = pair()
    plain_generator, plain_discriminator = optimizers(plain)
    generated(plain, batch).backward()
    plain_generator.step()
    plain_discriminator.zero_grad()
    discriminated(plain, batch).backward()
    plain_discriminator.step()
    assert same(models, plain)


def test_a_shared_body_adds_up_over_losses_where_zero_grad_comes_first(new_run: Runs) -> None:
    run = new_run()
    models, made = set_up(run)
    plain = pair()
    plain_made = optimizers(plain)

    def step(models: Pair, made: list[torch.optim.Optimizer], batch: Tensor, backward: Any, step: Any) -> None:
        for each in made:
            each.zero_grad()
        backward(generated(models, batch))
        step(made[1])  # the head
        backward(models[0](batch).square().mean())
        step(made[0])  # the body, of both losses

    for (batch,) in run.batches(TensorDataset(DATA), 4, shuffle=False):
        step(models, made, batch, run.backward, run.step)
    for batch in DATA.split(4):
        step(plain, plain_made, batch, Tensor.backward, lambda optimizer: optimizer.step())
    assert same(models, plain)


def test_one_loss_as_a_sum_and_a_count_is_divided_for_every_optimizer(new_run: Runs) -> None:
    for accumulate in (1, 2, 4):
        run = new_run()
        models, made = set_up(run)
        plain = pair()
        plain_made = optimizers(plain)
        for (batch,) in run.batches(TensorDataset(DATA), 4, shuffle=False, accumulate=accumulate):
            output = models[1](models[0](batch))
            run.backward(Mean(output.sum(), len(batch)))
            for each in made:
                run.step(each)
        for batch in DATA.split(4):
            plain[1](plain[0](batch)).mean().backward()
            for each in plain_made:
                each.step()
                each.zero_grad()
        for found, expected in zip(weights(models), weights(plain), strict=True):
            torch.testing.assert_close(found, expected)


def test_counts_belong_to_the_optimizers_that_their_loss_reached(new_run: Runs) -> None:
    """Two losses with counts of their own in every micro-batch, stepped at its end."""
    run = new_run()
    models, made = set_up(run)
    plain = copy.deepcopy(models)
    plain_made = optimizers(plain)
    for (batch,) in run.batches(TensorDataset(DATA), 6, shuffle=False, accumulate=2):
        run.backward(Mean(models[0](batch).sum(), batch.numel()))
        run.backward(Mean(models[1](batch).sum(), len(batch)))
        for each in made:
            run.step(each)
    for batch in DATA.split(6):
        (plain[0](batch).mean() + plain[1](batch).mean()).backward()
        for each in plain_made:
            each.step()
            each.zero_grad()
    for found, expected in zip(weights(models), weights(plain), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_loop_may_accumulate_over_batches_and_epochs(new_run: Runs) -> None:
    """Three batches in an epoch, a step for every two; the second model steps less often than the first."""
    run = new_run()
    models, made = set_up(run)
    plain = pair()
    plain_made = optimizers(plain)
    number = 0
    for _ in run.epochs(4):
        for (batch,) in run.batches(TensorDataset(DATA), 4, shuffle=False):
            number += 1
            run.backward(models[0](batch).mean() / 2)
            run.backward(models[1](batch).mean() / 4)
            if number % 2 == 0:
                run.step(made[0])
            if number % 4 == 0:
                run.step(made[1])
    for number, batch in enumerate(DATA.split(4) * 4, 1):
        (plain[0](batch).mean() / 2).backward()
        (plain[1](batch).mean() / 4).backward()
        for every, each in zip((2, 4), plain_made, strict=True):
            if number % every == 0:
                each.step()
                each.zero_grad()
    assert same(models, plain)
    assert run.progress.examples == 48


@pytest.mark.parametrize("until", range(1, 12))
def test_a_loop_that_accumulates_over_batches_is_resumed_anywhere(new_run: Runs, until: int) -> None:
    """The first model steps at every second of three batches, the other at every fourth."""

    def train(run: Run, number: int, until: int = 100) -> tuple[Pair, int]:
        models, made = set_up(run)
        run.restore()
        for _ in run.epochs(4):
            for (batch,) in run.batches(TensorDataset(DATA), 4, shuffle=False):
                number += 1
                run.backward(models[0](batch).mean() / 2)
                run.backward(models[1](batch).mean() / 4)
                if number % 2 == 0:
                    run.step(made[0])
                if number % 4 == 0:
                    run.step(made[1])
                if number == until:
                    run.checkpoint()
                    return models, number
        return models, number

    whole, _ = train(new_run(), 0)
    if until % 4 == 3:  # the second model has gradients of two batches that are done, and of one that comes again
        with pytest.raises(ConfigError, match="the gradients of 'second' are added up over several batches"):
            train(new_run(folder="other"), 0, until)
        return
    _, number = train(new_run(folder="other"), 0, until)
    # The batches after the last step come again.
    again, _ = train(new_run(folder="other"), number - number % 2)
    assert same(again, whole)


def test_a_value_is_logged_as_it_was(new_run: Runs, tmp_path: Path) -> None:
    run = new_run(log={"every": "3 steps"})
    models, made = set_up(run)
    value = torch.tensor(0.0)
    for (batch,) in run.batches(TensorDataset(DATA), 4, shuffle=False):
        loss = models[0](batch).mean() * 0 + 4.0
        run.log(value=value, part=loss)
        loss /= 2
        run.backward(loss)
        run.step(made[0])
        value += 3
    run._engine.finish()
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert (row["value"], row["part"]) == (3.0, 4.0), "the mean of 0, 3 and 6"


def stepped(run: Run, order: list[str], **more: Any) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    """Two layers of one shape, whose parameters the optimizer gets in some order; a step for a new run."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([named[name] for name in order], lr=0.1)
    run.setup(model, optimizer)
    if not run.restore():
        for (batch,) in run.batches(TensorDataset(DATA), 4):
            run.backward(model(batch).square().mean())
            run.step()
        run.checkpoint()
    return named, optimizer


def test_the_state_of_an_optimizer_goes_by_the_names_of_its_parameters(new_run: Runs) -> None:
    order = ["0.weight", "1.weight"]
    named, before = stepped(new_run(), order)
    again, after = stepped(new_run(), order[::-1])
    for name in order:
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(before.state[named[name]][key], after.state[again[name]][key])


def test_an_optimizer_of_other_parameters_is_refused_by_name(new_run: Runs) -> None:
    stepped(new_run(), ["0.weight"])
    with pytest.raises(ConfigError, match=r"step-00000003: the saved state of the optimizer does not fit: '1\.weight'"):
        stepped(new_run(), ["0.weight", "1.weight"])


def test_an_optimizer_of_another_class_is_refused(new_run: Runs) -> None:
    stepped(new_run(), ["0.weight"])
    run, model = new_run(), nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    run.setup(model, torch.optim.Adam([model[0].weight], lr=0.1))
    with pytest.raises(ConfigError, match="state is that of AdamW, and the optimizer of 'model' is Adam now"):
        run.restore()


class Twice(torch.optim.Optimizer):
    """Steps by another optimizer, whose state is none of its own: as SAM is usually written."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any) -> None:  # type: ignore[override]
        for _ in range(2):
            with torch.enable_grad():
                closure()
            self.base.step()


def test_an_optimizer_within_an_optimizer_is_resumed_too(new_run: Runs) -> None:
    def trained(run: Run, epochs: int) -> tuple[Tensor, Twice]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = Twice(model.parameters())
        run.setup(model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
        run.restore()
        for _ in run.epochs(epochs):
            for (batch,) in run.batches(TensorDataset(DATA), 4):
                run.step(optimizer, lambda batch=batch: run.backward(model(batch).square().mean()))
            run.checkpoint()
        return model.weight.detach().clone(), optimizer

    whole, _ = trained(new_run(), 3)
    shutil.rmtree(new_run().folder / "checkpoints")
    trained(new_run(), 1)
    resumed, optimizer = trained(new_run(), 3)
    assert torch.equal(resumed, whole)
    assert optimizer.param_groups is optimizer.base.param_groups


def test_an_optimizer_with_a_zero_grad_of_its_own_has_it_called_after_a_step(new_run: Runs) -> None:
    cleared = []

    class Own(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            cleared.append(set_to_none)
            super().zero_grad(set_to_none)

    run, model = new_run(), nn.Linear(3, 1)
    optimizer = Own(model.parameters(), lr=0.1)
    run.setup(model, optimizer)
    for _ in run.steps(1):
        run.backward(model(DATA).mean())
        assert run.step()
    assert cleared == [True]
    assert all(each.grad is None for each in model.parameters())


# What a loop does to gradients before run.step


def clipped(run: Run, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(run.module.parameters(), 0.1)


@pytest.mark.parametrize(
    ("accumulate", "counted", "change", "message"),
    [
        (1, False, clipped, None),
        (1, True, clipped, "of 'model' were changed between run.backward and run.step.*set clip_norm"),
        (2, False, clipped, "of 'model' were changed between run.backward and run.step.*set clip_norm"),
        (2, True, lambda run, optimizer: run.gradients(optimizer), None),
        (1, True, lambda run, optimizer: optimizer.zero_grad(), None),
    ],
)
def test_gradients_are_left_alone_until_they_are_those_of_the_batch(
    new_run: Runs, accumulate: int, counted: bool, change: Callable[..., Any], message: str | None
) -> None:
    run, model = new_run(), nn.Linear(3, 1)
    model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with contextlib.nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        for (batch,) in run.batches(TensorDataset(DATA), 4, accumulate=accumulate):
            loss = model(batch).square()
            run.backward(loss.sum() if counted else loss.mean(), len(batch) if counted else None)
            change(run, optimizer)
            run.step()


@pytest.mark.parametrize("where", ["before", "after"])
def test_zero_grad_between_micro_batches_is_refused(new_run: Runs, where: str) -> None:
    run, taken = new_run(), 0
    models, (generator, discriminator) = set_up(run)
    with pytest.raises(
        ConfigError, match=r"zero_grad\(\) of the optimizer of 'second' was called between the micro-batches"
    ):
        for (batch,) in run.batches(TensorDataset(DATA), 4, accumulate=2):
            taken += 1
            run.backward(generated(models, batch))
            run.step(generator)
            if where == "before":
                discriminator.zero_grad()  # drops what the generator's loss left there, and the first part's gradients
            run.backward(discriminated(models, batch))
            run.step(discriminator)
            if where == "after":
                discriminator.zero_grad()
    assert taken == (2 if where == "before" else 1)
