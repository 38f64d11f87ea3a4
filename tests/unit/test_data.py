"""The order of examples, how ranks share it, and how it is fetched."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from comparison import same
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from lockstep.config.load import validate
from lockstep.config.schema import RunConfig
from lockstep.config.training import Ordering
from lockstep.data.batches import GlobalBatches, MicroBatch
from lockstep.data.loader import BatchFetcher, Loader, check_dataset
from lockstep.data.order import CustomOrder, Sequential, Shuffled, make_order
from lockstep.data.permutation import First, Indices, Part, Split, split_dataset
from lockstep.data.seeding import _numpy
from lockstep.data.workers import Loading
from lockstep.errors import ConfigError
from lockstep.tasks.trainer import limited

# Each plan is quick to draw, but a busy machine is no reason to fail.
quick = settings(deadline=None, max_examples=60)

# The order


def example_order(count: int, seed: int, epoch: int, shuffle: bool = True) -> Indices:
    return (Shuffled(count, seed) if shuffle else Sequential(count)).at(epoch, np.arange(count))


GOLDEN_ORDER = [2, 0, 1, 4, 5, 6, 7, 8, 3, 9]
GOLDEN_ORDER_OF_EPOCH_ONE = [3, 8, 6, 5, 7, 9, 4, 1, 2, 0]
GOLDEN_ORDER_OF_A_LARGE_SEED = [6, 3, 2, 7, 1, 9, 0, 8, 4, 5]
GOLDEN_ORDER_OF_A_BILLION = [968023382, 892053929, 733338896, 251345594, 417717712, 652928015]
GOLDEN_ORDER_OF_A_BILLION_IN_EPOCH_ONE = [810363805, 904798078]
GOLDEN_SPLIT = {"train": [0, 4, 5, 6, 7, 8, 9], "val": [1, 2, 3]}


def test_the_order_never_changes() -> None:
    """A run is resumed with what is installed then: no numpy may ever give another order for the same seed."""
    assert example_order(10, seed=0, epoch=0).tolist() == GOLDEN_ORDER
    assert example_order(10, seed=0, epoch=1).tolist() == GOLDEN_ORDER_OF_EPOCH_ONE
    assert example_order(10, seed=2**63 - 1, epoch=3).tolist() == GOLDEN_ORDER_OF_A_LARGE_SEED
    billion = Shuffled(10**9, seed=0)
    assert billion.at(0, np.arange(6)).tolist() == GOLDEN_ORDER_OF_A_BILLION
    assert billion.at(1, np.array([0, 999_999_999])).tolist() == GOLDEN_ORDER_OF_A_BILLION_IN_EPOCH_ONE


@quick
@given(count=st.integers(0, 300), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 10**6))
def test_the_order_is_a_permutation_and_a_function_of_seed_and_epoch_alone(count: int, seed: int, epoch: int) -> None:
    order = example_order(count, seed, epoch)
    assert sorted(order.tolist()) == list(range(count))
    np.random.seed(epoch % 1000)
    assert np.array_equal(order, example_order(count, seed, epoch))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(example_order(20, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_without_shuffling_examples_come_as_they_are() -> None:
    assert example_order(5, seed=3, epoch=2, shuffle=False).tolist() == [0, 1, 2, 3, 4]


# The split


def split(count: int, fractions: dict[str, float], seed: int) -> dict[str, Indices]:
    drawn = Split(count, fractions, seed)
    return {name: drawn.at(name, np.arange(drawn.length(name))) for name in fractions}


def test_the_split_never_changes() -> None:
    parts = split(10, {"train": 0.7, "val": 0.3}, seed=0)
    assert {name: part.tolist() for name, part in parts.items()} == GOLDEN_SPLIT


@st.composite
def some_fractions(draw: st.DrawFn) -> dict[str, float]:
    train, val = sorted([draw(st.integers(1, 100)), draw(st.integers(1, 100))])
    return {"train": train / 100, "val": (val - train) / 100, "test": (100 - val) / 100}


@pytest.mark.requirement("D10")
@pytest.mark.requirement("D17")
@quick
@given(count=st.integers(1, 500), fractions=some_fractions(), seed=st.integers(0, 2**63 - 1))
def test_a_split_is_disjoint_complete_and_the_same_for_every_rank(
    count: int, fractions: dict[str, float], seed: int
) -> None:
    parts = split(count, fractions, seed)
    assert list(parts) == list(fractions)
    assert sorted(index for part in parts.values() for index in part.tolist()) == list(range(count))
    for name, part in parts.items():
        assert abs(len(part) - fractions[name] * count) <= 1
    torch.manual_seed(seed % 97)  # ranks differ in their generators, and in nothing that a split may look at
    again = split(count, fractions, seed)
    assert all(np.array_equal(again[name], part) for name, part in parts.items())


def test_a_part_that_was_not_asked_for_stays_empty() -> None:
    """Fractions may miss one by a millionth; what is missing must not become a part of its own."""
    parts = split(1_000_000, {"train": 0.666666, "val": 0.3333332, "test": 0.0}, seed=0)
    assert len(parts["test"]) == 0


def test_a_split_dataset_leaves_out_empty_parts() -> None:
    dataset = TensorDataset(torch.arange(10))
    parts = split_dataset(dataset, {"train": 0.8, "val": 0.2, "test": 0.0}, seed=0)
    assert {name: len(part) for name, part in parts.items()} == {"train": 8, "val": 2}  # type: ignore[arg-type]


# How ranks share the order


def plans(world_size: int, **settings: Any) -> list[GlobalBatches]:
    return [GlobalBatches(rank=rank, world_size=world_size, **settings) for rank in range(world_size)]


def seen(micros: list[MicroBatch]) -> list[int]:
    return [index for micro in micros if micro.examples for index in micro.indices.tolist()]


any_plan = st.fixed_dictionaries(
    {
        "count": st.integers(1, 120),
        "batch_size": st.integers(1, 40),
        "seed": st.integers(0, 1000),
        "shuffle": st.booleans(),
        "accumulate": st.integers(1, 5),
    }
)
world_sizes = st.integers(1, 9)
epochs = st.integers(0, 5)


@pytest.mark.requirement("D10")
@quick
@given(settings=any_plan, world_size=world_sizes, epoch=epochs)
def test_every_example_is_seen_exactly_once_in_an_epoch(settings: Any, world_size: int, epoch: int) -> None:
    ranks = [list(plan.micro_batches(epoch)) for plan in plans(world_size, **settings)]
    assert sorted(index for micros in ranks for index in seen(micros)) == list(range(settings["count"]))


@quick
@given(settings=any_plan, world_size=world_sizes, epoch=epochs)
def test_every_rank_takes_part_in_every_batch(settings: Any, world_size: int, epoch: int) -> None:
    for plan in plans(world_size, **settings):
        micros = list(plan.micro_batches(epoch))
        assert [micro.batch for micro in micros if micro.completes_batch] == list(range(plan.batches))
        assert [micro.batch for micro in micros if micro.completes_epoch] == [plan.batches - 1]
        assert micros[-1].completes_epoch
        assert all(len(micro.indices) >= 1 for micro in micros), "there is always something to compute a gradient of"
        assert all(micro.examples in (0, len(micro.indices)) for micro in micros)


@quick
@given(settings=any_plan, world_size=world_sizes, epoch=epochs, data=st.data())
def test_the_weighted_mean_over_ranks_and_parts_is_the_mean_over_the_batch(
    settings: Any, world_size: int, epoch: int, data: st.DataObject
) -> None:
    losses = np.array(data.draw(st.lists(st.floats(-100, 100), min_size=settings["count"], max_size=settings["count"])))
    ranks = [list(plan.micro_batches(epoch)) for plan in plans(world_size, **settings)]
    order = example_order(settings["count"], settings["seed"], epoch, settings["shuffle"])
    size = settings["batch_size"]
    for batch in range(plans(world_size, **settings)[0].batches):
        combined = sum(
            micro.weight * losses[micro.indices].mean() for micros in ranks for micro in micros if micro.batch == batch
        )
        assert combined / world_size == pytest.approx(losses[order[batch * size : (batch + 1) * size]].mean(), abs=1e-9)


@quick
@given(settings=any_plan, world_size=world_sizes, epoch=epochs)
def test_a_batch_holds_the_same_examples_in_the_same_order_on_any_number_of_ranks(
    settings: Any, world_size: int, epoch: int
) -> None:
    ranks = [list(plan.micro_batches(epoch)) for plan in plans(world_size, **settings)]
    order = example_order(settings["count"], settings["seed"], epoch, settings["shuffle"]).tolist()
    size = settings["batch_size"]
    for batch in range(plans(world_size, **settings)[0].batches):
        together = [index for micros in ranks for index in seen([micro for micro in micros if micro.batch == batch])]
        assert together == order[batch * size : (batch + 1) * size]


@quick
@given(settings=any_plan, before=world_sizes, after=world_sizes, epoch=epochs, data=st.data())
def test_resumed_on_another_number_of_ranks_exactly_the_remaining_examples_are_seen(
    settings: Any, before: int, after: int, epoch: int, data: st.DataObject
) -> None:
    batches = GlobalBatches(**settings).batches
    done = data.draw(st.integers(0, batches))
    first = [
        seen([micro for micro in plan.micro_batches(epoch) if micro.batch < done]) for plan in plans(before, **settings)
    ]
    rest = [seen(list(plan.micro_batches(epoch, start=done))) for plan in plans(after, **settings)]
    assert sorted(index for micro in first + rest for index in micro) == list(range(settings["count"]))


@quick
@given(settings=any_plan, world_size=world_sizes)
def test_shares_of_a_batch_differ_by_one_example_at_most(settings: Any, world_size: int) -> None:
    ranks = [list(plan.micro_batches(0)) for plan in plans(world_size, **settings)]
    for batch in range(plans(world_size, **settings)[0].batches):
        sizes = [sum(micro.examples for micro in micros if micro.batch == batch) for micros in ranks]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.requirement("D17")
@pytest.mark.parametrize(
    ("count", "batch_size", "drop_last", "batches"),
    [(10, 5, False, 2), (10, 5, True, 2), (11, 5, False, 3), (11, 5, True, 2), (3, 5, False, 1), (3, 5, True, 0)],
)
def test_the_last_batch_is_dropped_where_it_is_not_full_and_that_is_wanted(
    count: int, batch_size: int, drop_last: bool, batches: int
) -> None:
    plan = GlobalBatches(count, batch_size, drop_last=drop_last)
    assert plan.batches == batches
    micros = list(plan.micro_batches(0))
    assert len(micros) == batches
    assert sum(micro.examples for micro in micros) == min(count, batches * batch_size)


def test_a_rank_without_an_example_computes_one_that_counts_for_nothing() -> None:
    last = list(GlobalBatches(count=5, batch_size=4, rank=0, world_size=4).micro_batches(0))[-1]
    assert (last.examples, last.weight, len(last.indices), last.completes_batch) == (0, 0.0, 1, True)


# How examples are fetched

Point = namedtuple("Point", "x label")


class OneByOne(Dataset[Any]):
    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        assert type(index) is int
        return self.make(index)


class Together(OneByOne):
    """Its batches show that it was asked for all examples at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(self.make(index), len(indices)) for index in indices]


class Doubled(TensorDataset):
    """A dataset of tensors whose examples are not just rows of them."""

    def __getitem__(self, index: int) -> Any:
        return tuple(tensor * 2 for tensor in super().__getitem__(index))


class Changed(Subset[Any]):
    """A micro of a dataset with a change of its own, as people write them for augmentation."""

    def __getitem__(self, index: Any) -> Any:
        return tuple(-each for each in super().__getitem__(index))

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


TENSORS = TensorDataset(torch.randn(20, 3), torch.arange(20), torch.rand(20, 2, 2).to(torch.bfloat16))
PLAIN = OneByOne(lambda index: (torch.full((2,), float(index)), index))
DICTIONARIES = OneByOne(lambda index: {"x": torch.ones(2) * index, "name": f"n{index}", "size": float(index)})


@pytest.mark.parametrize(
    "dataset",
    [
        pytest.param(TENSORS, id="tensors"),
        pytest.param(TensorDataset(torch.arange(20)), id="one tensor"),
        pytest.param(Subset(TENSORS, list(range(19, -1, -1))), id="subset"),
        pytest.param(Subset(TENSORS, torch.arange(20)), id="subset by tensor"),  # type: ignore[arg-type]
        pytest.param(Subset(TENSORS, range(20)), id="subset by range"),
        pytest.param(Subset(TENSORS, [*range(-1, -21, -1)]), id="subset counted from the end"),
        pytest.param(Subset(Subset(TENSORS, [*range(19, -1, -1)]), [*range(10), *range(10)]), id="subset of subset"),
        pytest.param(Subset(PLAIN, [*range(19, -1, -1)]), id="subset of plain"),
        pytest.param(Subset(Subset(PLAIN, [*range(19, -1, -1)]), [*range(20)]), id="subset of subset of plain"),
        pytest.param(Subset(Together(float), [*range(20)]), id="subset of getitems"),
        pytest.param(PLAIN, id="plain"),
        pytest.param(Together(float), id="getitems"),
        pytest.param(DICTIONARIES, id="dictionaries"),
        pytest.param(OneByOne(lambda index: Point(torch.ones(2) * index, index)), id="named tuples"),
        pytest.param(OneByOne(lambda index: {"in": [index, (index, "a")]}), id="nested"),
        pytest.param(Doubled(*TENSORS.tensors), id="subclass of tensors"),
        pytest.param(Subset(Doubled(*TENSORS.tensors), [*range(20)]), id="subset of subclass of tensors"),
        pytest.param(Changed(TENSORS, [*range(20)]), id="subclass of subset"),
        pytest.param(Subset(Changed(TENSORS, [*range(20)]), [*range(20)]), id="subset of subclass of subset"),
    ],
)
@pytest.mark.parametrize("collate", [None, lambda examples: ("ours", default_collate(list(examples)))])
def test_a_batch_is_what_torchs_loader_would_make_of_it(dataset: Any, collate: Any) -> None:
    for indices in ([0, 5, 3], [7], [*range(20)]):
        (expected,) = DataLoader(dataset, batch_sampler=[indices], collate_fn=collate)
        assert same(BatchFetcher(dataset, collate)(np.array(indices)), expected)


def test_batches_are_copies_that_may_be_changed() -> None:
    tensor = torch.zeros(4, 2)
    batch = BatchFetcher(TensorDataset(tensor))(np.array([0, 1]))
    batch[0].add_(1)
    assert torch.equal(tensor, torch.zeros(4, 2))


def test_a_loader_walks_the_order_from_any_batch_on() -> None:
    loader = Loader(TensorDataset(torch.arange(10)), GlobalBatches(10, 4, seed=5))
    batches = [batch[0].tolist() for _, batch in loader.epoch(2)]
    assert [index for batch in batches for index in batch] == example_order(10, 5, 2).tolist()
    assert [batch[0].tolist() for _, batch in loader.epoch(2, start=1)] == batches[1:]
    assert [micro.batch for micro, _ in loader.epoch(2, start=1)] == [1, 2]


def fetched(loader: Loader, epoch: int, start: int = 0) -> list[Any]:
    return [(micro.batch, micro.indices.tolist(), batch) for micro, batch in loader.epoch(epoch, start)]


class Noisy(OneByOne):
    """Random augmentation, by each of the generators that people use."""

    def __init__(self) -> None:
        super().__init__(lambda index: (index, torch.rand(1), np.random.rand()))


def wait_for_no_children() -> None:
    deadline = time.monotonic() + 10
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert multiprocessing.active_children() == []


def test_workers_give_the_batches_that_are_given_here() -> None:
    plan = GlobalBatches(20, 6, rank=1, world_size=2, accumulate=2)
    here = Loader(DICTIONARIES, plan)
    workers = Loader(DICTIONARIES, plan, loading=Loading(workers=2))
    for epoch, start in [(0, 0), (1, 0), (1, 2)]:
        assert same(fetched(workers, epoch, start), fetched(here, epoch, start))
        wait_for_no_children()


class Changing(OneByOne):
    """Data that a loop changes from epoch to epoch: a curriculum, hard examples, a transform."""

    def __init__(self) -> None:
        super().__init__(lambda index: self.level)
        self.level = 0


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (1, True)])
def test_a_dataset_that_changes_between_passes_is_fetched_as_it_is_then(workers: int, persistent: bool) -> None:
    data, found = Changing(), []
    loader = Loader(data, GlobalBatches(12, 12), loading=Loading(workers, persistent=persistent))
    for data.level in (3, 4):
        found += [batch.unique().tolist() for _, batch in loader.epoch(0)]
    assert found == [[3], [3 if persistent else 4]], "workers that stay keep their dataset, as torch's"
    assert len(multiprocessing.active_children()) == persistent
    loader.close()
    wait_for_no_children()


def test_tensors_and_subsets_that_change_are_fetched_as_they_are() -> None:
    tensors: Any = TensorDataset(torch.arange(8))
    subset = Subset(tensors, [1, -1])
    part = Part(subset, Split(2, {"all": 1.0}, 0, in_order=True), "all")
    loader = Loader(part, GlobalBatches(2, 2, shuffle=False))
    found = [loader.first()[1][0].tolist()]
    subset.indices = [2, 3]
    found.append(loader.first()[1][0].tolist())
    tensors.tensors = (torch.arange(8) + 100,)
    found += [batch[0].tolist() for _, batch in loader.epoch(0)]
    subset.indices.reverse()
    found += [batch[0].tolist() for _, batch in loader.epoch(1)]
    subset.dataset = TensorDataset(torch.arange(4, device="meta"))
    assert found == [[1, 7], [2, 3], [102, 103], [103, 102]]
    assert loader.first()[1][0].is_meta, "also where it is on a device"


class Late(OneByOne):
    """Draws for some examples only: not for the first ones that are fetched."""

    def __init__(self) -> None:
        super().__init__(lambda index: (index, torch.rand(1) if index in (1, 2) else torch.zeros(1), index))


class NoisyTogether(Noisy):
    """Draws for all examples of a batch in one call, as a transform of a Hugging Face dataset does."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return list(zip(indices, torch.rand(len(indices)), (random.gauss(0, 1) for _ in indices), strict=True))


NOISE: dict[str, Any] = {
    "each": Noisy(),
    "some": Late(),
    "getitems": NoisyTogether(),
    "subset": Subset(Noisy(), range(12)),
    "subset of getitems": Subset(NoisyTogether(), range(12)),
}


def noise(dataset: Any, processes: int = 1, workers: int = 0, start: int = 0, **how: Any) -> list[Any]:
    """The random numbers of every example, as often as it comes, on so many processes."""
    found: list[Any] = []
    source = how.pop("source", "")
    for rank in range(processes):
        plan = GlobalBatches(12, 6, rank=rank, world_size=processes, **how)
        loader = Loader(dataset, plan, loading=Loading(workers), source=source)
        for micro, batch in loader.epoch(2, start):
            found += zip(*(each.flatten().tolist() for each in batch), strict=True) if micro.examples > 0 else []
        loader.close()
    wait_for_no_children()
    return sorted(set(found))


@pytest.mark.requirement("D17")
@pytest.mark.parametrize("name", NOISE)
def test_augmentation_depends_on_the_place_in_the_data_alone(name: str) -> None:
    data, states = NOISE[name], generators()
    first = noise(data)
    assert len({each[1] for each in first}) > 2 and len(first) == 12
    for processes, how in [(2, {}), (3, {}), (2, {"accumulate": 2}), (5, {"fill": True})]:
        assert noise(data, processes, **how) == first, (processes, how)
    assert noise(data, 2, workers=2) == first, "not on which worker fetched it"
    assert set(noise(data, 2, start=1)) < set(first), "not on where the run was resumed"
    assert not set(noise(data, source="other")) & set(first) or name == "some", "two walks have noise of their own"
    assert generators() == states, "what training draws stays the same"


def generators() -> Any:
    numpys = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), (numpys[1].tolist(), *numpys[2:])  # type: ignore[union-attr]


def test_an_example_that_comes_twice_has_noise_of_its_own_each_time() -> None:
    again = CustomOrder(12, 0, lambda epoch, seed, count: [3] * count, repeats=True)
    assert len(noise(Noisy(), 2, given=again)) == 12


def test_training_keeps_the_spare_normal_number_that_numpy_holds() -> None:
    np.random.seed(1)
    expected = np.random.randn(5).tolist()
    np.random.seed(1)
    found = [np.random.randn()]
    for _ in range(4):
        noise(Noisy())
        found.append(np.random.randn())
    assert found == expected
    assert _numpy._spare is not None, "read in place, since every look takes as long as fetching a batch"


def test_a_spare_normal_number_is_kept_where_a_loop_seeds_with_the_same_number_again() -> None:
    np.random.seed(0)
    expected = np.random.randn(2).tolist()
    np.random.seed(0)
    np.random.rand(2)  # as many words as a normal number takes, and no second one
    noise(Noisy())
    np.random.seed(0)
    found = [np.random.randn()]
    noise(Noisy())
    assert [*found, np.random.randn()] == expected


def test_training_keeps_another_bit_generator_of_numpys() -> None:
    before, first = np.random.get_bit_generator(), noise(Noisy())
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        states = repr(np.random.get_state(legacy=False))
        assert noise(Noisy()) == first
        assert repr(np.random.get_state(legacy=False)) == states
    finally:
        np.random.set_bit_generator(before)


def test_what_collate_draws_depends_on_its_micro_batch_and_nothing_else() -> None:
    def collated(workers: int) -> Any:
        loader = Loader(PLAIN, GlobalBatches(12, 6), _draws, Loading(workers))
        found = [batch for _, batch in loader.epoch(0)]
        loader.close()
        return found

    assert collated(0) == collated(2) and len(set(collated(0))) == 2


def _draws(examples: list[Any]) -> float:
    return random.random()


def test_random_numbers_of_whole_batches_that_cannot_be_taken_apart_are_refused() -> None:
    class Columns(OneByOne):
        def __getitems__(self, indices: list[int]) -> Any:
            return {"x": torch.rand(len(indices))}

    with pytest.raises(ConfigError, match=r"Columns.__getitems__ draws random numbers for a whole batch .* a dict"):
        next(Loader(Columns(int), GlobalBatches(12, 6), dict).epoch(0))

    class Rows(OneByOne):
        def __getitems__(self, indices: list[int]) -> Any:
            return torch.rand(len(indices), 2)

    rows = [next(Loader(Rows(int), GlobalBatches(12, 6, world_size=size), _same).epoch(0))[1] for size in (1, 2)]
    assert torch.equal(rows[0][:3], rows[1])


def _same(examples: Any) -> Any:
    return examples


def test_an_epoch_left_half_way_can_be_gone_on_with_and_leaves_no_worker_when_closed() -> None:
    plan = GlobalBatches(20, 2, seed=3)
    loader = Loader(PLAIN, plan, loading=Loading(workers=1))
    batches = loader.epoch(0)
    next(batches)
    del batches
    assert same(fetched(loader, 0, start=1), fetched(Loader(PLAIN, plan), 0, start=1))
    batches = loader.epoch(1)
    next(batches)
    del batches
    loader.close()
    wait_for_no_children()


# What is no dataset


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([1, 2, 3])


class StreamOfKnownLength(Stream):
    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize("dataset", [Stream(), StreamOfKnownLength(), 3, None, iter([1, 2])])
def test_what_is_not_map_style_is_refused_by_name(dataset: Any) -> None:
    with pytest.raises(ConfigError, match=r"train_data\(\) must be a map-style dataset .* got "):
        check_dataset(dataset, "train_data()")


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train_data\(\) is a dataset of length 0"):
        check_dataset(TensorDataset(torch.zeros(0, 3)), "train_data()")


def test_the_number_of_examples_is_told() -> None:
    assert check_dataset([1, 2, 3], "train_data()") == 3


@given(count=st.integers(1, 60), batch_size=st.integers(1, 20), ranks=st.integers(1, 4), accumulate=st.integers(1, 3))
def test_filled_parts_have_one_shape_and_the_mean_of_those_that_are_not(
    count: int, batch_size: int, ranks: int, accumulate: int
) -> None:
    """Whatever is added to fill a micro up is taken back: sums and weights over all micros are as if nothing was."""
    batch_size *= ranks * accumulate
    values = np.random.default_rng(0).normal(size=count)
    sums: dict[bool, dict[int, float]] = {False: {}, True: {}}
    counts: dict[bool, dict[int, int]] = {False: {}, True: {}}
    lengths = set()
    for fill in (False, True):
        for rank in range(ranks):
            plan = GlobalBatches(count, batch_size, rank, ranks, accumulate=accumulate, fill=fill)
            for micro in plan.micro_batches(0):
                mean = float(values[micro.indices].mean())
                sums[fill][micro.batch] = sums[fill].get(micro.batch, 0.0) + micro.weight * mean / ranks
                counts[fill][micro.batch] = counts[fill].get(micro.batch, 0) + micro.examples
                if fill:
                    lengths.add(len(micro.indices))
    assert lengths == {batch_size // (ranks * accumulate)}
    assert counts[True] == counts[False]
    assert sums[True] == pytest.approx(sums[False], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("make", [lambda data: data, list, lambda data: Subset(data, range(40))])
def test_the_first_examples_are_those_of_the_dataset_or_of_its_part(make: Callable[[Any], Any]) -> None:
    data = make(TensorDataset(torch.arange(40.0)))
    first = First(data, 7)
    assert len(first) == 7 and [float(first[place][0]) for place in range(7)] == list(range(7))
    assert BatchFetcher(first)(np.array([6, 0]))[0].tolist() == [6.0, 0.0]
    with pytest.raises(IndexError):
        first[7]
    part = split_dataset(data, {"train": 0.5, "val": 0.5}, seed=1)["val"]
    of_part = First(part, 5)
    assert [of_part[place] for place in range(5)] == [part[place] for place in range(5)]
    assert len(First(part, 1000)) == len(part) == 20
    # Weights are those of the examples that are left.
    weights = np.zeros(40)
    weights[part.whole(np.array([3]))] = 1.0  # type: ignore[attr-defined]
    order = make_order(Ordering(type="weighted"), of_part, 5, 0, {"weights": weights})
    assert order.at(0, np.arange(5)).tolist() == [3] * 5


def test_limits_of_sets_and_what_a_stream_is_answered() -> None:
    def config(train: dict[str, int], val: int | None = None) -> RunConfig:
        return validate(RunConfig, {"task": "a.b:C", "train": train, "validate": {"limit": val}}, {}, "c")

    sets: dict[str, Dataset[Any]] = {
        name: TensorDataset(torch.arange(9.0)) for name in ("train", "val/a", "val/b", "test")
    }
    assert limited(sets, config({})) == sets
    found = limited(sets, config({"limit": 5}, 4))
    assert {name: len(each) for name, each in found.items()} == {"train": 5, "val/a": 4, "val/b": 4, "test": 4}  # type: ignore[arg-type]
    found = limited(sets, config({"overfit": 6}, 4))
    assert found["train"] is found["val/a"] is found["val/b"] and "val" not in found
    assert {name: len(each) for name, each in found.items()} == {"train": 6, "val/a": 6, "val/b": 6, "test": 4}  # type: ignore[arg-type]

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from range(9)

    for train, val, setting in (({"overfit": 3}, None, "train.overfit: 3"), ({}, 2, "validate.limit: 2")):
        with pytest.raises(ConfigError, match=rf"{setting}: the (train|val) data is a stream \(Stream\)"):
            limited({"train": Stream(), "val": Stream()}, config(train, val))
