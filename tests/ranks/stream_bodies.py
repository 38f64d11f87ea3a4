"""What ranks do with streams in tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

import lockstep
from lockstep.tasks.callbacks import UserCallbacks


def number(sample: dict[str, Any]) -> torch.Tensor:
    return torch.tensor([float(sample["__key__"])])


class Numbers(IterableDataset[Any]):
    """Shard k has the examples 1000 k, 1000 k + 1, ...; the shards have different lengths."""

    sizes = (300, 250, 60, 150)

    def __init__(self, shards: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        self.shards, self.num_shards = shards, len(shards)

    def shard(self, num_shards: int, index: int) -> Numbers:
        return Numbers((self.shards[index],))

    def __iter__(self) -> Iterator[Any]:
        for shard in self.shards:
            for number in range(self.sizes[shard]):
                yield torch.tensor([1000.0 * shard + number])


class Batches:
    """Batches without an end, with a state."""

    done = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.done += 1
            yield torch.ones(2, 1)

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


class Enough:
    """The last rank alone has enough; it does not say by an annotation that it may."""

    def after_step(self, run):  # type: ignore[no-untyped-def]
        return "enough" if run.rank and run.progress.step >= 210 else None


def exchanges(run: lockstep.Run) -> dict[str, Any]:
    """A stream that ranks run out of at different times, left in its midst once; then one that a hook stops."""
    model = nn.Linear(1, 1)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.0))
    names: list[str] = []
    gather = run._engine.group.gather

    def noted(value: Any, name: str = "") -> Any:
        names.append(name)
        return gather(value, name)

    run._engine.group.gather = noted  # type: ignore[method-assign,assignment]
    seen: list[float] = []
    data = Numbers()
    for stop in (40, None):
        for batch in run.batches(data, 8):
            run.backward(run.model(batch).mean())
            if run._engine.feed.step is not None and run._engine.feed.step.examples:
                seen += batch[:, 0].tolist()
            run.step()
            if run.progress.step == stop:
                break
    steps, own = run.progress.step, UserCallbacks([Enough()])
    without_state = (torch.ones(2, 1) for _ in range(60 - 3 * run.rank))
    names.clear()
    for batch in run.stream(without_state, count=len, ahead=True):
        run.backward(run.model(batch).mean())
        run.step()
    stateless = sum("how many examples" in name for name in names)
    assert run.progress.step == steps + 60
    for batch in run.stream(Batches(), count=len):
        run.backward(run.model(batch).mean())
        run.step()
        own.after_step(run)
    counts = stateless + sum("how many examples" in name for name in names)
    asked = sum("whether a hook stops" in name for name in names)
    return {
        "seen": seen,
        "steps": steps,
        "end": run.progress.step,
        "counts": counts,
        "stateless": stateless,
        "asked": asked,
        "why": run.stopped,
    }


def walk(run: lockstep.Run, folder: str, stop: int | None = None) -> list[int]:
    """One epoch over tar files, saved and left after so many steps; the numbers of the examples that this rank saw."""
    model = nn.Linear(1, 2)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.0))
    run.restore()
    found: list[int] = []
    for _ in run.epochs(1):
        for batch in run.batches(lockstep.TarShards(f"{folder}/*.tar", decode=number), 12):
            run.backward(run.model(batch).mean())
            if run._engine.feed.step is not None and run._engine.feed.step.examples:
                found += [int(each) for each in batch[:, 0]]
            run.step()
            if run.progress.step == stop:
                run.checkpoint()
                return found
    return found
