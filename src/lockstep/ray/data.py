"""Ray Data as a source of examples: every worker has a shard, and every row counts once."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray.train

from lockstep.engine.run import Run
from lockstep.errors import ConfigError
from lockstep.evaluation.means import Measure


class DataConfig(ray.train.DataConfig):  # type: ignore[misc]
    """Splits datasets without leaving out a row. Ray's own makes shards equal, and drops what does not fit."""

    def __init__(self, **arguments: Any) -> None:
        if arguments:
            raise ConfigError(
                f"lockstep.ray.DataConfig({next(iter(arguments))}=...): it takes no arguments, since every dataset is "
                "split among all workers, so that each row counts once"
            )
        super().__init__()

    def configure(
        self,
        datasets: Mapping[str, Any],
        world_size: int,
        worker_handles: Sequence[Any] | None,
        worker_node_ids: Sequence[str] | None,
        **kwargs: Any,
    ) -> list[dict[str, Any]]:
        shards: list[dict[str, Any]] = [{} for _ in range(world_size)]
        for name, dataset in datasets.items():
            for rank, shard in enumerate(dataset.streaming_split(world_size, equal=False)):
                shards[rank][name] = shard
        return shards


def batches(run: Run, name: str, batch_size: int, **options: Any) -> Iterator[Any]:
    """Yields this worker's rows of every global batch of the next epoch of a dataset, as a mapping of tensors.

    `options` are those of Ray's `iter_torch_batches`, e.g. local_shuffle_buffer_size.
    """
    if batch_size < run.world_size:
        raise ConfigError(
            f"batch_size: {batch_size} rows cannot be divided among {run.world_size} workers, each of which reads "
            f"another shard: set it to {run.world_size} or more"
        )
    if run.dp_size != run.world_size:
        raise ConfigError(
            f"strategy.mesh: {run.world_size} ranks work on {run.dp_size} parts of a batch, but Ray gives every worker "
            f"another shard of {name!r}: Ray Data needs a mesh of the axis data alone"
        )
    return run.stream(_shard(run, name, batch_size, options), row_count, name, ahead=True)


def evaluate(
    run: Run, measure: Measure, name: str, batch_size: int, rows: int | None = None, **options: Any
) -> dict[str, float]:
    """Returns exact means over all rows of a dataset; `rows` is how many the workers must see together."""
    return run._engine.evaluate_stream(measure, _shard(run, name, batch_size, options), row_count, rows, name)


def row_count(batch: Any) -> int:
    columns: list[Any] = [*batch.values()] if isinstance(batch, Mapping) else [{}]
    lengths = {-1 if isinstance(each, Mapping) or not hasattr(each, "__len__") else len(each) for each in columns}
    if -1 in lengths or len(lengths) > 1:
        raise ConfigError(
            f"Ray Data: a batch is a {type(batch).__name__} whose rows cannot be counted: with collate_fn, return a "
            "mapping of columns that all have a value for each row"
        )
    return max(lengths, default=0)


def _shard(run: Run, name: str, batch_size: int, options: Mapping[str, Any]) -> Iterator[Any]:
    try:
        shard = ray.train.get_dataset_shard(name)
    except KeyError:
        shard = None
    if shard is None:
        raise ConfigError(f"there is no dataset {name!r}: TorchTrainer(datasets={{{name!r}: ...}}) names them")
    first, last = (batch_size * rank // run.world_size for rank in (run.rank, run.rank + 1))
    count = max(last - first, 1)
    if inspect.isfunction(collate := options.get("collate_fn")):
        options = {**options, "collate_fn": _counted(collate)}
    # The runtime moves batches to its device itself, which Ray does not know in the case of XLA.
    return iter(shard.iter_torch_batches(batch_size=count, device="cpu", **options))


def _counted(collate: Any) -> Any:
    """Has a collate_fn keep the number of rows, by which ranks weigh their parts of a batch."""

    def counted(rows: Any) -> Any:
        given, batch = row_count(rows), collate(rows)
        if row_count(batch) != given:
            raise ConfigError(f"Ray Data: collate_fn made {row_count(batch)} rows of {given}: keep each of them")
        return batch

    return counted
