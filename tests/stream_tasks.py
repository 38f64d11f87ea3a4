"""The small task of tests/tasks.py on streams of every kind, with the examples that it has by index."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset

import lockstep
from tasks import Tiny

SHARDS = [9, 30, 17, 25]  # examples in each; over two or three ranks some run out long before the others


class Streamed(Tiny):
    """`kind` says what train_data() and val_data() return; `folder` has the shards that `write_shards` wrote."""

    def __init__(self, kind: str = "plain", folder: str = "", noise: bool = False, **rest: Any) -> None:
        super().__init__(examples=sum(SHARDS), **rest)
        self.kind, self.folder, self.noise = kind, folder, noise

    def train_data(self) -> Any:
        data: Any = super().train_data()
        return data if self.kind == "by index" else self._stream(data)

    def val_data(self) -> Any:
        return self.train_data() if self.kind in ("by index", "tar", "hugging face") else self._stream(
            TensorDataset(*(each[:20] for each in super().train_data().tensors))  # type: ignore[attr-defined]
        )  # fmt: skip

    def _stream(self, data: TensorDataset) -> Any:
        if self.kind == "tar":
            return lockstep.TarShards(f"{self.folder}/*.tar", decode=decode)
        if self.kind == "hugging face":
            import datasets

            files = sorted(map(str, Path(self.folder).glob("*.jsonl")))
            found = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
            return found.with_format("torch").map(pair)
        if self.kind == "loader":
            from torchdata.stateful_dataloader import StatefulDataLoader

            return StatefulDataLoader(data, batch_size=None, shuffle=True)
        return {"plain": Plain, "stateful": Stateful, "by rank": ByRank}[self.kind](data, self.noise)

    def collate(self, examples: list[Any]) -> list[Tensor]:
        if isinstance(examples[0], dict):
            examples = [(each["inputs"], each["label"]) for each in examples]
        return [torch.stack([each[0] for each in examples]), torch.stack([each[1] for each in examples])]


class Plain(IterableDataset[Any]):
    def __init__(self, data: TensorDataset, noise: bool) -> None:
        self.data, self.noise = data, noise

    def __iter__(self) -> Iterator[Any]:
        for inputs, label in self.data:
            yield inputs + 0.1 * torch.randn(8) if self.noise else inputs, label


class Stateful(Plain):
    place = 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < len(self.data):
            inputs, label = self.data[self.place]
            self.place += 1
            yield inputs + 0.1 * torch.randn(8) if self.noise else inputs, label
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": torch.tensor(self.place)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = int(state["place"])


class ByRank(Plain):
    """Divides itself, and does not say so."""

    def __iter__(self) -> Iterator[Any]:
        import torch.distributed as dist

        yield from list(super().__iter__())[dist.get_rank() :: dist.get_world_size()]


def decode(sample: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return torch.tensor(json.loads(sample["inputs.json"])), torch.tensor(int(sample["cls"]))


def pair(row: dict[str, Any]) -> dict[str, Any]:
    return {"inputs": row["inputs"], "label": row["label"]}


def write_shards(folder: Path) -> str:
    """The examples of the task, in order, as tar files and as lines of JSON."""
    folder.mkdir(exist_ok=True)
    inputs, labels = Tiny(examples=sum(SHARDS)).train_data().tensors  # type: ignore[attr-defined]
    number = 0
    for shard, count in enumerate(SHARDS):
        with (
            tarfile.open(folder / f"{shard}.tar", "w") as tar,
            (folder / f"{shard}.jsonl").open("w") as lines,
        ):
            for _ in range(count):
                row = {"inputs": inputs[number].tolist(), "label": int(labels[number])}
                lines.write(json.dumps(row) + "\n")
                for name, text in {"inputs.json": json.dumps(row["inputs"]), "cls": str(row["label"])}.items():
                    member = tarfile.TarInfo(f"{number:04d}.{name}")
                    member.size = len(text)
                    tar.addfile(member, io.BytesIO(text.encode()))
                number += 1
    return str(folder)
