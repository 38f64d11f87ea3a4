"""The numbered examples of benchmarks/elastic.py, and how Lockstep and each peer train and resume on them."""

from __future__ import annotations

import io
import json
import math
import os
import random
import re
import signal
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler, get_worker_info


@dataclass(frozen=True)
class Segment:
    """One start of a run: from its newest checkpoint, where it has one, to the step that it is killed at."""

    peer: str
    form: str
    workers: int
    ranks: int
    examples: int
    batch: int  # of all ranks together
    every: int  # steps between checkpoints
    folder: str
    number: int = 0
    kill: int = 0  # never, where it is 0

    @property
    def mine(self) -> int:
        return self.batch // self.ranks

    @property
    def steps(self) -> int:
        return math.ceil(length(self.form, self.examples) / self.batch)


class Notes:
    """What one rank saw in each completed step, in a file that outlives it."""

    def __init__(self, segment: Segment, rank: int) -> None:
        self._kill, self._seen = segment.kill, []
        self._file = (Path(segment.folder) / f"notes-{segment.number}-{rank}.jsonl").open("w", encoding="utf-8")

    def write(self, *line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def resumed(self, step: int) -> None:
        self.write("resumed", step)

    def saw(self, numbers: torch.Tensor) -> None:
        self._seen += [each for each in numbers.flatten().tolist() if each >= 0]

    def done(self, step: int) -> None:
        self.write(step, self._seen)
        self._seen = []
        if step == self._kill:
            time.sleep(1)  # a checkpoint that is written in the background may end
            os.kill(os.getpid(), signal.SIGKILL)


class Model(torch.nn.Module):
    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self.layer, self.notes = torch.nn.Linear(1, 1), notes

    def forward(self, number: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.layer(number.float().mean(1, keepdim=True) / 1000)
        # An example of weight zero (what a rank computes that has none left) has no gradient, and does not count.
        found.register_hook(lambda gradient: self.notes.saw(number[gradient.flatten() != 0]))
        return {"loss": found.mean()}


# The examples


class Rows(Dataset[Any]):
    def __init__(self, rows: list[list[int]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"number": torch.tensor(self.rows[index])}


class Tars(IterableDataset[Any]):
    """Reads tar files: its worker's, and with `split` only its rank's."""

    def __init__(self, files: list[Path], split: bool) -> None:
        self.files, self.split, self.place, self.begin = files, split, 0, 0

    def __iter__(self) -> Iterator[Any]:
        files, worker = self.files, get_worker_info()
        if self.split:
            files = files[dist.get_rank() :: dist.get_world_size()]
        if worker is not None:
            files = files[worker.id :: worker.num_workers]
        begin, self.begin = self.begin, 0
        for self.place, number in enumerate((number for file in files for number in members(file)), 1):
            if self.place > begin:
                yield {"number": torch.tensor([number])}

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["place"]


def members(file: Path) -> Iterator[int]:
    with tarfile.open(file) as tar:
        for member in tar:
            content = tar.extractfile(member)
            assert content is not None
            yield int(content.read())


def decode(sample: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {"number": torch.tensor([int(sample["txt"])])}


def write_tars(folder: Path, examples: int) -> None:
    """Files of 25 examples; fewer where there are few, so that every worker has one."""
    folder.mkdir()
    each = min(25, examples // 24)
    for begin in range(0, examples, each):
        with tarfile.open(folder / f"{begin:06d}.tar", "w") as tar:
            for number in range(begin, min(begin + each, examples)):
                member = tarfile.TarInfo(f"{number:06d}.txt")
                member.size = len(str(number))
                tar.addfile(member, io.BytesIO(str(number).encode()))


def rows(form: str, examples: int) -> list[list[int]]:
    """The examples of every row. Packed: one to three in a row, padded by -1."""
    if form != "packed":
        return [[number] for number in range(examples)]
    draw, packed, begin = random.Random(0), [], 0
    while begin < examples:
        end = min(begin + draw.randint(1, 3), examples)
        packed.append([*range(begin, end), *[-1] * (3 - end + begin)])
        begin = end
    return packed


def length(form: str, examples: int) -> int:
    return len(rows(form, examples))


def weights(examples: int) -> list[float]:
    return [1.0 if number % 3 else 4.0 for number in range(examples)]


def data(segment: Segment) -> Any:
    if segment.form.startswith("tar"):
        files = sorted((Path(segment.folder).parent / "tars").glob("*.tar"))
        return Tars(files, split=segment.form == "tar")
    return Rows(rows(segment.form, segment.examples))


def loader(segment: Segment, loaded: Any, kind: Any = DataLoader, **more: Any) -> Any:
    """A loader as its users write one: shuffled or with a sampler, if the data is no stream."""
    if segment.form == "weighted":
        generator = torch.Generator().manual_seed(0)
        more["sampler"] = WeightedRandomSampler(weights(segment.examples), segment.examples, generator=generator)
    elif not segment.form.startswith("tar") and "sampler" not in more:
        more["shuffle"] = True
    return kind(loaded, batch_size=segment.mine, num_workers=segment.workers, **more)


# The peers: each trains one segment on one rank


def accelerate(segment: Segment, notes: Notes) -> None:
    from accelerate import Accelerator, skip_first_batches
    from accelerate.utils import DataLoaderConfiguration, set_seed

    set_seed(0)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    model = Model(notes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(segment, data(segment)))
    begin, saved = 0, newest(segment.folder, "step_*")
    if saved:
        accelerator.load_state(saved)
        begin = number_of(saved)
        batches = skip_first_batches(batches, begin)
    notes.resumed(begin)
    for done, batch in enumerate(batches, begin + 1):
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        if done % segment.every == 0:
            accelerator.save_state(f"{segment.folder}/step_{done}")
        notes.done(done)


def lightning(segment: Segment, notes: Notes) -> None:
    from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model(notes)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Noting(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            notes.resumed(trainer.global_step)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            notes.done(trainer.global_step)

    seed_everything(0, workers=True)
    saving = ModelCheckpoint(segment.folder, "{step}", every_n_train_steps=segment.every, save_top_k=-1)
    trainer = Trainer(
        accelerator="cpu", devices=segment.ranks, strategy="ddp", max_epochs=1, logger=False,
        callbacks=[Noting(), saving], enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), loader(segment, data(segment)), ckpt_path=newest(segment.folder, "step=*.ckpt"))


def transformers(segment: Segment, notes: Notes) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Noting(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            notes.resumed(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            notes.done(state.global_step)

    arguments = TrainingArguments(
        output_dir=segment.folder, per_device_train_batch_size=segment.mine, num_train_epochs=1, learning_rate=0.01,
        max_steps=segment.steps if segment.form.startswith("tar") else -1, save_strategy="steps",
        save_steps=segment.every, use_cpu=True, ddp_backend="gloo", dataloader_num_workers=segment.workers,
        dataloader_pin_memory=False, remove_unused_columns=False, report_to=[], disable_tqdm=True, seed=0,
    )  # fmt: skip
    trainer = Trainer(Model(notes), arguments, train_dataset=data(segment), callbacks=[Noting()])
    trainer.train(resume_from_checkpoint=newest(segment.folder, "checkpoint-*"))


def torchdata(segment: Segment, notes: Notes) -> None:
    from torch.nn.parallel import DistributedDataParallel
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    dist.init_process_group("gloo")
    loaded, more = data(segment), {}
    if segment.form != "tar":
        more["sampler"] = StatefulDistributedSampler(loaded, shuffle=True, seed=0)
    batches = loader(segment, loaded, StatefulDataLoader, **more)
    model = DistributedDataParallel(Model(notes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    begin, saved = 0, newest(segment.folder, "step_*")
    if saved:
        # Every rank has a state of its own. One that is new takes that of another rank.
        files = sorted(Path(saved).glob("*.pt"))
        state = torch.load(files[dist.get_rank() % len(files)], weights_only=False)
        model.load_state_dict(state["model"])
        batches.load_state_dict(state["batches"])
        begin = number_of(saved)
    notes.resumed(begin)
    with model.join():  # ranks may have different numbers of batches
        for done, batch in enumerate(batches, begin + 1):
            model(**batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            if done % segment.every == 0:
                folder = Path(segment.folder) / f"step_{done}"
                folder.mkdir(exist_ok=True)
                state = {"model": model.state_dict(), "batches": batches.state_dict()}
                torch.save(state, folder / f"{dist.get_rank()}.pt")
            notes.done(done)


def lockstep(run: Any, segment: Segment) -> None:
    from lockstep import TarShards

    notes = Notes(segment, run.rank)
    model = Model(notes)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    run.restore()
    notes.resumed(run.progress.step)
    loaded, order = data(segment), None
    if segment.form == "tar":
        loaded = TarShards([str(each) for each in loaded.files], decode=decode)
    if segment.form == "weighted":
        order = {"type": "weighted", "weights": weights(segment.examples)}
    for _ in run.epochs(1):
        for batch in run.batches(loaded, segment.batch, **({"order": order} if order else {})):
            run.backward(run.model(**batch)["loss"])
            run.step()
            if run.progress.step % segment.every == 0:
                run.checkpoint()
            notes.done(run.progress.step)


def newest(folder: str, pattern: str) -> str | None:
    return max(map(str, Path(folder).glob(pattern)), key=number_of, default=None)


def number_of(path: str) -> int:
    return int(re.findall(r"\d+", Path(path).name)[-1])
