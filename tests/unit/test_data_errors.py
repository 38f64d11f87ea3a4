"""Errors of user code in data: which example of which dataset, here and from workers, with the traceback once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pickle import PicklingError
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset

from lockstep.data import workers as data_workers
from lockstep.data.batches import GlobalBatches
from lockstep.data.loader import Loader
from lockstep.data.stream import Pass
from lockstep.data.stream_batches import BatchSlice
from lockstep.data.stream_reader import Source
from lockstep.data.workers import Loading
from lockstep.distributed.failure import report
from lockstep.distributed.from_worker import FromWorker
from lockstep.errors import ConfigError
from lockstep.tasks import predict


class OfTwo(Exception):
    def __init__(self, image: str, why: str) -> None:
        super().__init__(f"{image} is {why}")
        self.image = image


class Images(Dataset[Any]):
    def __init__(self, broken: Callable[[], Any]) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return self.broken() if index == 7 else torch.ones(2)


class Together(Images):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Stream(IterableDataset[Any]):
    def __init__(self, images: Images) -> None:
        self.images = images

    def __iter__(self) -> Iterator[Any]:
        for index in range(len(self.images)):
            yield self.images[index]


def damaged() -> Any:
    raise OfTwo("a.png", "damaged")


def missing() -> Any:
    open("nowhere.png")  # noqa: PTH123, SIM115


def unknown() -> Any:
    class Local(ValueError):
        pass

    raise Local("of a function")


def nothing() -> Any:
    return None


def longer() -> Any:
    return torch.ones(3)


def read(data: Any, workers: int, collate: Any = None) -> list[Any]:
    if isinstance(data, Stream):
        walk = Pass(Source(data, "Stream"), BatchSlice(0, 1, 4, collate=collate), Loading(workers))
        return [chunk.batches for chunk in walk._chunks()]
    loader = Loader(data, GlobalBatches(12, 4, shuffle=False), collate, loading=Loading(workers))
    try:
        return list(loader.epoch(0))
    finally:
        loader.close()


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize(
    ("data", "where"),
    [
        (Images(damaged), "fetching example 7 of Images"),
        (Subset(Images(damaged), range(11, -1, -1)), "fetching example 7 of Images"),
        (Together(damaged), "fetching examples 4, 5, 6, 7 of Together"),
        (Stream(Images(damaged)), "reading on after the first 7 examples of Stream"),
    ],
)
def test_an_error_names_its_example_and_has_one_traceback(data: Any, where: str, workers: int) -> None:
    with pytest.raises(OfTwo) as found:
        read(data, workers)
    assert found.value.image == "a.png"
    written = report(found.value, 1, "box")
    assert written.message == f"OfTwo: a.png is damaged ({where})"
    assert written.traceback.count("Traceback (most recent") == written.traceback.count("in damaged\n") == 1


def test_predict_names_the_example_from_its_workers_too() -> None:
    work: Any = SimpleNamespace(_filled=np.asarray, _task=None, _workers=1, _data=Images(damaged))
    with pytest.raises(OfTwo) as found:
        list(predict._Work._fetched(work, [np.arange(6, 9)]))
    assert found.value.__notes__ == ["fetching example 7 of Images"]


@pytest.mark.parametrize("workers", [0, 1])
def test_what_cannot_be_collated_is_named(workers: int) -> None:
    with pytest.raises((AttributeError, TypeError)) as none:
        read(Images(nothing), workers)
    with pytest.raises(RuntimeError, match="equal size") as ragged:
        read(Images(longer), workers)
    with pytest.raises(RuntimeError, match="equal size") as streamed:
        read(Stream(Images(longer)), workers)
    what = "collating examples 4, 5, 6, 7 of Images: without a collate function they must have the same shape"
    assert none.value.__notes__ == [what, "example 7 of Images is None: __getitem__ must return an example"]
    assert ragged.value.__notes__ == [what]
    assert streamed.value.__notes__ == ["collating 4 of the first 8 examples of Stream"]


def test_errors_keep_what_the_system_says_and_those_that_cannot_be_sent_their_text() -> None:
    with pytest.raises(FileNotFoundError, match=r"\[Errno 2\] No such file or directory: 'nowhere.png'") as of_file:
        read(Images(missing), 1)
    assert of_file.value.filename == "nowhere.png"
    with pytest.raises(RuntimeError, match="Local: of a function") as local:
        read(Images(unknown), 1)
    assert local.value.__notes__ == ["fetching example 7 of Images"]
    decoding = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    assert str(FromWorker.of(decoding).error()) == str(decoding)


@pytest.mark.parametrize("data", [Images(lambda: 0), Stream(Images(lambda: 0))])
def test_a_batch_that_cannot_be_sent_is_an_error_and_no_wait(data: Any) -> None:
    with pytest.raises((AttributeError, PicklingError), match="pickle") as found:
        read(data, 1, lambda examples: lambda: examples)
    assert "a batch cannot be sent from a data worker" in found.value.__notes__[0]


@pytest.mark.filterwarnings("ignore:Got pickle error")
def test_data_that_cannot_be_sent_to_workers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_workers, "start_method", lambda: "spawn")
    for data in (Images(lambda: None), Stream(Images(lambda: None))):
        with pytest.raises(ConfigError, match=rf"{type(data).__name__} cannot be sent to worker .*<lambda>"):
            read(data, 1)
