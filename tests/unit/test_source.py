"""run.batches takes a torch DataLoader: its batches, its order, its collate_fn."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lockstep import Run
from lockstep.config.schema import RunConfig
from lockstep.errors import ConfigError
from lockstep.tasks.setup import order_of
from lockstep.tasks.task import Task
from lockstep.tasks.trainer import datasets_of

COUNT = 23


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(index))


class Backwards(Sampler[int]):
    """Ends elsewhere in every epoch, by set_epoch and by a random number."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        first = int(torch.randint(COUNT, ()))
        yield from ((first + self.epoch - place) % COUNT for place in range(COUNT))


class Pairs:
    """Batches that someone puts together."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sizes

    def __iter__(self) -> Iterator[list[int]]:
        for number, size in enumerate(self._sizes):
            yield [(7 * number + each) % COUNT for each in range(size)]


class Named(BatchSampler):
    """A class of somebody, as torchdata has it."""


class OfTheirOwn(Sampler[int]):
    def __init__(self) -> None:
        self._random = random.Random(3)

    def __iter__(self) -> Iterator[int]:
        yield from self._random.sample(range(COUNT), COUNT)


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield from range(COUNT)


class Doubled(DataLoader[Any]):
    def __iter__(self) -> Any:
        return (2 * each for each in super().__iter__())


class Divided(DistributedSampler[Any]):
    pass


def squared(examples: list[Tensor]) -> dict[str, Tensor]:
    return {"plain": torch.stack(examples), "squared": torch.stack(examples) ** 2}


def drawn() -> torch.Generator:
    return torch.Generator().manual_seed(5)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "sequential": lambda: DataLoader(Numbers(), 4),
    "drop_last": lambda: DataLoader(Numbers(), 4, drop_last=True),
    "shuffled": lambda: DataLoader(Numbers(), 4, shuffle=True, generator=drawn()),
    "workers": lambda: DataLoader(Numbers(), 4, shuffle=True, generator=drawn(), num_workers=1),
    "workers that stay": lambda: DataLoader(
        Numbers(), 4, shuffle=True, generator=drawn(), num_workers=1, persistent_workers=True
    ),
    "a generator of its own": lambda: DataLoader(Numbers(), 4, sampler=RandomSampler(Numbers(), generator=drawn())),
    "with replacement": lambda: DataLoader(
        Numbers(), 5, sampler=RandomSampler(Numbers(), replacement=True, num_samples=37, generator=drawn())
    ),
    "a subset": lambda: DataLoader(Numbers(), 4, sampler=SubsetRandomSampler(range(3, 17), generator=drawn())),
    "weighted": lambda: DataLoader(
        Numbers(), 4, sampler=WeightedRandomSampler([1.0, *range(COUNT - 1)], 30, generator=drawn())
    ),
    "collate": lambda: DataLoader(Numbers(), 4, collate_fn=squared),
    "batches": lambda: DataLoader(Numbers(), batch_sampler=Pairs([4, 4, 4, 2])),
    "batches by a generator": lambda: DataLoader(
        Numbers(), batch_sampler=Named(RandomSampler(Numbers(), generator=drawn()), 4, True)
    ),
}


ALWAYS_THE_SAME = ("sequential", "drop_last", "collate", "batches")


def plain(batches: Any) -> list[Any]:
    return [{k: v.tolist() for k, v in each.items()} if isinstance(each, dict) else each.tolist() for each in batches]


def walked(run: Run, loader: DataLoader[Any], epochs: int, until: int | None = None) -> list[list[Any]]:
    """What a loop over a loader sees, by epoch; it stops and saves after so many steps."""
    model = nn.Linear(1, 1)
    model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.restore()
    seen: list[list[Any]] = []
    for _ in run.epochs(epochs):
        seen.append([])
        for batch in run.batches(loader):
            seen[-1] += plain([batch])
            run.backward(model(torch.ones(len(seen[-1][-1]), 1)).mean())
            run.step(optimizer)
            if run.progress.step == until:
                run.checkpoint()
                return seen
    return seen


@pytest.mark.parametrize("kind", LOADERS)
def test_batches_are_those_of_the_loader_in_every_epoch(kind: str, new_run: Callable[..., Run]) -> None:
    theirs = LOADERS[kind]()
    expected = [plain(theirs) for _ in range(3)]
    assert len({str(each) for each in expected}) == (
        1 if kind in ("sequential", "drop_last", "collate", "batches") else 3
    )
    assert walked(new_run(), LOADERS[kind](), 3) == expected


@pytest.mark.parametrize("kind", [*LOADERS, "set_epoch", "by the seed"])
def test_a_run_that_is_resumed_continues_the_order(kind: str, new_run: Callable[..., Run]) -> None:
    others = {
        "set_epoch": lambda: DataLoader(Numbers(), 4, sampler=Backwards()),
        "by the seed": lambda: DataLoader(Numbers(), 4, shuffle=True),
    }
    make = {**LOADERS, **others}[kind]
    whole = walked(new_run(folder="whole"), make(), 3)
    assert len({str(each) for each in whole}) == (1 if kind in ALWAYS_THE_SAME else 3)
    begun = walked(new_run(folder="parts"), make(), 3, until=len(whole[0]) + 2)
    torch.manual_seed(99)  # what else was drawn changes nothing
    rest = walked(new_run(folder="parts"), make(), 3)
    assert [*begun[:1], begun[1] + rest[0], *rest[1:]] == whole


def test_a_generator_belongs_to_one_loader_and_what_changes_is_taken_again(new_run: Callable[..., Run]) -> None:
    generator, run = drawn(), new_run()
    kept = DataLoader(Numbers(), 4, shuffle=True, generator=generator)
    assert plain(run.batches(kept, name="one"))
    with pytest.raises(ConfigError, match="belongs to another DataLoader, too"):
        run.batches(DataLoader(Numbers(), 4, shuffle=True, generator=generator), name="two")
    kept.collate_fn = squared
    assert "squared" in plain(run.batches(kept, name="three"))[0]
    weighted = DataLoader(Numbers(), 4, sampler=WeightedRandomSampler([1.0] * COUNT, 8))
    run.batches(weighted, name="four")
    weighted.sampler.weights = torch.eye(COUNT)[5]  # type: ignore[attr-defined]
    assert plain(run.batches(weighted, name="four")) == [[5.0] * 4] * 2


@pytest.mark.parametrize("how", [{"shuffle": True}, {"shuffle": True, "generator": drawn}, {}])
def test_a_list_that_grows_between_epochs_is_taken_again(how: dict[str, Any], new_run: Callable[..., Run]) -> None:
    by_the_loader, found = how != {"shuffle": True}, list[Any]()
    for walk in (new_run().batches, iter):
        data = [torch.tensor(float(number)) for number in range(6)]
        loader = DataLoader(data, 2, **{name: value() if callable(value) else value for name, value in how.items()})
        for _ in range(3):
            epoch = plain(walk(loader))
            found.append(epoch if by_the_loader else sorted(number for batch in epoch for number in batch))
            data.append(torch.tensor(float(len(data))))
    assert found[:3] == found[3:]


def test_a_loader_made_where_it_is_used_has_its_own_order(new_run: Callable[..., Run]) -> None:
    expected = plain(DataLoader(Numbers(), 4, shuffle=True, generator=drawn()))
    assert plain(new_run().batches(DataLoader(Numbers(), 4, shuffle=True, generator=drawn()))) == expected


def test_a_distributed_sampler_is_left_out(new_run: Callable[..., Run]) -> None:
    sampler: Any = DistributedSampler(Numbers(), num_replicas=2, rank=1, shuffle=False)  # type: ignore[arg-type]
    assert walked(new_run(), DataLoader(Numbers(), 4, sampler=sampler), 1) == [plain(DataLoader(Numbers(), 4))]


def test_a_stream_is_taken_too(new_run: Callable[..., Run]) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Tensor]:
            yield from (torch.tensor(float(each)) for each in range(10))

    assert walked(new_run(), DataLoader(Stream(), 4), 1) == [plain(DataLoader(Stream(), 4))]
    examples = DataLoader(Numbers(), None)  # without batches it is a stream itself
    assert plain(new_run(folder="other").batches(examples, 4)) == plain(DataLoader(Numbers(), 4))


def test_what_is_evaluated_is_what_the_loader_has(new_run: Callable[..., Run]) -> None:
    run = new_run()
    model = nn.Linear(1, 1)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for loader, expected in (
        (DataLoader(Numbers(), 4, shuffle=True), sum(range(COUNT)) / COUNT),
        (DataLoader(Numbers(), 4, drop_last=True), sum(range(20)) / 20),
        (DataLoader(Numbers(), 4, sampler=SubsetRandomSampler([2, 3, 10])), 5),
    ):
        assert run.evaluate(lambda batch: {"mean": batch}, loader) == {"mean": pytest.approx(expected)}
    with_dict = DataLoader(Numbers(), 4, collate_fn=squared)
    assert run.evaluate(lambda batch: {"plain": batch["plain"]}, with_dict)["plain"] == pytest.approx(11)


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (lambda: DataLoader(Numbers(), None), {}, r"without one \(batch_size=None\) it is a stream of examples"),
        (lambda: DataLoader(Numbers(), batch_sampler=Pairs([4, 3, 4])), {}, "makes batches of 4 and of 3 examples"),
        (lambda: DataLoader(Numbers(), 4), {"batch_size": 8}, "batch_size is given, and the DataLoader has its own"),
        (lambda: DataLoader(Numbers(), 4), {"order": "weighted"}, "order is given, and the DataLoader has its own"),
        (lambda: DataLoader(Numbers(), 4, shuffle=True), {"shuffle": False}, "shuffle is given, and the DataLoader"),
        (lambda: DataLoader(Numbers(), 4, sampler=OfTheirOwn()), {}, "OfTheirOwn has its own random state"),
        (lambda: DataLoader(Numbers(), 4, sampler=Endless()), {}, "Endless does not end"),
        (lambda: Doubled(Numbers(), 4), {}, "Doubled makes batches in its own way"),
        (
            lambda: DataLoader(Numbers(), 4, sampler=Divided(Numbers(), num_replicas=2, rank=0)),  # type: ignore[arg-type]
            {},
            "Divided divides the data over ranks",
        ),
        (Numbers, {}, "batch_size is missing"),
    ],
)
def test_what_cannot_be_taken_is_refused(
    make: Any, arguments: dict[str, Any], message: str, new_run: Callable[..., Run]
) -> None:
    with pytest.raises(ConfigError, match=message):
        next(new_run().batches(make(), **arguments))


class FromLoaders(Task):
    def __init__(self, train: Any, val: Any = None) -> None:
        self._train, self._val = train, val

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_data(self) -> Any:
        return self._train

    def val_data(self) -> Any:
        return self._val


def of_task(task: Task, **settings: Any) -> tuple[Any, Any]:
    config = RunConfig.model_validate({"task": {"type": "x.py:T"}, **settings})
    datasets = datasets_of(task, config)
    return datasets, order_of(task, config, datasets["train"])


def test_a_task_may_return_loaders() -> None:
    subset = SubsetRandomSampler([1, 5, 6])
    task: Any = FromLoaders(
        DataLoader(Numbers(), 4, shuffle=True, collate_fn=squared),
        {"some": DataLoader(Numbers(), 2, sampler=subset, collate_fn=squared)},
    )
    datasets, order = of_task(task, train={"batch_size": 4})
    assert isinstance(datasets["train"], Numbers) and order.name == "shuffled"
    assert task.collate is squared
    assert sorted(int(each) for each in datasets["val/some"]) == [1, 5, 6]


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        (FromLoaders(DataLoader(Numbers(), 4)), {}, r"train.batch_size: 32, but .* DataLoader with 4"),
        (
            FromLoaders(DataLoader(Numbers(), 32, drop_last=True)),
            {},
            r"data.drop_last: False, but .* DataLoader with True",
        ),
        (
            FromLoaders(DataLoader(Numbers(), 32), DataLoader(Numbers(), 32, collate_fn=squared)),
            {},
            r"val_data\(\) has another collate_fn",
        ),
        (
            FromLoaders(DataLoader(Numbers(), 32, sampler=Backwards())),
            {"data": {"split": {"train": 0.5, "val": 0.5}}},
            "data.split, train.limit: train_data.* its own sampler",
        ),
    ],
)
def test_loaders_that_contradict_the_config_are_refused(task: Task, settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        of_task(task, **settings)


def test_a_sequential_loader_stays_in_order_where_it_is_split() -> None:
    for sampler, name in ((SequentialSampler(Numbers()), "sequential"), (RandomSampler(Numbers()), "shuffled")):
        task = FromLoaders(DataLoader(Numbers(), 32, sampler=sampler))
        datasets, order = of_task(task, data={"split": {"train": 0.5, "val": 0.5}})
        assert order.name == name and order.count == len(datasets["train"])
