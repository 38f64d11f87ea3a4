"""Streams without processes: who reads what, where a reader is, and what cannot be used."""

from __future__ import annotations

import io
import json
import random
import tarfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

import lockstep
from lockstep.config.schema import RunConfig
from lockstep.data.stream import Pass
from lockstep.data.stream_batches import BatchSlice
from lockstep.data.stream_reader import Source, check_stream, is_stream
from lockstep.data.workers import Loading
from lockstep.distributed.group import Group
from lockstep.engine.run import Run
from lockstep.errors import ConfigError
from lockstep.tasks.schedules import run_length
from lockstep.tasks.setup import order_of
from lockstep.tasks.trainer import datasets_of, fit

Runs = Callable[..., Run]


class Numbers(IterableDataset[Any]):
    """Examples 0, 1, 2, ... without shards or a state."""

    def __init__(self, count: int, draws: bool = False) -> None:
        self.count, self.draws = count, draws

    def __iter__(self) -> Iterator[float]:
        for number in range(self.count):
            yield number + (random.random() / 2 if self.draws else 0.0)


class Tensors(Numbers):
    """The same as tensors; counts those that somebody holds."""

    held = most = 0

    def __iter__(self) -> Iterator[Any]:
        for each in super().__iter__():
            found = torch.tensor(each)
            weakref.finalize(found, self._let_go)
            self.held += 1
            self.most = max(self.most, self.held)
            yield found

    def _let_go(self) -> None:
        self.held -= 1


class Stateful(Numbers):
    """The same, with a place that it keeps itself; like many it does not go back to its beginning when it is left."""

    place = 0
    reads = 0

    def __iter__(self) -> Iterator[float]:
        while self.place < self.count:
            self.place += 1
            Stateful.reads += 1
            yield float(self.place - 1)
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Sharded(IterableDataset[Any]):
    """Shard k has the examples 100 k, 100 k + 1, ...: uneven shards, and one of them is empty."""

    def __init__(self, sizes: list[int], stateful: bool = True, shards: list[int] | None = None) -> None:
        self.sizes, self.stateful = sizes, stateful
        self.shards = list(range(len(sizes))) if shards is None else shards
        self.done = 0
        if stateful:
            self.state_dict, self.load_state_dict = self._state_dict, self._load_state_dict

    @property
    def num_shards(self) -> int:
        return len(self.shards)

    def shard(self, num_shards: int, index: int) -> Sharded:
        first, last = (len(self.shards) * part // num_shards for part in (index, index + 1))
        return Sharded(self.sizes, self.stateful, self.shards[first:last])

    def __iter__(self) -> Iterator[float]:
        numbers = [100.0 * shard + index for shard in self.shards for index in range(self.sizes[shard])]
        while self.done < len(numbers):
            self.done += 1
            yield numbers[self.done - 1]

    def _state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]

    @property
    def everything(self) -> list[float]:
        return sorted(100.0 * shard + index for shard, size in enumerate(self.sizes) for index in range(size))


def passes(data: Any, dp_size: int, batch_size: int = 6, workers: int = 0, **how: Any) -> list[Pass]:
    """The same pass as each of several ranks walks it."""
    cut = {name: how.pop(name) for name in ("accumulate", "drop_last", "fill") if name in how}
    return [
        Pass(
            Source(data, type(data).__name__), BatchSlice(dp_rank, dp_size, batch_size, **cut), Loading(workers), **how
        )
        for dp_rank in range(dp_size)
    ]


def read(walk: Pass) -> list[float]:
    return [float(value) for chunk in walk._chunks() for batch in chunk.batches for value in batch]


def portions_of(walk: Pass, count: int) -> tuple[list[list[float]], Any]:
    """The first portions, and where the rank is after them, as it is saved."""
    chunks, found, place = walk._chunks(), [], walk._place_after(None)
    for _ in range(count):
        chunk = next(chunks, None)
        if chunk is None:
            break
        place = walk._place_after(chunk)
        found.append([float(value) for batch in chunk.batches for value in batch])
    chunks.close()
    return found, json.loads(json.dumps(place()))


UNEVEN = [5, 1, 9, 0, 4, 7]


# Who reads what


@pytest.mark.parametrize(("dp_size", "workers"), [(1, 0), (2, 0), (3, 0), (2, 2)])
def test_every_example_of_every_shard_is_read_once(dp_size: int, workers: int) -> None:
    data = Sharded(UNEVEN)
    found = [value for walk in passes(data, dp_size, workers=workers, shuffle=True) for value in read(walk)]
    assert sorted(found) == data.everything


@pytest.mark.parametrize("workers", [0, 2])
def test_what_has_no_shards_has_the_same_batches_on_any_number_of_ranks_and_workers(workers: int) -> None:
    whole = [list(map(float, range(start, min(start + 6, 20)))) for start in range(0, 20, 6)]
    for dp_size in (1, 2, 3) if not workers else (2,):
        found = [list(walk._chunks()) for walk in passes(Numbers(20), dp_size, workers=workers)]
        steps = [
            [float(v) for rank in step for v in rank.batches[0][: rank.count]] for step in zip(*found, strict=True)
        ]
        assert steps == whole


def test_a_stream_that_looks_for_its_worker_is_not_divided_twice() -> None:
    class ByWorker(Numbers):
        def __iter__(self) -> Iterator[float]:
            info = get_worker_info()
            yield from list(super().__iter__())[info.id if info else 0 :: info.num_workers if info else 1]

    assert sorted(read(passes(ByWorker(20), 1, workers=2)[0])) == list(range(20))
    own = ByWorker(20)
    own.is_share = True  # type: ignore[attr-defined]
    assert sorted(read(passes(own, 1, workers=2)[0])) == list(range(20))


def test_a_single_worker_is_as_in_torch_for_what_divides_itself_and_none_for_others() -> None:
    class AsksTorch(Numbers):
        def __iter__(self) -> Iterator[float]:
            info = get_worker_info()
            assert info is None or (info.dataset is self and info.seed > 0)
            yield from (-1, -1) if info is None else (info.id, info.num_workers)

    data = AsksTorch(0)
    assert [read(passes(data, 1, workers=workers)[0]) for workers in (0, 1)] == [[-1, -1], [-1, -1]]
    data.is_share = True  # type: ignore[attr-defined]
    assert [read(passes(data, 1, workers=workers)[0]) for workers in (0, 1)] == [[-1, -1], [0, 1]]


@pytest.mark.parametrize("data", [Sharded(UNEVEN), Numbers(26)], ids=["shards", "whole"])
def test_a_buffer_shuffles_and_leaves_nothing_out(data: Any) -> None:
    plain = read(passes(data, 1)[0])
    first, second = (read(passes(data, 1, buffer=4, epoch=epoch)[0]) for epoch in (0, 1))
    assert sorted(first) == sorted(second) == sorted(plain)
    assert first != plain and first != second


def test_the_order_of_shards_is_another_in_every_epoch() -> None:
    epochs = [read(passes(Sharded([2] * 8), 1, epoch=epoch, shuffle=True)[0]) for epoch in (0, 1, 1)]
    assert epochs[0] != epochs[1] == epochs[2]
    assert read(passes(Sharded([2] * 8), 1)[0]) == Sharded([2] * 8).everything


def test_set_epoch_is_called_where_there_is_one() -> None:
    class ByEpoch(Numbers):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[float]:
            yield float(self.epoch)

    assert [read(passes(ByEpoch(1), 1, epoch=epoch)[0]) for epoch in (0, 3)] == [[0.0], [3.0]]


class NoisyShards(Sharded):
    """Every example with a random number, drawn when it is read."""

    def shard(self, num_shards: int, index: int) -> NoisyShards:
        return NoisyShards(self.sizes, self.stateful, super().shard(num_shards, index).shards)

    def __iter__(self) -> Iterator[float]:
        for number in super().__iter__():
            yield number + random.random() / 2


@pytest.mark.parametrize("buffer", [None, 3])
@pytest.mark.parametrize("kind", ["shards", "whole"])
def test_augmentation_of_a_stream_is_the_same_on_any_number_of_ranks_and_workers(kind: str, buffer: int | None) -> None:
    def found(dp_size: int, workers: int = 0, **how: Any) -> list[float]:
        data = NoisyShards(UNEVEN) if kind == "shards" else Numbers(26, draws=True)
        walks = passes(data, dp_size, workers=workers, buffer=buffer, **how)
        # A part without an example computes one of another that counts for nothing.
        return sorted(
            float(value) for walk in walks for each in walk._chunks() for value in each.batches[0][: each.count]
        )

    one = found(1)
    assert len(one) == 26 and len({value % 1 for value in one}) == 26
    for dp_size, workers in [(2, 0), (3, 0), (2, 2)]:
        assert found(dp_size, workers) == one, (dp_size, workers)
    assert not set(found(1, name="other")) & set(one), "two passes have random numbers of their own"


# Where a reader is


KINDS = {
    "whole": lambda: Numbers(26, draws=True),
    "whole with a state": lambda: Stateful(26),
    "shards": lambda: Sharded(UNEVEN),
    "shards without a state": lambda: Sharded(UNEVEN, stateful=False),
}


@pytest.mark.parametrize(("buffer", "workers"), [(None, 0), (4, 0), (4, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_goes_on_where_it_was(kind: str, buffer: int | None, workers: int) -> None:
    """Left after any number of batches, the rest is bit for bit what it would have been."""
    how: dict[str, Any] = {"workers": workers, "buffer": buffer, "shuffle": True, "epoch": 2}
    expected, _ = portions_of(passes(KINDS[kind](), 1, **how)[0], 100)
    assert len(expected) > 4
    for stop in range(1, len(expected) + 1) if not workers else (1,):
        walk = passes(KINDS[kind](), 1, **how)[0]
        before, place = portions_of(walk, stop)
        saved = {"kind": walk.kind, "places": [place]}
        after, _ = portions_of(passes(KINDS[kind](), 1, start=stop, saved=saved, **how)[0], 100)
        assert before + after == expected, stop


def test_what_has_a_state_is_not_read_from_the_start_again() -> None:
    walk = passes(Stateful(1000), 1)[0]
    _, place = portions_of(walk, 50)
    Stateful.reads = 0
    portions_of(passes(Stateful(1000), 1, start=50, saved={"kind": "whole", "places": [place]})[0], 1)
    assert Stateful.reads == 6


def test_what_has_none_is_read_from_the_start_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    walk = passes(Numbers(1000), 1)[0]
    _, place = portions_of(walk, 50)
    with caplog.at_level("INFO"):
        again = passes(Numbers(1000), 1, start=50, saved={"kind": "whole", "places": [place]})[0]
    assert "300 examples that are done already are read again and discarded" in caplog.text
    assert portions_of(again, 1)[0] == [[300.0, 301.0, 302.0, 303.0, 304.0, 305.0]]
    tensors = Tensors(1000)
    portions_of(passes(tensors, 1, start=50, saved={"kind": "whole", "places": [place]})[0], 1)
    assert tensors.most < 30, "nothing that is discarded is held"
    shorter = passes(Numbers(200), 1, start=50, saved={"kind": "whole", "places": [place]})[0]
    with pytest.raises(ConfigError, match=r"300 examples of shard 0 were done .* ends after 200"):
        portions_of(shorter, 1)


@pytest.mark.parametrize("buffer", [None, 4])
@pytest.mark.parametrize(("before", "after"), [((2, 0), (1, 0)), ((2, 0), (3, 0)), ((3, 0), (2, 0))])
def test_on_another_number_of_ranks_every_remaining_example_comes_once(
    before: tuple[int, int], after: tuple[int, int], buffer: int | None
) -> None:
    _assert_every_example_once(before, after, buffer)


def test_on_another_number_of_workers_every_remaining_example_comes_once() -> None:
    _assert_every_example_once((1, 2), (2, 0), None)


def _assert_every_example_once(before: tuple[int, int], after: tuple[int, int], buffer: int | None) -> None:
    data = Sharded(UNEVEN)
    for stop in (1, 2, 3):
        parts = [portions_of(walk, stop) for walk in passes(data, before[0], workers=before[1], buffer=buffer)]
        done = [value for found, _ in parts for batch in found for value in batch]
        saved = {"kind": "pieces", "places": [place for _, place in parts]}
        rest = passes(data, after[0], workers=after[1], buffer=buffer, start=stop, saved=saved)
        assert sorted(done + [value for walk in rest for value in read(walk)]) == data.everything


def _assert_a_chain_reads_every_example_once(
    sizes: list[int], batch_size: int, chain: list[tuple[int, int]], **how: Any
) -> None:
    """`chain` has a number of ranks, and how many batches these do before the run goes on with the next."""
    data, seen, start, saved = Sharded(sizes), [], 0, None
    for ranks, batches in [*chain, (2, 100)]:
        walks = passes(data, ranks, batch_size, start=start, saved=saved, **how)
        parts = [portions_of(walk, batches) for walk in walks]
        seen += [value for found, _ in parts for batch in found for value in batch]
        saved, start = {"kind": "pieces", "places": [place for _, place in parts]}, start + batches
    assert sorted(seen) == data.everything, (sizes, batch_size, chain, how)


def test_a_reader_that_ends_a_shard_with_its_batch_keeps_the_place_in_the_next() -> None:
    """Of the 2 ranks, the first ends a begun shard just at the end of its batch, and another begun shard is next."""
    _assert_a_chain_reads_every_example_once([7] * 6, 10, [(4, 1), (2, 1), (3, 100)])


def test_any_chain_of_resumes_reads_every_example_once() -> None:
    for seed in range(60):
        draw = random.Random(seed)
        sizes = [draw.randrange(10) for _ in range(draw.randrange(4, 9))]
        chain = [(draw.randrange(1, 5), draw.randrange(1, 4)) for _ in range(3)]
        buffer = draw.choice([None, 3])
        _assert_a_chain_reads_every_example_once(sizes, draw.randrange(5, 12), chain, buffer=buffer, shuffle=True)


def test_what_divides_itself_is_not_divided_anew() -> None:
    own = Numbers(20)
    own.is_share = True  # type: ignore[attr-defined]
    saved = {"kind": "own", "places": [portions_of(walk, 1)[1] for walk in passes(own, 2)]}
    with pytest.raises(ConfigError, match=r"begun with 2 ranks x 1 readers, so that 3 x 1 cannot resume"):
        passes(own, 3, start=1, saved=saved)


# Steps


def in_step(data: Any, **how: Any) -> list[tuple[Any, Any]]:
    return list(passes(data, 1, **how)[0].in_step(Group(0, 1, 1.0)))


def test_micro_batches_and_the_end_of_an_epoch() -> None:
    found = in_step(Numbers(8), accumulate=2)
    assert [batch.tolist() for _, batch in found] == [[0, 1, 2], [3, 4, 5], [6], [7]]
    assert [(micro.batch, micro.number, micro.weight, micro.whole) for micro, _ in found] == [
        (0, 0, 0.5, 6), (0, 1, 0.5, 6), (1, 0, 0.5, 2), (1, 1, 0.5, 2),
    ]  # fmt: skip
    assert [micro.completes_epoch for micro, _ in found] == [False, False, False, True]
    assert len(in_step(Numbers(8), drop_last=True)) == 1


def test_fixed_shapes_are_filled_up_and_the_filler_is_taken_back() -> None:
    found = in_step(Numbers(8), fill=True)
    assert [len(batch) for _, batch in found] == [6, 6, 6]
    total = sum(micro.scale * float(batch.sum()) for micro, batch in found)
    assert total == sum(range(8))
    assert [micro.examples for micro, _ in found] == [6, 6, -4]


@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_ranks_have_as_many_micro_batches_whatever_they_have_left(fill: bool, accumulate: int) -> None:
    """What three ranks compute together is the mean over what is really there; all have as much to compute."""
    data = Sharded([7, 2, 4])
    walks = passes(data, 3, accumulate=accumulate, fill=fill)
    chunks = [list(walk._chunks()) for walk in walks]
    for step in range(max(map(len, chunks))):
        mine = [each[step] if step < len(each) else None for each in chunks]
        counts = [0 if each is None else each.count for each in mine]
        micros = [
            list(walk._cut.micro_batches(step, part, counts, False, lambda walk=walk: walk._spare, None))
            for walk, part in zip(walks, mine, strict=True)
        ]
        assert len({len(each) for each in micros}) == 1
        mean = sum(micro.weight * float(batch.mean()) for each in micros for micro, batch in each) / 3
        values = [v for each in chunks if step < len(each) for v in _examples(each[step])]
        assert mean == pytest.approx(sum(values) / len(values))


def _examples(chunk: Any) -> list[float]:
    return [float(v) for batch in chunk.batches for v in batch.unique()] if chunk.count else []


# What cannot be used


def test_what_is_a_stream() -> None:
    assert is_stream(Numbers(3)) and is_stream(iter([1])) and is_stream(DataLoader(TensorDataset(torch.ones(2))))
    assert not is_stream([1, 2]) and not is_stream(TensorDataset(torch.ones(2))) and not is_stream(3)


def test_a_stream_that_is_refused() -> None:
    with pytest.raises(ConfigError, match="a generator can be read once"):
        check_stream((number for number in range(3)), "train_data()")
    with pytest.raises(ConfigError, match="a DataLoader makes batches"):
        check_stream(DataLoader(TensorDataset(torch.ones(2))), "train_data()")
    check_stream(DataLoader(TensorDataset(torch.ones(2)), batch_size=None), "train_data()")
    with pytest.raises(ConfigError, match="2 shards for 3 ranks leave 1 of them without any: write the data into 6"):
        passes(Sharded([4, 4]), 3, workers=2)
    with pytest.raises(ConfigError, match="batch_size: 2 examples of Sharded cannot be shared by 3 ranks"):
        passes(Sharded([4, 4, 4]), 3, batch_size=2)
    with pytest.raises(ConfigError, match="Numbers has no examples in epoch 0"):
        in_step(Numbers(0))
    with pytest.raises(ConfigError, match="no batch of 6 examples in epoch 0, and drop_last"):
        in_step(Numbers(3), drop_last=True)


def test_workers_without_a_shard_are_not_started_and_that_is_said() -> None:
    walk = passes(Sharded([4, 4]), 1, workers=4)[0]
    assert sorted(read(walk)) == Sharded([4, 4]).everything
    assert "2 shards for 1 rank x 4 workers: work" in walk.who_reads and "data.workers to 2" in walk.who_reads


def test_a_run_says_once_who_reads_what(new_run: Runs, caplog: pytest.LogCaptureFixture) -> None:
    own = Numbers(6)
    own.is_share = True  # type: ignore[attr-defined]
    with caplog.at_level("INFO"):
        for data in (Numbers(6), Sharded(UNEVEN), own):
            run = new_run(folder=str(len(caplog.messages)))
            set_up(run)
            trained(run, data)
    assert [each for each in caplog.messages if "1 rank" in each] == [
        "Numbers: 1 rank reads all of it",
        "Sharded: 6 shards, divided over 1 rank",
        "Numbers divides itself (is_share): each reader of 1 rank trains on all that it yields there",
    ]
    two = [passes(data, 2, workers=2)[0].who_reads for data in (Numbers(6), Sharded(UNEVEN))]
    assert "each of 4 readers (2 ranks x 2 workers) reads all of it" in two[0] and "divided over 2" not in two[0]
    assert two[1] == "Sharded: 6 shards, divided over 2 ranks x 2 workers"


# In a run


def walk(run: Run, data: Any, batch_size: int = 6, **how: Any) -> Any:
    """One call of run.batches for all starts of a run, as a program has it."""
    return run.batches(data, batch_size, **how)


def trained(run: Run, data: Any, epochs: int = 2, batch_size: int = 6, **how: Any) -> list[list[float]]:
    found = []
    for _ in run.epochs(epochs):
        for batch in walk(run, data, batch_size, **how):
            found.append([float(each) for each in batch])
            run.backward((run.model(batch.float()[:, None])).mean())
            run.step()
    return found


def set_up(run: Run) -> None:
    model = torch.nn.Linear(1, 1)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    run.restore()


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_stopped_anywhere_goes_on(new_run: Runs, kind: str, tmp_path: Path) -> None:
    whole, first, second = new_run(), new_run(), new_run()
    set_up(whole)
    expected = trained(whole, KINDS[kind]())
    set_up(first)
    data, found = KINDS[kind](), []
    for batch in walk(first, data):
        found.append([float(each) for each in batch])
        first.backward(first.model(batch.float()[:, None]).mean())
        first.step()
        if len(found) == 3:
            first.checkpoint()
            break
    set_up(second)
    assert found + trained(second, KINDS[kind]()) == expected


def test_leaving_a_pass_early_leaves_it_where_it_is(new_run: Runs) -> None:
    run, data, found = new_run(), Stateful(26), []
    set_up(run)
    for _ in range(3):
        for batch in run.batches(data, 6):
            found += batch.tolist()
            run.backward(run.model(batch.float()[:, None]).mean())
            run.step()
            if len(found) % 12 == 0:
                break
    assert found == list(range(26))


def test_reading_ahead_takes_no_random_numbers_from_training(new_run: Runs) -> None:
    run = new_run()
    set_up(run)
    before = random.getstate(), torch.get_rng_state()
    next(iter(run.batches(Numbers(26, draws=True), 6)))
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])


def test_a_stream_is_evaluated_to_its_last_example(new_run: Runs) -> None:
    run, data = new_run(), Stateful(26)
    set_up(run)
    assert run._engine.evaluator.names_of(lambda batch: {"mean": batch}, data, 6) == ({"mean": 0.0}, True)
    for _ in range(2):
        assert run.evaluate(lambda batch: {"mean": batch.double()}, data, 6) == {"mean": 12.5}
    with pytest.raises(ConfigError, match="Numbers has no examples: there is nothing to measure"):
        run.evaluate(lambda batch: {"mean": batch}, Numbers(0), 6)


def test_an_object_that_keeps_its_place_is_not_read_twice_at_once(new_run: Runs) -> None:
    run, data = new_run(), Stateful(26)
    set_up(run)
    with pytest.raises(ConfigError, match="is being read already, and keeps its place in itself"):
        for _ in run.batches(data, 6):
            run.evaluate(lambda batch: {"mean": batch}, data, 6)


def test_a_state_that_is_not_plain_is_refused_before_the_first_step(new_run: Runs) -> None:
    class Odd(Stateful):
        def state_dict(self) -> dict[str, Any]:
            return {"place": self.place, "lock": object()}

    run = new_run()
    set_up(run)
    with pytest.raises(ConfigError, match=r"Odd: what its state_dict\(\) returns cannot be saved: .*lock.* object"):
        next(iter(run.batches(Odd(26), 6)))
    assert run.progress.step == 0


def test_a_stream_that_cannot_be_read_again_is_named_in_its_second_epoch(new_run: Runs) -> None:
    class Once(Numbers):
        def __iter__(self) -> Iterator[float]:
            yield from super().__iter__()
            self.count = 0

    run = new_run()
    set_up(run)
    with pytest.raises(ConfigError, match=r"Once has no examples in epoch 1\. Can it be read more than once\?"):
        trained(run, Once(12))


def test_a_change_in_the_midst_of_a_pass_is_refused(new_run: Runs) -> None:
    run = new_run(data={"shuffle_buffer": 4})
    set_up(run)
    for batch in run.batches(Sharded(UNEVEN), 6, name="a"):
        run.backward(run.model(batch.float()[:, None]).mean())
        run.step()
        run.checkpoint()
        break
    again = new_run()
    set_up(again)
    with pytest.raises(ConfigError, match=r"cannot be resumed with shuffle_buffer 4 -> None"):
        next(iter(again.batches(Sharded(UNEVEN), 6, name="a")))


# Batches of one's own


class Batches:
    """Ready batches with a state, as a StatefulDataLoader has it."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.place < 5:
            self.place += 1
            yield torch.full((2, 1), float(self.place))
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": torch.tensor(self.place)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = int(state["place"])


def test_batches_with_a_state_go_on_where_they_were(new_run: Runs) -> None:
    def walk(run: Run, stop: int | None = None) -> list[float]:
        found: list[float] = []
        for _ in run.epochs(2):
            for batch in run.stream(Batches(), len, "loader"):
                found.append(float(batch[0]))
                run.backward(run.model(batch).mean())
                run.step()
                if len(found) == stop:
                    run.checkpoint()
                    return found
        return found

    first, second = new_run(), new_run()
    set_up(first)
    begun = walk(first, stop=3)
    set_up(second)
    assert begun + walk(second) == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5]


# Tar files


def write_tar(path: Path, count: int, mode: Any = "w") -> Path:
    with tarfile.open(path, mode) as tar:
        for number in range(count):
            for extension in ("txt", "seg.txt"):
                text = f"{path.name} {number} {extension}".encode()
                member = tarfile.TarInfo(f"folder/{number:04d}.{extension}")
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text))
    return path


def key(sample: dict[str, Any]) -> str:
    return f"{sample['txt'].decode()}+{sample['seg.txt'].decode()}"


def test_tar_shards_go_on_after_any_sample(tmp_path: Path) -> None:
    written = [("a.tar", 5, "w"), ("b.tar.gz", 4, "w:gz"), ("c.tar", 3, "w")]
    files = [write_tar(tmp_path / name, count, mode) for name, count, mode in written]
    expected = list(lockstep.TarShards(files, decode=key))
    assert len(expected) == 12 and expected[0] == "a.tar 0 txt+a.tar 0 seg.txt"
    assert list(lockstep.TarShards(str(tmp_path / "*.tar*"), decode=key)) == expected
    for stop in range(1, 13):
        first, second = lockstep.TarShards(files, decode=key), lockstep.TarShards(files, decode=key)
        iterator = iter(first)
        begun = [next(iterator) for _ in range(stop)]
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert begun + list(second) == expected
        assert list(second) == expected
    parts = [list(lockstep.TarShards(files, decode=key).shard(num_shards=3, index=index)) for index in range(3)]
    assert [len(part) for part in parts] == [5, 4, 3] and [each for part in parts for each in part] == expected


def test_tar_shards_that_are_missing_or_cut_off_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file '.*nothing-\*\.tar'"):
        lockstep.TarShards(str(tmp_path / "nothing-*.tar"))
    with pytest.raises(ConfigError, match="no paths were given"):
        lockstep.TarShards([])
    whole = write_tar(tmp_path / "a.tar", 5).read_bytes()
    first, second = (rf"in or after its member 'folder/0000\.{kind}txt': .*\. Write it again" for kind in ("", "seg."))
    for size, where in ((100, "truncated header.* Write"), (600, first), (1024, first), (1600, second), (2048, second)):
        (tmp_path / "cut.tar").write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=rf"cut\.tar .*{where}"):
            list(lockstep.TarShards(tmp_path / "cut.tar"))
    (tmp_path / "cut.tar").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"cut\.tar cannot be read as a tar file: empty .*\. Write it again"):
        list(lockstep.TarShards(tmp_path / "cut.tar"))
    packed = write_tar(tmp_path / "b.tar.gz", 400, "w:gz").read_bytes()
    for size, where in (
        (len(packed) // 2, r"damaged or cut off in or after its member 'folder/0\d+\."),
        (3, "tar file"),
    ):
        (tmp_path / "cut.tar").write_bytes(packed[:size])
        with pytest.raises(ConfigError, match=rf"cut\.tar .*{where}"):
            list(lockstep.TarShards(tmp_path / "cut.tar"))
    gone = lockstep.TarShards(tmp_path / "cut.tar")
    (tmp_path / "cut.tar").unlink()
    with pytest.raises(ConfigError, match=r"cut\.tar cannot be opened: No such file or directory\. Restore it"):
        list(gone)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_decoded_is_named(tmp_path: Path, workers: int) -> None:
    data = lockstep.TarShards(write_tar(tmp_path / "a.tar", 5), decode=lambda sample: int(sample["txt"]))
    with pytest.raises(ValueError, match="invalid literal for int") as found:
        read(passes(data, 1, workers=workers)[0])
    assert f"decoding folder/0000.txt, folder/0000.seg.txt of {tmp_path / 'a.tar'}: wri" in found.value.__notes__[0]


# In a task


class OfNumbers(lockstep.Task):
    def __init__(self, stream: bool) -> None:
        self.stream = stream

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(1, 1)

    def train_data(self) -> Any:
        return Numbers(20) if self.stream else TensorDataset(torch.ones(20, 1))

    def loss(self, model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).mean()


@pytest.mark.parametrize(
    ("stream", "data", "said"),
    [
        (True, {"split": {"train": 0.8, "val": 0.2}}, r"data\.split: train_data\(\) is a stream \(Numbers\)"),
        (False, {"shuffle_buffer": 10}, r"data\.shuffle_buffer: 10 is for streams"),
        (True, {"order": "weighted"}, r"data\.order: weighted: train_data\(\) is a stream \(Numbers\)"),
    ],
)
def test_settings_that_do_not_fit_the_data_are_refused(stream: bool, data: dict[str, Any], said: str) -> None:
    config = RunConfig.model_validate({"task": {"type": "x:Y"}, "train": {"epochs": 1, "batch_size": 4}, "data": data})
    with pytest.raises(ConfigError, match=said):
        order_of(OfNumbers(stream), config, datasets_of(OfNumbers(stream), config)["train"])


class OfShards(lockstep.Task):
    seen: ClassVar[list[float]] = []

    def model(self) -> Any:
        return torch.nn.Linear(1, 1)

    def train_data(self) -> Any:
        return Sharded([2] * 6)

    def loss(self, model: Any, batch: Any) -> Any:
        self.seen.extend(batch.tolist())
        return model(batch.float()[:, None]).square().mean()


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_config_says_whether_the_shards_of_a_tasks_stream_are_shuffled(new_run: Runs, shuffle: bool) -> None:
    train = {"epochs": 1, "batch_size": 3}
    config = {"task": f"{__name__}:OfShards", "train": train, "data": {"shuffle": shuffle}}
    OfShards.seen.clear()
    fit(new_run(), RunConfig.model_validate(config))
    assert len(OfShards.seen) == 12
    assert (OfShards.seen == sorted(OfShards.seen)) is not shuffle


def test_the_steps_of_a_stream_are_known_where_they_are_limited() -> None:
    for limits, total in (({"epochs": 2}, None), ({"steps": 7}, 7)):
        config = RunConfig.model_validate({"task": {"type": "x:Y"}, "train": {"batch_size": 4, **limits}})
        assert run_length(config, None).steps == total
