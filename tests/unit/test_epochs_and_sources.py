"""What belongs to an epoch, where training is in each of its sources, and what a step is: also after a stop."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import Dataset, IterableDataset, TensorDataset, random_split

from lockstep.engine.run import Run
from lockstep.engine.stop_requests import Preempted, StopRequests
from lockstep.errors import ConfigError, NonFiniteLoss, NonFiniteWeights
from lockstep.evaluation.means import Mean

Runs = Callable[..., Run]


def numbered(count: int, start: int = 0) -> TensorDataset:
    return TensorDataset(torch.arange(start, start + count, dtype=torch.float32).reshape(-1, 1))


def set_up(run: Run, **more: Any) -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.setup(model, optimizer, **more)
    return model, optimizer


def step(run: Run, batch: Tensor) -> None:
    run.backward(run.model(batch).mean())
    run.step()


def manifest(folder: Path, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "checkpoints" / f"step-{step:08d}" / "manifest.json").read_text())
    return found


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# What follows an epoch


def with_a_tail(run: Run, requests: StopRequests, ask: tuple[str, int] | None = None) -> tuple[float, list[int]]:
    """Three epochs of two steps, and what follows each of them: the learning rate at the end, and which tails ran."""
    _, optimizer = set_up(run)
    scheduler = ExponentialLR(optimizer, 0.5)
    run.register_state("scheduler", scheduler)
    run.restore()
    tails = []
    for epoch in run.epochs(3):
        for (batch,) in run.batches(numbered(8), 4):
            step(run, batch)
            if ask is not None and run.progress.step == ask[1]:
                setattr(requests, ask[0], "SIGTERM" if ask[0] == "leave" else True)
        scheduler.step()
        tails.append(epoch)
        run.checkpoint(value=float(epoch))
    return optimizer.param_groups[0]["lr"] / 0.01, tails


@pytest.mark.parametrize("at", [1, 2, 3, 4, 6])
def test_what_follows_an_epoch_happens_once_wherever_the_run_was_stopped(new_run: Runs, at: int) -> None:
    """SIGTERM in the last step of an epoch: the scheduler's step, the evaluation and the save after it are due."""
    requests = StopRequests()
    with pytest.raises(Preempted):
        with_a_tail(new_run(requests), requests, ("leave", at))
    rate, tails = with_a_tail(new_run(), StopRequests())
    assert rate == pytest.approx(0.125)
    assert tails == list(range((at - 1) // 2, 3))


def test_a_save_after_an_automatic_one_of_the_same_step_has_its_value_and_what_changed(
    new_run: Runs, tmp_path: Path
) -> None:
    requests = StopRequests()
    with_a_tail(new_run(requests), requests, ("save", 4))
    assert manifest(tmp_path, 4)["value"] == 1.0
    state = json.loads((tmp_path / "checkpoints" / "step-00000004" / "state.json").read_text())["state"]
    assert state["attached"]["scheduler"]["last_epoch"] == 2


def test_a_step_is_saved_again_where_weights_or_buffers_have_changed_since(new_run: Runs, tmp_path: Path) -> None:
    run = new_run()
    model = nn.BatchNorm1d(1)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found: list[Any] = []

    def save() -> None:
        run.checkpoint()
        file = tmp_path / "checkpoints" / "step-00000000" / "model.safetensors"
        found.append((file.stat().st_ino, load_file(file)))

    save()
    save()
    model.running_mean += 1.0  # type: ignore[operator]
    save()
    run = new_run()
    model = nn.BatchNorm1d(1)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.restore()
    save()
    model.load_state_dict({**model.state_dict(), "weight": torch.full((1,), 3.0)})
    save()
    files, states = zip(*found, strict=True)
    assert files[0] == files[1] != files[2] == files[3] != files[4], "written only where something has changed"
    assert [each["running_mean"].item() for each in states] == [0.0, 0.0, 1.0, 1.0, 1.0]
    assert [each["weight"].item() for each in states][3:] == [1.0, 3.0]


def test_an_automatic_save_does_not_take_away_what_a_checkpoint_is_judged_by(new_run: Runs, tmp_path: Path) -> None:
    requests = StopRequests()
    run = new_run(requests)
    set_up(run)
    for (batch,) in run.batches(numbered(8), 4):
        step(run, batch)
        if run.progress.step == 1:
            run.checkpoint(value=0.5, metrics={"error": 0.5})
            requests.save = True
    assert (manifest(tmp_path, 1)["value"], manifest(tmp_path, 1)["metrics"]) == (0.5, {"error": 0.5})


def walk(run: Run, data: Any, batch_size: int = 4, **how: Any) -> Any:
    """One call of run.batches for both starts of a run, as a program has it."""
    return run.batches(data, batch_size, **how)


def test_a_save_in_the_last_step_of_an_epoch_leaves_what_follows_to_be_done(new_run: Runs) -> None:
    first = new_run()
    set_up(first)
    for _ in first.epochs(1):
        for (batch,) in walk(first, numbered(8)):
            step(first, batch)
            first.checkpoint()
    second = new_run()
    set_up(second)
    second.restore()
    seen = [(epoch, len(list(walk(second, numbered(8))))) for epoch in second.epochs(2)]
    assert seen == [(0, 0), (1, 2)]


def test_an_epoch_counts_iterations_of_the_loop_also_where_it_takes_a_part_of_the_data(new_run: Runs) -> None:
    run = new_run()
    set_up(run)
    seen: list[list[float]] = []
    for _ in run.epochs(3):
        seen.append([])
        for (batch,) in run.batches(numbered(12), 4, shuffle=False):
            seen[-1] += batch.flatten().tolist()
            step(run, batch)
            if len(seen[-1]) == 8:
                break
    assert seen == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11], [0, 1, 2, 3, 4, 5, 6, 7]]


# Several sources


def walked(run: Run, epochs: int, after: int | None = None) -> list[tuple[str, float]]:
    """Two passes in every epoch, over A and over B: the first example of every batch."""
    a, b = numbered(8), numbered(4, start=100)
    found: list[tuple[str, float]] = []
    for _ in run.epochs(epochs):
        for name, data in (("a", a), ("b", b)):
            for (batch,) in run.batches(data, 4, shuffle=False):
                found.append((name, batch[0].item()))
                step(run, batch)
                if run.progress.step == after:
                    run.checkpoint()
                    return found
    return found


WHOLE = [("a", 0.0), ("a", 4.0), ("b", 100.0)]


def test_an_epoch_that_is_left_at_its_end_is_done(new_run: Runs, tmp_path: Path) -> None:
    """As by a limit of steps: what is saved then says so, and a longer run begins the next one."""

    def loop(run: Run, until: int) -> list[int]:
        set_up(run)
        run.restore()
        began = []
        for epoch in run.epochs(3):
            began.append(epoch)
            for (batch,) in run.batches(numbered(4), 2):
                step(run, batch)
            if run.progress.step >= until:
                break
        run.checkpoint()
        run._engine.finish()
        return began

    assert loop(new_run(), 4) == [0, 1]
    assert manifest(tmp_path, 4)["epoch"] == 2
    assert loop(new_run(), 6) == [2]


def test_two_sources_in_one_epoch_do_not_skip_each_others_epochs(new_run: Runs) -> None:
    run = new_run()
    set_up(run)
    assert walked(run, 2) == WHOLE * 2


@pytest.mark.parametrize("after", [1, 2, 3, 4, 5])
def test_a_run_with_two_sources_goes_on_in_the_one_it_was_in(new_run: Runs, after: int) -> None:
    first, second = new_run(), new_run()
    set_up(first)
    begun = walked(first, 2, after)
    set_up(second)
    assert second.restore()
    assert begun + walked(second, 2) == WHOLE * 2


def test_two_sources_may_be_walked_together(new_run: Runs) -> None:
    run = new_run()
    set_up(run)
    for _ in run.epochs(2):
        pairs = zip(run.batches(numbered(8), 4, shuffle=False), run.batches(numbered(8, 100), 4, shuffle=False))  # noqa: B905
        seen = []
        for (left,), (right,) in pairs:
            seen.append((left[0].item(), right[0].item()))
            step(run, left + right)
        assert seen == [(0.0, 100.0), (4.0, 104.0)]
    assert (run.progress.step, run.progress.examples) == (4, 32)


def test_in_a_loop_within_a_loop_requests_wait_for_the_outer_one(new_run: Runs) -> None:
    """What the outer loop does with its batch is done once, whenever the run is asked to stop."""

    def loop(run: Run, seen: list[Any], ask_at: int | None = None) -> None:
        set_up(run)
        run.restore()
        for _ in run.epochs(2):
            for (outer,) in run.batches(numbered(4), 2, shuffle=False):
                for _ in range(2):
                    for (inner,) in run.batches(numbered(6), 2, shuffle=False, name="inner"):
                        step(run, inner)
                        seen.append((int(outer[0]), int(inner[0])))
                        if run.progress.step == ask_at:
                            requests.leave = "SIGTERM"
                seen.append(f"after {int(outer[0])}")

    requests, whole = StopRequests(), list[Any]()
    loop(new_run(), whole)
    assert len(whole) == 2 * 2 * (6 + 1)
    for ask_at in (1, 5, 8, 12):
        requests, seen = StopRequests(), list[Any]()
        with pytest.raises(Preempted):
            loop(new_run(requests), seen, ask_at)
        loop(new_run(), seen)
        assert seen == whole
        shutil.rmtree(new_run().folder / "checkpoints")


def test_two_loops_that_a_resumed_run_could_not_continue_are_refused(new_run: Runs) -> None:
    run = new_run()
    set_up(run)
    with pytest.raises(ConfigError, match=r"loop over source 2 within a batch of source 1: .* Call it in the loop"):
        for (outer,) in run.batches(numbered(4), 2):
            for (inner,) in run.batches(numbered(6), 2):
                step(run, inner + outer)
                run.checkpoint()
    run = new_run()
    set_up(run)
    with pytest.raises(ConfigError, match=r"pass over source 2 has ended, and the loop continues with source 1 alone"):
        short = itertools.cycle(run.batches(numbered(2), 1, name="source 2"))
        for (one,), (two,) in zip(run.batches(numbered(6), 1, name="source 1"), short, strict=False):
            step(run, one + two)
    run = new_run()
    set_up(run)
    with pytest.raises(ConfigError, match=r"over source 2 is within the one over source 1, whose batches are in parts"):
        for _ in run.batches(numbered(4), 2, accumulate=2):
            for (inner,) in run.batches(numbered(6), 2, accumulate=2):
                step(run, inner)


def test_a_shorter_source_may_begin_again(new_run: Runs) -> None:
    def again(run: Run) -> Iterator[Any]:
        while True:
            yield from run.batches(numbered(4), 2, name="short")

    def loop(run: Run, until: int) -> list[Any]:
        set_up(run)
        run.restore()
        seen = []
        for _ in run.epochs(2):
            for (one,), (two,) in zip(run.batches(numbered(10), 2, name="long"), again(run), strict=False):
                step(run, one + two)
                seen.append((one[:, 0].tolist(), two[:, 0].tolist()))
                if run.progress.step == until:
                    run.checkpoint()
                    return seen
        return seen

    whole = loop(new_run(), 10)
    shutil.rmtree(new_run().folder / "checkpoints")
    assert loop(new_run(), 4) + loop(new_run(), 7) + loop(new_run(), 10) == whole


def test_what_follows_two_sources_that_were_walked_together_is_saved_as_done(new_run: Runs) -> None:
    """Also where something still holds on to them."""
    first, second = new_run(), new_run()
    a, b = numbered(8), numbered(8, 100)

    def pairs(run: Run) -> Any:
        return zip(run.batches(a, 4), run.batches(b, 4), strict=False)

    set_up(first)
    for _ in first.epochs(1):
        held = pairs(first)
        for (left,), _ in held:
            step(first, left)
        first.checkpoint()
    set_up(second)
    second.restore()
    assert second.progress.epoch == 1
    for _ in second.epochs(2):
        assert len(list(pairs(second))) == 2


def first_of(batches: Any, run: Run, count: int = 100) -> list[float]:
    """The first example of every batch that was trained on, at most so many."""
    found = []
    for (batch,) in batches:
        found.append(batch[0].item())
        step(run, batch)
        if len(found) == count:
            break
    return found


class Endless(IterableDataset[Any]):
    def __init__(self, start: float) -> None:
        self.start = start

    def __iter__(self) -> Any:
        return ([torch.tensor([self.start + number])] for number in range(40))


@pytest.mark.parametrize(
    "make",
    [
        lambda: (numbered(40), numbered(40, 100)),
        lambda: random_split(numbered(80), [40, 40]),
        lambda: ([[torch.tensor([float(n)])] for n in range(40)], [[torch.tensor([100.0 + n])] for n in range(40)]),
        lambda: (Endless(0.0), Endless(100.0)),
    ],
    ids=["tensors", "random_split", "lists", "streams"],
)
def test_two_sources_that_look_alike_have_a_position_each(new_run: Runs, make: Callable[[], Any]) -> None:
    run = new_run()
    set_up(run)
    a, b = make()
    whole_a, whole_b = ([each[0].item() for each in list(data)] for data in (a, b))
    for epoch in run.epochs(2):
        left = first_of(run.batches(a, 4, shuffle=False), run, 3)
        right = first_of(run.batches(b, 4, shuffle=False), run)
        assert right == whole_b[::4]
        assert left == whole_a[12 * epoch :: 4][:3], "it continues where it was left"


def test_sources_that_one_call_walks_and_that_look_alike_need_names(new_run: Runs) -> None:
    run = new_run()
    set_up(run)
    both = {"left": numbered(8), "right": numbered(8, 100)}
    with pytest.raises(ConfigError, match=r"this TensorDataset of 8 .* distinguished from source 1: .* name='a'"):
        for data in both.values():
            first_of(run.batches(data, 4), run)
    named = new_run()
    set_up(named)
    for _ in named.epochs(2):
        for name, data in both.items():
            assert len(first_of(named.batches(data, 4, name=name), named)) == 2


@pytest.mark.parametrize("length", [8, 16])
def test_a_resumed_run_gives_every_source_its_own_position(new_run: Runs, length: int) -> None:
    """A set that is walked in epoch 0 alone came first; the run is resumed in epoch 1."""
    warm_up, main = numbered(length, 100), numbered(16)

    def train(run: Run, until: int | None = None) -> list[float]:
        set_up(run)
        run.restore()
        seen: list[float] = []
        for epoch in run.epochs(2):
            if epoch == 0:
                seen += first_of(run.batches(warm_up, 4, shuffle=False), run)
            for (batch,) in run.batches(main, 4, shuffle=False):
                seen.append(batch[0].item())
                step(run, batch)
                if run.progress.step == until:
                    run.checkpoint()
                    return seen
        return seen

    steps = length // 4 + 8
    for until in range(length // 4 + 1, steps):
        whole = [*(100.0 + 4 * n for n in range(length // 4)), *[0.0, 4.0, 8.0, 12.0] * 2]
        begun = train(new_run(), until)
        assert begun + train(new_run()) == whole, f"resumed after step {until}"
        shutil.rmtree(new_run().folder / "checkpoints")


def test_a_source_that_fits_none_of_a_checkpoint_is_refused_in_the_middle_of_a_pass(new_run: Runs) -> None:
    first, second = new_run(), new_run()
    set_up(first)
    program: dict[str, Any] = {}
    exec("def before_an_edit(run, data):\n    return run.batches(data, 4)", program)
    for (batch,) in program["before_an_edit"](first, numbered(16)):
        step(first, batch)
        first.checkpoint()
        break
    set_up(second)
    second.restore()
    others = [[torch.tensor([1.0])] for _ in range(8)]
    with pytest.raises(ConfigError, match=r"this list of 8 examples is none of .*source 1: a TensorDataset of 16"):
        next(second.batches(others, 4))
    assert len(list(second.batches(others, 4, name="new"))) == 2
    with pytest.raises(ConfigError, match="count 16 -> 8"):
        next(second.batches(others, 4, name="source 1"))


def test_a_source_waits_for_its_own_call_of_run_batches(new_run: Runs) -> None:
    """After a restore, another one of the same type and length may be it or not; one of another length is not."""
    first, second = new_run(), new_run()
    set_up(first)
    for (batch,) in walk(first, numbered(16)):
        step(first, batch)
        first.checkpoint()
        break
    set_up(second)
    second.restore()
    with pytest.raises(ConfigError, match="this TensorDataset of 16 examples may be source 1 of the checkpoint"):
        next(second.batches(numbered(16), 4))
    assert len(list(second.batches(numbered(12), 4))) == 3
    assert len(list(walk(second, numbered(16)))) == 3


def test_a_source_that_two_calls_walk_is_found_by_both(new_run: Runs) -> None:
    def passes(run: Run, epochs: int) -> list[int]:
        data, found = numbered(8), []
        for _ in run.epochs(epochs):
            for (batch,) in run.batches(data, 8):
                step(run, batch)
                found.append(run._engine.feed.cursors.find(data, 8, None).epoch)
            for (batch,) in run.batches(data, 8):
                step(run, batch)
                found.append(run._engine.feed.cursors.find(data, 8, None).epoch)
        return found

    first, second = new_run(), new_run()
    set_up(first)
    assert passes(first, 1) == [0, 1]
    first.checkpoint()
    set_up(second)
    second.restore()
    assert passes(second, 2) == [2, 3]


def test_the_same_data_is_not_walked_twice_at_once(new_run: Runs) -> None:
    run, data = new_run(), numbered(8)
    first = run.batches(data, 4)
    next(first)
    with pytest.raises(ConfigError, match="is being walked already"):
        next(run.batches(data, 4))
    assert len(next(run.batches(data, 4, name="again"))[0]) == 4


def test_a_dataset_that_is_made_anew_for_every_epoch_is_one_source(new_run: Runs) -> None:
    run = new_run()
    set_up(run)
    orders = []
    for _ in run.epochs(2):
        orders.append([])
        for (batch,) in run.batches(numbered(32), 8):
            orders[-1] += batch.flatten().tolist()
            step(run, batch)
    assert orders[0] != orders[1], "every epoch has its own order"


@pytest.mark.parametrize(
    ("dataset", "how", "told"),
    [
        (numbered(16), {"batch_size": 2}, "batch_size 4 -> 2"),
        (numbered(20), {"batch_size": 4}, "count 16 -> 20"),
        (numbered(16), {"batch_size": 4, "shuffle": False}, "order 'shuffled' -> 'sequential'"),
    ],
)
def test_an_own_loop_is_not_gone_on_with_what_its_position_does_not_fit(
    new_run: Runs, dataset: Dataset[Any], how: dict[str, Any], told: str
) -> None:
    first = new_run()
    set_up(first)
    for (batch,) in walk(first, numbered(16)):
        step(first, batch)
        first.checkpoint()
        break
    second = new_run()
    set_up(second)
    second.restore()
    with pytest.raises(ConfigError, match=told):
        next(walk(second, dataset, **how))


def test_between_two_epochs_the_data_may_change(new_run: Runs) -> None:
    first, second = new_run(), new_run()
    set_up(first)
    for _ in first.epochs(1):
        for (batch,) in first.batches(numbered(16), 4):
            step(first, batch)
        first.checkpoint()
    set_up(second)
    second.restore()
    assert [len(list(second.batches(numbered(20), 2))) for _ in second.epochs(2)] == [10]


def test_a_checkpoint_before_the_last_pass_of_an_epoch_is_told(new_run: Runs, caplog: pytest.LogCaptureFixture) -> None:
    run = new_run()
    set_up(run)
    with caplog.at_level(logging.WARNING):
        for _ in run.epochs(1):
            for (batch,) in run.batches(numbered(4), 4):
                step(run, batch)
            run.checkpoint()
            for (batch,) in run.batches(numbered(8), 4):
                step(run, batch)
    assert "before the pass over source 2" in caplog.text


# A step


def test_two_optimizers_are_one_step_and_both_get_the_right_gradients(new_run: Runs) -> None:
    """accumulate=2, and a last batch that is short: weights are those of the micro-batch for both."""
    run = new_run()
    first, second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    optimizers = [torch.optim.SGD(each.parameters(), lr=1.0) for each in (first, second)]
    for name, model, optimizer in zip(("first", "second"), (first, second), optimizers, strict=True):
        nn.init.zeros_(model.weight)
        run.setup(model, optimizer, name=name)
    found = []
    for (batch,) in run.batches(numbered(6), 4, shuffle=False, accumulate=2):
        for name, optimizer in zip(("first", "second"), optimizers, strict=True):
            run.backward(run.models[name](batch).mean())
            run.step(optimizer)
        found.append((first.weight.item(), second.weight.item()))
    assert found[-1] == (-1.5 - 4.5, -1.5 - 4.5)
    assert (run.progress.step, run.progress.examples) == (2, 6)


def test_a_batch_that_is_left_half_way_leaves_nothing_behind(new_run: Runs) -> None:
    run = new_run()
    model, _ = set_up(run)
    data = numbered(4)
    for (batch,) in run.batches(data, 4, shuffle=False, accumulate=2):
        run.backward(run.model(batch).mean())
        assert not run.step()
        break
    for (batch,) in run.batches(data, 4, shuffle=False):
        run.backward(run.model(batch).mean())
        assert model.weight.grad is not None and model.weight.grad.item() == 1.5, "of this batch alone"
        run.step()


def test_an_optimizer_that_setup_does_not_know_is_refused(new_run: Runs) -> None:
    run = new_run()
    set_up(run)
    stranger = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=r"an optimizer that run\.setup does not know"):
        run.step(torch.optim.SGD(stranger.parameters(), lr=0.1))
    other = nn.Linear(1, 1)
    both = torch.optim.SGD([*other.parameters(), *stranger.parameters()], lr=0.1)
    run.setup(other, both, name="other")
    with pytest.raises(ConfigError, match="2 of the 4 parameters of this optimizer belong to no model"):
        run.step(both)


# What must be a number


def test_weights_that_are_no_numbers_are_never_saved(new_run: Runs, tmp_path: Path) -> None:
    """The loss is finite, its gradient is not: sqrt at 0."""
    run = new_run()
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for (batch,) in run.batches(numbered(2), 2):
        run.backward((run.model(batch) * 0).abs().sqrt().mean())
        run.step()
    with pytest.raises(NonFiniteWeights, match="the parameter weight is not finite at step 1"):
        run.checkpoint()
    assert not list(tmp_path.glob("checkpoints/step-*"))


@pytest.mark.parametrize("name", ["train_loss", "loss", None])
def test_a_loss_that_is_no_number_is_noticed_whatever_it_is_logged_as(new_run: Runs, name: str | None) -> None:
    run = new_run()
    set_up(run)

    def train() -> None:
        for (batch,) in run.batches(numbered(8), 2):
            loss = run.model(batch).mean() * float("nan")
            if name:
                run.log(**{name: loss})
            run.backward(loss)
            run.step()

    with pytest.raises(NonFiniteLoss, match="the loss is nan at step 1 on rank 0"):
        train()


@pytest.mark.parametrize("loss", [{"loss": 1.0}, 1.0, None])
def test_a_loss_of_another_type_is_told(new_run: Runs, loss: Any) -> None:
    run = new_run()
    set_up(run)
    with pytest.raises(ConfigError, match=f"got a {type(loss).__name__}"):
        run.backward(loss)


# Attached, logged, loaded


def test_what_is_attached_after_the_restore_is_restored(new_run: Runs) -> None:
    first, second = new_run(), new_run()
    _, optimizer = set_up(first)
    scheduler = ExponentialLR(optimizer, 0.5)
    first.register_state("mine", scheduler)
    scheduler.step()
    first.checkpoint()
    _, other = set_up(second)
    second.restore()
    late = ExponentialLR(other, 0.5)
    second.register_state("mine", late)
    assert late.last_epoch == 1


def test_what_was_not_attached_again_is_saved_again(new_run: Runs) -> None:
    late = None
    for number in range(3):
        run = new_run()
        _, optimizer = set_up(run)
        run.restore()
        if number != 1:
            late = ExponentialLR(optimizer, 0.5)
            run.register_state("mine", late)
        for (batch,) in walk(run, numbered(4), 2):
            step(run, batch)
            if late is not None and number == 0:
                late.step()
        run.checkpoint()
    assert late is not None and late.last_epoch == 2


def test_a_row_has_the_learning_rate_of_its_step(new_run: Runs, tmp_path: Path) -> None:
    run = new_run()
    _, optimizer = set_up(run)
    scheduler = ExponentialLR(optimizer, 0.5)
    for (batch,) in run.batches(numbered(4), 2):
        step(run, batch)
        scheduler.step()
    assert [row["lr"] for row in rows(tmp_path)] == [0.01, 0.005]


def test_what_is_logged_outside_of_a_batch_has_a_row_of_its_own(new_run: Runs, tmp_path: Path) -> None:
    run = new_run()
    set_up(run)
    for epoch in run.epochs(2):
        for (batch,) in run.batches(numbered(4), 2):
            step(run, batch)
        run.log(error=float(epoch))
    run._engine.finish()
    found = [(row["step"], row["epoch"], row["error"]) for row in rows(tmp_path) if "error" in row]
    assert found == [(2, 1, 0.0), (4, 2, 1.0)]
    assert all("lr" not in row for row in rows(tmp_path) if "error" in row)


def test_a_resumed_run_writes_no_row_twice(new_run: Runs, tmp_path: Path) -> None:
    """Values of the same step, before and after its save."""
    first, second = new_run(), new_run()
    for run in (first, second):
        set_up(run)
        run.restore()
        for (batch,) in run.batches(numbered(4), 4):
            step(run, batch)
            run.checkpoint()
        run.log(after=1.0)
        run._engine.aggregator.bring_together(run.progress)
    assert [row["after"] for row in rows(tmp_path) if "after" in row] == [1.0]


class Counting(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


def children() -> int:
    import psutil

    def counts(process: psutil.Process) -> bool:
        try:
            return "resource_tracker" not in " ".join(process.cmdline())
        except psutil.NoSuchProcess:  # it has ended
            return False

    return sum(map(counts, psutil.Process().children()))


def test_a_lambda_to_collate_by_does_not_leave_workers_behind(new_run: Runs) -> None:
    run, data = new_run(data={"workers": 1}), Counting()
    set_up(run)
    before, found = children(), []
    for _ in run.epochs(3):
        for batch in run.batches(data, 4, collate=lambda examples: torch.stack(examples)):
            step(run, batch)
        found.append(children() - before)
    assert max(found) <= 1, found


def test_data_may_be_evaluated_in_the_midst_of_its_own_epoch(new_run: Runs) -> None:
    run, data = new_run(data={"workers": 1}), Counting()
    set_up(run)
    seen: list[float] = []
    for batch in run.batches(data, 4, shuffle=False):
        seen += batch.flatten().tolist()
        assert run.evaluate(lambda each: {"mean": each.flatten()}, data, 4)["mean"] == 3.5
        step(run, batch)
    assert seen == [float(each) for each in range(8)]


# Sums and counts


def test_a_mean_over_tokens_is_that_of_the_whole_batch(new_run: Runs) -> None:
    """However it is taken apart: the gradient is that of total / count, and so is what is logged."""
    values = torch.arange(1.0, 13.0).reshape(6, 2)
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 0], [1, 0], [1, 1]], dtype=torch.float32)
    expected = (values * mask).sum() / mask.sum()
    for accumulate in (1, 2, 3, 6):
        run = new_run()
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        run.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for inputs, weights in run.batches(TensorDataset(values, mask), 6, accumulate=accumulate):
            total = (run.model(inputs.reshape(-1, 1)).flatten() * weights.flatten()).sum()
            run.log(value=Mean((inputs * weights).sum(), weights.sum()))
            run.backward(total, count=weights.sum())
            run.step()
        assert model.weight.item() == pytest.approx(-expected.item(), rel=1e-6)
        assert run._engine.aggregator.latest.get("value", 0) == pytest.approx(expected.item(), rel=1e-6)


def test_sums_that_cannot_be_told_apart_are_refused(new_run: Runs) -> None:
    run = new_run()
    set_up(run)
    for (batch,) in run.batches(numbered(4), 4):
        run.backward(run.model(batch).sum(), count=4)
        run.backward(run.model(batch).mean())
        with pytest.raises(ConfigError, match="2 backward passes came before it, and 1 of them gave a sum and a count"):
            run.step()


def test_metrics_may_be_sums_and_counts(new_run: Runs) -> None:
    run = new_run()
    found = run.evaluate(
        lambda batch: {"big": Mean(batch[0][batch[0] > 2].sum(), (batch[0] > 2).sum())}, numbered(6), 4
    )
    assert found == {"big": 4.0}


def test_a_metric_that_is_one_number_per_batch_is_refused_with_the_remedy(new_run: Runs) -> None:
    with pytest.raises(ConfigError, match=r"metric 'auc' is a single number for a batch of 4 .* lockstep\.Mean"):
        new_run().evaluate(lambda batch: {"auc": batch[0].mean()}, numbered(6), 4)
