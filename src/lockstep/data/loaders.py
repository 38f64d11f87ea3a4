"""The loaders of a run: one for every dataset and way of walking it, kept from epoch to epoch."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from lockstep.config.schema import Data
from lockstep.data.loader import Collate, Loader, Loading, check_dataset
from lockstep.data.order import GlobalBatches
from lockstep.runtime.base import Runtime


class Loaders:
    """Makes loaders for one rank, and keeps them with their worker processes until it is closed."""

    def __init__(self, rank: int, world_size: int, seed: int, settings: Data, runtime: Runtime) -> None:
        self._rank, self._world_size, self._seed = rank, world_size, seed
        self._fill = runtime.fixed_shapes
        pin = runtime.device.type == "cuda" if settings.pin_memory is None else settings.pin_memory
        self._loading = Loading(settings.workers, pin, settings.prefetch)
        self._kept: dict[tuple[Any, ...], Loader] = {}

    def get(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        collate: Collate | None,
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        accumulate: int = 1,
        alone: bool = False,
    ) -> Loader:
        """The loader for this rank's share of a dataset; for all of it, where the rank walks it alone."""
        # A loader holds on to its dataset, so that no other one can come to have the same id.
        key = (id(dataset), collate, batch_size, shuffle, drop_last, accumulate, alone)
        if key not in self._kept:
            rank, world_size = (0, 1) if alone else (self._rank, self._world_size)
            count = check_dataset(dataset, "the dataset")
            walk = GlobalBatches(
                count, batch_size, rank, world_size, self._seed, shuffle, drop_last, accumulate, self._fill
            )
            self._kept[key] = Loader(dataset, walk, collate, self._loading)
        return self._kept[key]

    def close(self) -> None:
        for loader in self._kept.values():
            loader.close()
