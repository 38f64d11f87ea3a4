"""The orders in which an epoch visits its examples: what they promise, and what is refused."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # torch's first optimizer imports it, and it sets an environment variable
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from conftest import TASK_FILE
from lockstep.config.schema import After, RunConfig
from lockstep.config.training import Data
from lockstep.data.batches import GlobalBatches
from lockstep.data.loader import BatchFetcher, Loader
from lockstep.data.order import Buckets, CustomOrder, Order, Shuffled, Weighted, choose
from lockstep.data.permutation import SORTED_UP_TO, Part, Permutation, Split, split_dataset
from lockstep.data.workers import Loading
from lockstep.engine.run import Run
from lockstep.errors import ConfigError
from lockstep.tasks import evaluate, trainer
from lockstep.tasks.setup import order_of
from tasks import Tiny

Runs = Callable[..., Run]
quick = settings(deadline=None, max_examples=40)
LARGE = 100_003  # more than is sorted, and no power of two


def whole(order: Order, epoch: int = 0) -> list[int]:
    return [int(each) for each in order.at(epoch, np.arange(order.length))]


def chi_square(found: Any, cells: int) -> float:
    """How far counts in cells are from equal, in standard deviations."""
    counts = np.bincount(found, minlength=cells)
    expected = len(found) / cells
    return float((((counts - expected) ** 2 / expected).sum() - (cells - 1)) / np.sqrt(2 * (cells - 1)))


# Shuffled: a permutation that nobody makes whole


@quick
@given(count=st.integers(SORTED_UP_TO + 1, 10**12), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 1000))
def test_every_place_of_any_number_of_examples_can_be_asked_for_by_itself(count: int, seed: int, epoch: int) -> None:
    order = Shuffled(count, seed)
    places = np.unique(np.linspace(0, count - 1, 500).astype(np.int64))
    found = order.at(epoch, places)
    assert len(np.unique(found)) == len(places) and found.min() >= 0 and found.max() < count
    assert int(order.at(epoch, places[7:8])[0]) == found[7]


@pytest.mark.parametrize("count", [SORTED_UP_TO + 1, LARGE, 2**17, 2**17 + 1])
def test_it_is_a_permutation(count: int) -> None:
    assert np.array_equal(np.sort(Shuffled(count, 5).at(3, np.arange(count))), np.arange(count))


def test_it_is_well_mixed() -> None:
    """Within an order, and over seeds at one place: no cell, no pair, no distance is more frequent than by chance."""
    order = Shuffled(LARGE, 0).at(0, np.arange(LARGE))
    cell = order * 16 // LARGE
    assert abs(chi_square(cell[:-1] * 16 + cell[1:], 256)) < 5, "neighbours"
    assert abs(chi_square((np.diff(order) % LARGE) * 64 // LARGE, 64)) < 5, "distances"
    assert abs(np.corrcoef(order, np.arange(LARGE))[0, 1]) < 5 / np.sqrt(LARGE)
    assert np.count_nonzero(order == np.arange(LARGE)) < 10, "examples that stay where they are: one, on average"
    at = np.array([Permutation(LARGE, 1, seed, 0)(np.array([0, 1, LARGE - 1])) for seed in range(2000)]) * 10 // LARGE
    for column in range(3):
        assert abs(chi_square(at[:, column], 10)) < 5, "one place over seeds"
    assert abs(chi_square(at[:, 0] * 10 + at[:, 1], 100)) < 5, "two places over seeds"
    later = Shuffled(LARGE, 0).at(1, np.arange(LARGE)) * 16 // LARGE
    assert abs(chi_square(cell * 16 + later, 256)) < 5, "one epoch and the next"


class Billion(Dataset[Any]):
    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_billion_examples_begin_in_a_second_and_take_no_memory(workers: int) -> None:
    """Split into parts, shuffled, and fetched here or by workers; also from the midst of an epoch on."""
    tracemalloc.start()
    try:
        began = time.perf_counter()
        parts = split_dataset(Billion(), {"train": 0.9, "val": 0.1}, 0)
        plan = GlobalBatches(len(parts["train"]), 64, rank=1, world_size=2)  # type: ignore[arg-type]
        loader = Loader(parts["train"], plan, loading=Loading(workers))
        batches = loader.epoch(1, start=10**7)
        _, first = next(batches)
        took, (_, peak) = time.perf_counter() - began, tracemalloc.get_traced_memory()
        del batches
        loader.close()
    finally:
        tracemalloc.stop()
    assert first.shape == (32, 1)
    assert took < 1.0 and peak < 20e6, (took, peak)


# A split without memory


def test_a_split_of_much_data_is_disjoint_and_complete() -> None:
    parts = Split(LARGE, {"train": 0.7, "val": 0.3}, seed=4)
    found = {name: parts.at(name, np.arange(parts.length(name))) for name in parts.parts}
    assert np.array_equal(np.sort(np.concatenate([*found.values()])), np.arange(LARGE))
    in_order = Split(LARGE, {"train": 0.7, "val": 0.3}, seed=4, in_order=True)
    kept = in_order.at("train", np.arange(parts.length("train")))
    assert np.array_equal(kept, np.sort(found["train"])), "the same examples, as they come in the data"


def test_a_part_is_fetched_as_a_subset_would_be() -> None:
    data = TensorDataset(torch.arange(LARGE))
    part = split_dataset(data, {"train": 0.5, "val": 0.5}, 1)["val"]
    assert isinstance(part, Part)
    places = np.array([5, 0, 40_000])
    (fetched,) = BatchFetcher(part)(places)
    assert fetched.tolist() == part.whole(places).tolist() == [part[place][0].item() for place in (5, 0, 40_000)]
    assert BatchFetcher(part, len)(places) == 3
    assert part[-1] == part[len(part) - 1]
    with pytest.raises(IndexError):
        part[len(part)]


# Weighted


def test_with_replacement_examples_are_drawn_in_proportion() -> None:
    weights = [0.0, 1.0, 2.0, 0.0, 5.0, 0.0]
    drawn = Weighted(6, 3, weights, draws=80_000)
    found = np.bincount(whole(drawn), minlength=6)
    assert found[[0, 3, 5]].tolist() == [0, 0, 0]
    assert np.allclose(found / 80_000, np.array(weights) / 8, atol=0.01)
    assert whole(drawn)[100:200] == drawn.at(0, np.arange(100, 200)).tolist(), "each place by itself"
    assert whole(drawn) != whole(drawn, epoch=1)


def test_without_replacement_it_is_the_mathematics_of_torchs_sampler() -> None:
    """How often each example comes first, and which second after which first."""
    weights, tries = [1.0, 2.0, 3.0, 0.0], 3000
    drawn = [whole(Weighted(4, seed, weights, replacement=False, draws=3)) for seed in range(tries)]
    assert all(sorted(each) == [0, 1, 2] for each in drawn)
    first = np.bincount([each[0] for each in drawn], minlength=4) / tries
    assert np.allclose(first, np.array(weights) / 6, atol=0.03)
    after = [each[1] for each in drawn if each[0] == 2]
    assert np.allclose(np.bincount(after, minlength=4) / len(after), [1 / 3, 2 / 3, 0, 0], atol=0.05)


def test_drawing_by_weight_never_changes() -> None:
    weights = np.arange(1.0, 9.0)
    assert whole(Weighted(8, 0, weights)) == GOLDEN_WITH
    assert whole(Weighted(8, 0, weights, replacement=False)) == GOLDEN_WITHOUT


GOLDEN_WITH = [3, 2, 7, 7, 6, 3, 7, 5]
GOLDEN_WITHOUT = [2, 6, 3, 4, 7, 5, 1, 0]


@pytest.mark.parametrize(
    ("weights", "how", "told"),
    [
        ([1, 2, 3], {}, "there are 4 examples, but weights of shape \\[3\\]"),
        ([[1, 2, 3, 4]], {}, "weights of shape \\[1, 4\\]"),
        ([1, -2, 3, -4], {}, "the weight of example 1 is -2 \\(2 such of 4\\)"),
        ([1, 2, float("nan"), 4], {}, "the weight of example 2 is nan"),
        ([0, 0, 0, 0], {}, "the 4 weights add up to 0"),
        ([1e308] * 4, {}, "add up to inf"),
        (["a", "b", "c", "d"], {}, "weights must be one number per example, got a list"),
        ([1, 0, 1, 0], {"replacement": False}, "4 examples cannot be drawn without replacement: 2 of 4 have"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights: Any, how: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        choose({"type": "weighted", "weights": weights, **how}, True, range(4), 2, 0)


# Buckets


@quick
@given(count=st.integers(1, 300), batch_size=st.integers(1, 20), window=st.integers(1, 6), epoch=st.integers(0, 3))
def test_buckets_have_every_example_once(count: int, batch_size: int, window: int, epoch: int) -> None:
    lengths = np.random.default_rng(count).integers(0, 50, count)
    order = Buckets(count, 1, lengths, batch_size, window)
    found = whole(order, epoch)
    assert sorted(found) == list(range(count))
    again = Buckets(count, 1, lengths, batch_size, window)
    backwards = [int(again.at(epoch, np.array([place]))[0]) for place in reversed(range(count))]
    assert backwards[::-1] == found, "each place by itself, in whatever order they are asked for"


def test_a_batch_of_a_bucket_is_of_similar_length_and_batches_come_in_no_order_of_length() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 3210)
    batches = [np.array(whole(Buckets(3210, 0, lengths, 32)))[start : start + 32] for start in range(0, 3210, 32)]
    spread = np.mean([np.ptp(lengths[each]) for each in batches[:-2]])
    assert spread < 25, "of a thousand"
    means = np.array([lengths[each].mean() for each in batches[:100]])
    assert abs(np.corrcoef(means, np.arange(100))[0, 1]) < 0.4
    short = [lengths[whole(Buckets(3210, seed, lengths, 32))[-10:]].mean() for seed in range(30)]
    assert 300 < np.mean(short) < 700, "not the longest: drop_last would leave those out for ever"


def test_lengths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="lengths of shape"):
        choose({"type": "buckets", "lengths": [1, 2]}, True, range(4), 2, 0)
    with pytest.raises(ConfigError, match="the length of example 1 is -1"):
        choose({"type": "buckets", "lengths": [1, -1, 1, 1]}, True, range(4), 2, 0)
    with pytest.raises(ConfigError, match=r"buckets needs lengths, one number per example.*data\.order\.lengths: FILE"):
        choose("buckets", True, range(4), 2, 0)


# One's own


def test_an_order_of_ones_own_is_asked_for_every_epoch() -> None:
    asked = []

    def turned(epoch: int, seed: int, count: int) -> Any:
        asked.append((epoch, seed, count))
        return np.roll(np.arange(count), epoch)

    order = choose(turned, True, range(5), 2, 7)
    assert [whole(order, epoch) for epoch in (0, 1)] == [[0, 1, 2, 3, 4], [4, 0, 1, 2, 3]]
    assert asked == [(0, 7, 5), (1, 7, 5)]


@pytest.mark.parametrize(
    ("indices", "told"),
    [
        ([0, 1, 1, 3], r"no permutation of the 4 examples: it has example 1 2 times and lacks example 2 \(4 indices"),
        ([0, 1, 3], r"lacks example 2 \(3 indices in all\)"),
        ([0, 1, 2, 4], r"order\(epoch=0, seed=0, count=4\) has 4 at place 3: an index is 0 to 3"),
        ([0, -1, 2, 3], "has -1 at place 1"),
        ([0.0, 1.0, 2.0, 3.0], "must return indices.*type float64"),
        (None, "must return indices.*got a NoneType"),
        ([[0, 1], [2, 3]], r"shape \[2, 2\]"),
    ],
)
def test_an_order_that_is_no_permutation_is_refused(indices: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        choose(lambda *_: indices, True, range(4), 2, 0).at(0, np.arange(2))


def test_an_order_may_repeat_and_leave_out_where_it_says_so() -> None:
    order = choose({"type": "own", "order": lambda *_: [3, 3, 0], "repeats": True}, True, range(4), 2, 0)
    assert (order.length, whole(order)) == (3, [3, 3, 0])
    grows = choose({"type": "own", "order": lambda epoch, *_: [0] * (epoch + 1), "repeats": True}, True, range(4), 2, 0)
    assert grows.length == 1
    with pytest.raises(ConfigError, match="returned 2 indices, and 1 were expected: every epoch has as many"):
        whole(grows, epoch=1)


# Exact on any number of ranks, from anywhere on


def kinds(count: int) -> dict[str, Callable[[], Order]]:
    weights, lengths = np.arange(count) + 1.0, np.arange(count) % 13
    return {
        "shuffled": lambda: Shuffled(count, 2),
        "weighted": lambda: Weighted(count, 2, weights, draws=count + 7),
        "without replacement": lambda: Weighted(count, 2, weights, replacement=False, draws=count - 3),
        "buckets": lambda: Buckets(count, 2, lengths, 8, 3),
        "own": lambda: CustomOrder(count, 2, lambda epoch, seed, count: np.arange(count)[::-1]),
    }


@pytest.mark.parametrize("kind", list(kinds(10)))
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_global_batches_are_the_same_on_any_number_of_ranks_and_after_a_restart(kind: str, ranks: int) -> None:
    make = kinds(61)[kind]
    expected = whole(make(), epoch=1)
    for start in (0, 3):
        micros = [
            list(GlobalBatches(61, 8, rank, ranks, accumulate=2, given=make()).micro_batches(1, start))
            for rank in range(ranks)
        ]
        for batch in range(start, -(-len(expected) // 8)):
            together = [index for each in micros for micro in each if micro.batch == batch and micro.examples
                        for index in micro.indices.tolist()]  # fmt: skip
            assert together == expected[batch * 8 : batch * 8 + 8]


# In a loop of one's own


def numbered(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count, dtype=torch.float32).reshape(-1, 1))


def trained(run: Run, steps: int, *, epochs: int = 2, count: int = 24, **how: Any) -> list[int]:
    """The examples of so many steps, with a checkpoint after the last."""
    model = nn.Linear(1, 1)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    run.restore()
    seen: list[int] = []
    for _ in run.epochs(epochs):
        for (batch,) in run.batches(numbered(count), 4, **how):
            seen += [int(each) for each in batch.flatten()]
            run.backward(run.model(batch).mean())
            run.step()
            if len(seen) == 4 * steps:
                run.checkpoint()
                return seen
    return seen


ORDERS: dict[str, Any] = {
    "weighted": {"type": "weighted", "weights": np.arange(24), "count": 30},
    "buckets": {"type": "buckets", "lengths": np.arange(24) % 5, "window": 2},
    "own": lambda epoch, seed, count: np.roll(np.arange(count), 5 * epoch),
    "sequential": "sequential",
}


@pytest.mark.parametrize("order", list(ORDERS))
def test_a_loop_goes_on_in_its_order_from_where_it_was_stopped(new_run: Runs, order: str) -> None:
    before = trained(new_run(), 3, order=ORDERS[order])
    after = trained(new_run(), 100, order=ORDERS[order])
    expected = choose(ORDERS[order], True, range(24), 4, 0)
    assert len(before) == 12
    assert before + after == whole(expected, 0) + whole(expected, 1)


def test_other_weights_in_the_midst_of_a_pass_are_refused(new_run: Runs) -> None:
    trained(new_run(), 3, order={"type": "weighted", "weights": [1.0] * 24})
    with pytest.raises(ConfigError, match=r"it cannot be resumed with weights '.*' -> '.*'"):
        trained(new_run(), 3, order={"type": "weighted", "weights": [2.0, *[1.0] * 23]})


def test_an_order_of_ones_own_that_comes_out_differently_after_a_restart_is_refused(new_run: Runs) -> None:
    draws = np.random.default_rng(0)
    trained(new_run(), 3, order=lambda epoch, seed, count: draws.permutation(count))
    with pytest.raises(ConfigError, match=r"it cannot be resumed with examples '.*' -> '.*'"):
        trained(new_run(), 3, order=lambda epoch, seed, count: draws.permutation(count))


def test_shuffle_and_order_that_contradict_each_other_are_refused(new_run: Runs) -> None:
    with pytest.raises(ConfigError, match="shuffle=False, but the order is buckets"):
        next(new_run().batches(numbered(4), 2, shuffle=False, order="buckets"))
    with pytest.raises(ConfigError, match=r"run\.batches: order: type: must be one of .*; did you mean shuffled\?"):
        next(new_run().batches(numbered(4), 2, order="shufled"))
    with pytest.raises(ValidationError, match="shuffle: true and order: sequential contradict each other"):
        Data.model_validate({"shuffle": True, "order": "sequential"})
    with pytest.raises(ValidationError, match="shuffle: false and order: weighted contradict each other"):
        Data.model_validate({"shuffle": False, "order": {"type": "weighted"}})
    with pytest.raises(ValidationError, match="window is for type: buckets, but the type is weighted"):
        Data.model_validate({"order": {"type": "weighted", "window": 3}})
    written = Data.model_validate({"order": "sequential"}).model_dump(mode="json")
    assert written["shuffle"] is False and Data.model_validate(written).model_dump(mode="json") == written


# With a task


class Odd(Tiny):
    """Knows of its examples what an order may ask for."""

    order_repeats = False

    def weights(self) -> Any:
        return np.arange(self.examples) % 2

    def lengths(self) -> Any:
        return np.arange(self.examples) % 7


class Backwards(Tiny):
    def order(self, epoch: int, seed: int, count: int) -> Any:
        return range(count - 1, -1, -1)


def config_of(task: str, data: dict[str, Any], **more: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "task": {"type": task, "examples": 40, **more}, "data": data, "runtime": "cpu", "processes": 1,
            "train": {"steps": 4, "batch_size": 8}, "optimizer": {"type": "torch.optim.SGD", "lr": 0.1},
        }
    )  # fmt: skip


ODD, BACKWARDS, PLAIN = f"{__file__}:Odd", f"{__file__}:Backwards", f"{TASK_FILE}:Tiny"


def test_a_task_says_what_its_order_needs(caplog: pytest.LogCaptureFixture) -> None:
    data = Odd(examples=40).train_data()
    weighted = order_of(Odd(examples=40), config_of(ODD, {"order": {"type": "weighted", "count": 100}}), data)
    assert weighted.length == 100 and all(index % 2 for index in whole(weighted))
    assert isinstance(order_of(Odd(examples=40), config_of(ODD, {"order": "buckets"}), data), Buckets)
    assert not caplog.messages
    assert isinstance(order_of(Odd(examples=40), config_of(ODD, {}), data), Shuffled)
    assert "defines weights, but examples are not drawn by them: set data.order to weighted" in caplog.text
    own = Backwards(examples=40)
    assert whole(order_of(own, config_of(BACKWARDS, {}), data))[:2] == [39, 38]
    assert whole(order_of(own, config_of(BACKWARDS, {"shuffle": False}), data))[:2] == [0, 1], "the config comes first"
    with pytest.raises(ConfigError, match=r"own needs an order: define order\(self, epoch, seed, count\) in the task"):
        order_of(Tiny(examples=40), config_of(PLAIN, {"order": "own"}), data)


def test_a_part_takes_the_weights_of_its_examples(tmp_path: Path) -> None:
    np.save(tmp_path / "weights.npy", np.arange(40) < 20)
    task = Odd(examples=40)
    part = split_dataset(task.train_data(), {"train": 0.5, "val": 0.5}, 0)["train"]
    assert isinstance(part, Part)
    asked = {"type": "weighted", "weights": str(tmp_path / "weights.npy")}
    order = order_of(task, config_of(ODD, {"order": asked}), part)
    assert part.whole(order.at(0, np.arange(20))).max() < 20
    by_task = order_of(task, config_of(ODD, {"order": "weighted"}), part)
    assert all(index % 2 for index in part.whole(by_task.at(0, np.arange(20))))
    for file in ("nothing.npy", "~nobody-here/nothing.npy"):
        with pytest.raises(ConfigError, match=rf"data\.order\.weights: {file} cannot be read"):
            order_of(task, config_of(ODD, {"order": {"type": "weighted", "weights": file}}), part)


@pytest.mark.parametrize("data", [{"order": {"type": "weighted", "count": 12}}, {"order": "buckets"}])
def test_a_config_trains_in_its_order_and_counts_its_steps(new_run: Runs, data: dict[str, Any]) -> None:
    run = new_run()
    config = config_of(ODD, {**data, "split": {"train": 0.8, "val": 0.2}}).model_copy(
        update={"train": config_of(ODD, data).train.model_copy(update={"steps": None, "epochs": 2})}
    )
    trainer.fit(run, config)
    assert run.progress.step == 2 * (2 if "weighted" in str(data) else 4)


class Numbered(Tiny):
    """More examples than are sorted, each of which tells its place."""

    def train_data(self) -> Dataset[Any]:
        return TensorDataset(torch.zeros(LARGE, 8), torch.arange(LARGE))

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return model(batch[0]).mean()

    def metrics(self, model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"place": batch[1].double()}


def test_a_run_is_evaluated_on_the_examples_that_it_was_not_trained_on(new_run: Runs) -> None:
    config = RunConfig.model_validate(
        {
            "task": f"{__file__}:Numbered", "runtime": "cpu", "processes": 1,
            "train": {"steps": 1, "batch_size": 50_000}, "data": {"split": {"train": 0.9, "val": 0.1}},
            "optimizer": {"type": "torch.optim.SGD", "lr": 0.1},
        }
    )  # fmt: skip
    trained = new_run()
    found = trainer.fit(trained, config)
    after = After(do="evaluate", run=str(trained.folder), step=1, data="val")
    again = evaluate.evaluate(new_run(), config, after)
    assert again["metrics"]["val/place"] == found["metrics"]["val/place"]
