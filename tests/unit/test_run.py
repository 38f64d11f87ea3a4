"""A run in a world of one, without a launcher: what it refuses, and what it must not mix up."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # torch's first optimizer imports it, and it sets an environment variable
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from lockstep.engine.run import Run
from lockstep.engine.stop_requests import Preempted, StopRequests
from lockstep.errors import ConfigError, NonFiniteLoss

Runs = Callable[..., Run]
DATA = TensorDataset(torch.randn(10, 3))


def set_up(run: Run) -> nn.Module:
    model = nn.Linear(3, 1)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model


def train(run: Run, epochs: int, **settings: Any) -> None:
    for _ in run.epochs(epochs):
        for (batch,) in run.batches(DATA, 4, **settings):
            loss = run.model(batch).square().mean()
            run.log(loss=loss)
            run.backward(loss)
            run.step()


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def mean_of(batch: list[Tensor]) -> dict[str, Tensor]:
    return {"mean": batch[0]}


@pytest.mark.requirement("D01")
def test_progress_is_counted_in_steps_batches_examples_and_epochs(new_run: Runs) -> None:
    run = new_run()
    set_up(run)
    assert run.progress.epoch == 0
    train(run, 2)
    progress = run.progress
    assert (progress.epoch, progress.step, progress.batch, progress.examples) == (2, 6, 0, 20)


def test_an_epoch_that_is_left_half_way_is_gone_on_with(new_run: Runs) -> None:
    run = new_run()
    set_up(run)
    seen = []
    for _ in range(3):
        for (batch,) in run.batches(DATA, 4):
            seen += batch[:, 0].tolist()
            run.backward(run.model(batch).sum())
            run.step()
            break
    assert sorted(seen) == sorted(DATA.tensors[0][:, 0].tolist())


def test_a_restored_run_has_weights_progress_and_rows_of_its_checkpoint(new_run: Runs, tmp_path: Path) -> None:
    first = new_run()
    model = set_up(first)
    train(first, 2)
    first.checkpoint()
    saved = {name: each.clone() for name, each in model.state_dict().items()}
    train(first, 3)
    assert rows(tmp_path)[-1]["step"] > 6
    second = new_run()
    restored = set_up(second)
    assert second.restore()
    assert all(torch.equal(restored.state_dict()[name], each) for name, each in saved.items())
    assert second.progress.step == 6
    assert max(row["step"] for row in rows(tmp_path)) == 6


def test_where_there_is_no_checkpoint_the_rows_of_the_run_before_are_forgotten(new_run: Runs, tmp_path: Path) -> None:
    """A run that was killed before its first checkpoint starts anew, and so do its rows."""
    first = new_run()
    set_up(first)
    train(first, 1)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 4, "lo')
    second = new_run()
    set_up(second)
    assert not second.restore()
    train(second, 1)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]


# What must not be mixed up


def test_datasets_that_come_and_go_are_not_taken_for_each_other(new_run: Runs) -> None:
    """Python gives the address of an object that is gone to the next one."""
    run = new_run()
    found = [run.evaluate(mean_of, TensorDataset(torch.full((4,), float(n))), 2)["mean"] for n in range(6)]
    assert found == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_parts_of_a_dataset_that_come_and_go_are_not_taken_for_each_other(new_run: Runs) -> None:
    run, whole = new_run(), TensorDataset(torch.arange(6.0))
    found = [run.evaluate(mean_of, Subset(whole, [n, n]), 2)["mean"] for n in range(6)]
    assert found == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_list_that_grows_is_measured_as_it_is(new_run: Runs) -> None:
    run, data = new_run(), [[torch.tensor(0.0)]]
    found = []
    for n in range(3):
        found.append(run.evaluate(mean_of, data, 2)["mean"])
        data.append([torch.tensor(float(n + 1))])
    assert found == [0.0, 0.5, 1.0]


def test_one_dataset_may_be_collated_in_several_ways(new_run: Runs) -> None:
    run, data = new_run(), TensorDataset(torch.arange(4.0))

    def times(factor: float) -> Callable[[list[Any]], list[Tensor]]:
        return lambda examples: [torch.stack([each[0] for each in examples]) * factor]

    found = [run.evaluate(mean_of, data, 2, collate=collate)["mean"] for collate in (None, times(10), times(100))]
    assert found == [1.5, 15.0, 150.0]


@pytest.mark.requirement("D04")
@pytest.mark.parametrize("on", ["all", "rank0"])
def test_evaluation_leaves_the_model_in_training(new_run: Runs, on: str) -> None:
    run = new_run()
    model = set_up(run)
    found = run.evaluate(lambda batch: {"training": torch.full((len(batch[0]),), model.training)}, DATA, 3, on=on)
    assert found == {"training": 0.0}
    assert model.training


# What is refused


def test_a_loss_that_is_no_scalar_is_refused(new_run: Runs) -> None:
    run = new_run()
    set_up(run)
    with pytest.raises(ConfigError, match=r"the loss must be a scalar, the mean over the batch; got shape \[4\]"):
        run.backward(torch.ones(4, requires_grad=True))


def test_nothing_is_saved_after_a_loss_that_is_no_number(new_run: Runs, tmp_path: Path) -> None:
    run = new_run(log={"every": "100 steps"})
    set_up(run)
    for (batch,) in run.batches(DATA, 5):
        loss = run.model(batch).mean() * (float("nan") if run.progress.step == 1 else 1.0)
        run.log(loss=loss)
        run.backward(loss)
        run.step()
    with pytest.raises(NonFiniteLoss, match="the loss is nan at step 2 on rank 0"):
        run.checkpoint()
    assert not list(tmp_path.glob("checkpoints/*"))


def test_less_data_than_a_batch_with_drop_last_is_refused(new_run: Runs) -> None:
    run = new_run()
    set_up(run)
    with pytest.raises(ConfigError, match="has 10 examples, fewer than one batch of 16, and drop_last leaves out"):
        next(run.batches(DATA, 16, drop_last=True))


@pytest.mark.parametrize("use", [Run.checkpoint, Run.step, lambda run: run.model, lambda run: run.module])
def test_before_set_up_there_is_nothing_to_train(new_run: Runs, use: Callable[[Run], Any]) -> None:
    with pytest.raises(ConfigError, match=r"run\.setup"):
        use(new_run())


def test_weights_that_do_not_fit_are_told_with_the_checkpoint(new_run: Runs) -> None:
    first = new_run()
    set_up(first)
    train(first, 1)
    first.checkpoint()
    second = new_run()
    second.setup(nn.Linear(3, 2))
    with pytest.raises(ConfigError, match=r"step-00000003: the saved weights do not fit this model"):
        second.restore()


def test_asked_to_stop_a_run_saves_and_leaves_between_two_steps(new_run: Runs, tmp_path: Path) -> None:
    request = StopRequests()
    run = new_run(request)
    set_up(run)
    with pytest.raises(Preempted) as left:
        for (batch,) in run.batches(DATA, 4):
            run.backward(run.model(batch).mean())
            run.step()
            request.leave = "SIGTERM"
    assert left.value.reason == "SIGTERM on rank 0"
    assert [path.name for path in tmp_path.glob("checkpoints/step-*")] == ["step-00000001"]


def own_data(run: Run, steps: int, request: StopRequests | None = None, ask_at: int = 0) -> Tensor:
    """A loop that makes its data: random batches, a schedule, an evaluation and logged values after the step."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, scheduler = run.setup(model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
    run.restore()
    for step in run.steps(steps):
        batch = torch.randn(4, 3)
        if request is not None and step == ask_at:
            request.leave = "SIGTERM"
        run.backward(model(batch).square().mean())
        run.step()
        run.evaluate(lambda batch: {"seen": run.module(batch[0])[:, 0]}, DATA, 4)
        scheduler.step()
        run.log(own=float(step))
    return torch.cat([each.detach().flatten().clone() for each in model.parameters()])


def test_a_loop_with_its_own_data_stops_logs_and_resumes_between_steps(new_run: Runs, tmp_path: Path) -> None:
    request = StopRequests()
    with pytest.raises(Preempted):
        own_data(new_run(request), 6, request, ask_at=2)
    assert [path.name for path in tmp_path.glob("checkpoints/step-*")] == ["step-00000003"]
    assert [(each["step"], each["own"]) for each in rows(tmp_path)] == [(1, 0.0), (2, 1.0), (3, 2.0)]
    resumed = new_run()
    weights = own_data(resumed, 6)
    assert resumed.progress.step == 6
    resumed._engine.finish()
    assert [(each["step"], each["own"]) for each in rows(tmp_path)] == [(n + 1, float(n)) for n in range(6)]
    shutil.rmtree(tmp_path / "checkpoints")
    assert torch.equal(weights, own_data(new_run(), 6)), "the schedule and the random data continue where they were"


def test_a_save_is_made_between_the_steps_of_a_loop_with_its_own_data(new_run: Runs, tmp_path: Path) -> None:
    """An iteration is one step, whatever the optimizers do in it: both step, one alone, none, or one twice."""
    request = StopRequests()
    run = new_run(request)
    one, two = nn.Linear(3, 1), nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1))
    one, first = run.setup(one, torch.optim.SGD(one.parameters(), lr=0.1), name="one")
    two, second = run.setup(two, torch.optim.SGD(two.parameters(), lr=0.1), name="two")
    for step in run.steps(5):
        stepped = [(one, first), (two, second)] * (step < 2) + [(one, first)] * (step - 2)
        for model, optimizer in stepped:
            run.backward(model(torch.randn(4, 3)).square().mean())
            request.save = step == 1
            run.step(optimizer)
            with torch.no_grad():
                model(torch.randn(4, 3))  # a call of a module in an iteration does not save
        assert run.progress.step == step + bool(stepped)
    assert run.progress.step == 5
    assert [path.name for path in tmp_path.glob("checkpoints/step-*")] == ["step-00000002"]


def test_the_last_step_of_a_loop_with_its_own_data_is_saved_when_it_was_asked_for(
    new_run: Runs, tmp_path: Path
) -> None:
    request = StopRequests()
    with pytest.raises(Preempted):
        own_data(new_run(request), 3, request, ask_at=2)
    assert [path.name for path in tmp_path.glob("checkpoints/step-*")] == ["step-00000003"]
    own_data(new_run(), 3)  # nothing is left to do


def test_gradients_may_wait_over_several_steps_of_a_loop_with_its_own_data(new_run: Runs) -> None:
    def loop(run: Run, until: int) -> Tensor:
        model = nn.Linear(3, 1)
        run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run.restore()
        for step in run.steps(until):
            run.backward(model(torch.randn(4, 3)).square().mean())
            if step % 3 == 2:
                run.step()
        run.checkpoint()
        return model.weight.detach().clone()

    loop(new_run(), 4)
    resumed = loop(new_run(), 6)
    run = new_run()
    shutil.rmtree(run.folder / "checkpoints")
    assert torch.equal(resumed, loop(run, 6))


@pytest.mark.parametrize(
    "use",
    [
        lambda run: run.backward(run.model(DATA[:][0]).mean()),
        lambda run: run.step(run.optimizer, lambda: run.backward(run.model(DATA[:][0]).mean())),
    ],
)
def test_a_loop_that_can_be_neither_stopped_nor_saved_is_refused(new_run: Runs, use: Callable[[Run], Any]) -> None:
    run = new_run()
    set_up(run)
    with pytest.raises(ConfigError, match=r"comes outside of a batch.* for step in run\.steps\(count\)"):
        use(run)


def test_steps_and_batches_are_not_combined(new_run: Runs) -> None:
    run = new_run()
    set_up(run)
    mixed = r"run\.steps: is for loops that make their data, and cannot be combined with run\.batches"
    for _ in run.steps(1):
        with pytest.raises(ConfigError, match=mixed):
            next(run.batches(DATA, 4))
    for _ in run.batches(DATA, 4):
        with pytest.raises(ConfigError, match=mixed):
            next(run.steps(2))


# What is left of a plain loop when it is ported by hand


def test_an_optimizer_that_the_loop_steps_itself_is_refused(new_run: Runs) -> None:
    run = new_run()
    model = set_up(run)
    assert run.optimizer is not None
    for (batch,) in run.batches(DATA, 4):
        model(batch).square().mean().backward()
        with pytest.raises(ConfigError, match=r"Replace loss\.backward\(\) and optimizer\.step\(\) by run\.backward"):
            run.optimizer.step()


def no_step(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if "and no run.step" in each.getMessage()]


@pytest.mark.parametrize("clears", [True, False])
def test_a_loop_without_run_step_is_told_so(new_run: Runs, caplog: pytest.LogCaptureFixture, clears: bool) -> None:
    run = new_run()
    set_up(run)
    for epoch in run.epochs(2):
        for (batch,) in run.batches(DATA, 2):
            run.backward(run.model(batch).square().mean())
            if clears and run.optimizer is not None:
                run.optimizer.zero_grad()
        assert len(no_step(caplog)) == (1 if clears or epoch else 0)
    assert "backward passes and no run.step: no weight has changed. Call run.step(optimizer)" in no_step(caplog)[0]


def test_loops_that_accumulate_or_have_several_passes_are_not_warned_of(
    new_run: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    run = new_run()
    set_up(run)
    for _ in run.epochs(2):
        for number, (batch,) in enumerate(run.batches(DATA, 1)):
            run.backward(run.model(batch).square().mean())
            if (number + 1) % 5 == 0:  # by its own counting
                run.step()
    for _ in run.steps(6):
        for reward in range(200):  # a pass of its own for each
            run.backward(run.model(torch.randn(1, 3)).mean() * reward)
        run.step()
    run._engine.finish()
    assert run.progress.step == 6
    assert not no_step(caplog)


def test_what_a_run_has_no_need_of_is_not_imported() -> None:
    heavy = ("torch.distributed.tensor", "torch._dynamo", "sympy", "transformers", "torchmetrics", "datasets", "wandb")
    code = f"import sys, lockstep.worker, lockstep.tasks.trainer; print([m for m in {heavy} if m in sys.modules])"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "[]"


def test_an_optimizer_that_needs_a_closure_says_so_and_what_it_cannot_be_combined_with(new_run: Runs) -> None:
    run, model = new_run(), nn.Linear(1, 1)
    model, optimizer = run.setup(model, torch.optim.LBFGS(model.parameters()), on_nan="skip")
    with pytest.raises(ConfigError, match=r"LBFGS computes the loss itself.*run.step\(optimizer, closure\)"):
        run.step()
    with pytest.raises(ConfigError, match=r"LBFGS evaluates a closure .* cannot be used with on_nan: skip"):
        run.step(optimizer, lambda: None)
    run, model = new_run(), nn.Linear(1, 1)
    model, optimizer = run.setup(model, torch.optim.LBFGS(model.parameters()))
    for _ in run.steps(1):
        with pytest.raises(ConfigError, match=r"the closure called run\.backward 0 times"):
            run.step(optimizer, lambda: None)
