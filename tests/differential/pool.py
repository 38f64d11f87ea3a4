"""Ranks that stay, and train one program after the other: `python pool.py RANKS` takes jobs by lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from plain import DECAY
from programs import FEATURES, Program, Walk, build_models, build_source, computed, freeze, is_walked
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.config.schema import RunSettings
from lockstep.engine.engine import Engine
from lockstep.engine.run import Run
from lockstep.engine.stop_requests import Preempted, StopRequests
from lockstep.errors import LockstepError, OutOfStep
from lockstep.record.display import Display
from lockstep.strategy import sharded

FSDP = "fsdp"
SETTINGS = {"checkpoint": {"async": False}, "log": {"every": "1000 steps"}, "watch": {"fingerprint_every": "5 steps"}}


SECONDS = 60.0  # for one program, on a busy machine


class Left(Exception):
    """The program was saved where it was asked to."""


class Loop:
    """A program as a loop over `run`."""

    def __init__(self, run: Run, program: Program, until: int | None, requests: StopRequests | None) -> None:
        """`requests` is how it is asked to leave; without, it saves by itself."""
        self._run, self._program, self._until, self._requests = run, program, until, requests
        self.modules, self._optimizers = build_models(program)
        self._models = []
        freeze(program, self.modules, 0)
        for number, (model, optimizer) in enumerate(zip(self.modules, self._optimizers, strict=True)):
            ema = {"decay": DECAY, "warmup": False} if program.ema else None
            own = [optimizer] if program.owned(number) else []
            run.setup(model, *own, name=f"model{number}", clip_norm=program.clip, ema=ema)
            self._models.append(run.models[f"model{number}"])
        self._data = [build_source(*each) for each in enumerate(program.sources)]
        self._counts: dict[str, int] = {}
        self._has_quit = self._saves = False
        self.seen: list[Any] = []
        self._loaders: dict[int, DataLoader[Any]] = {}
        run.register_state("loop", self)

    def state_dict(self) -> dict[str, Any]:
        return {"counts": dict(self._counts), "has_quit": self._has_quit}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._counts, self._has_quit = dict(state["counts"]), state["has_quit"]

    def train(self) -> None:
        self._run.restore()
        for epoch in self._run.epochs(self._program.epochs):
            freeze(self._program, self.modules, epoch)
            for number, walk in enumerate(self._program.walks):
                if is_walked(walk, epoch):
                    self._walk(number, walk)

    def _batches(self, number: int, accumulate: int) -> Iterator[Any]:
        run, source, data = self._run, self._program.sources[number], self._data[number]
        if source.loader:
            if number not in self._loaders:
                shuffle = source.shuffle and source.kind != "stream"
                self._loaders[number] = DataLoader(data, source.batch_size, shuffle=shuffle)
            return run.batches(self._loaders[number], accumulate=accumulate, name=f"mine {number}")
        how: dict[str, Any] = {"shuffle": source.shuffle, "accumulate": accumulate}
        if source.named:
            return run.batches(data, source.batch_size, name=f"mine {number}", **how)
        if number == 0:
            return run.batches(data, source.batch_size, **how)
        if number == 1:
            return run.batches(data, source.batch_size, **how)
        return run.batches(data, source.batch_size, **how)

    def _micro_batches(self, walk: Walk) -> Iterator[Any]:
        first, *rest = (partial(self._batches, each, walk.accumulate) for each in walk.sources)
        if not rest:
            return ((each,) for each in first())
        if walk.form == "nested":
            return self._nested(first, *rest)
        return zip(first(), _forever(*rest) if walk.form == "begins again" else rest[0](), strict=False)

    def _nested(self, outer: Callable[[], Iterator[Any]], inner: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        for first in outer():
            for second in inner():
                self._saves = False
                yield first, second
            if self._saves:
                self._save()

    def _save(self) -> None:
        self._run.checkpoint()
        raise Left

    def _walk(self, number: int, walk: Walk) -> None:
        run = self._run
        begins, seen = True, list[Any]()
        for micros in self._micro_batches(walk):
            batches = [batch for (batch,) in micros]
            assert run._engine.feed.step is not None
            micro = {cursor.name: micro for cursor, micro in run._engine.feed.step.micro_batches}
            for batch, each in zip(batches, micro.values(), strict=True):
                seen += [row[:2].int().tolist() for row in batch] if each.examples > 0 else []
            done = run.completes_batch
            stepped = self._train_on(number, walk, batches, begins, done)
            if stepped is None:
                break
            begins = done
            if done:
                self.seen.append([number, seen])
                seen = []
            if stepped and run.progress.step == self._until and self._requests is not None:
                self._requests.leave = "SIGTERM"
            if stepped and walk.leave and run.progress.step % walk.leave == 0:
                break
            if stepped and run.progress.step == self._until and self._requests is None:
                self._saves = True
                if walk.form != "nested":
                    self._save()
        if self._program.looks:
            self._measure()

    def _train_on(self, number: int, walk: Walk, batches: list[Any], begins: bool, done: bool) -> bool | None:
        stepped, late = False, dict[int, None]()
        for place, loss in enumerate(walk.losses):
            key = f"{number}.{place}"
            before = self._counts.get(key, 0)
            # With train.exact the loop also has parts of a batch, and knows nothing of them.
            clears = self._program.zero_grad and (begins or walk.accumulate == 1)
            if clears and before % loss.every == 0:
                for each in self._program.owners(loss.steps):
                    self._optimizers[each].zero_grad()
            total, count = computed(loss, self._models, batches, self._run.frozen)
            self._run.backward(total, count)
            if self._program.quit_at == self._run.progress.step and not stepped and not self._has_quit:
                self._has_quit = True
                return None
            if done:
                self._counts[key] = before + 1
            if (before + 1) % loss.every == 0:
                late |= dict.fromkeys(self._program.owners(loss.steps))
                if not walk.steps_last:
                    for each in self._program.owners(loss.steps):
                        stepped = self._step(each) or stepped
        if walk.steps_last:
            for each in late:
                stepped = self._step(each) or stepped
        return stepped

    def _step(self, number: int) -> bool:
        if self._program.looks:
            self._run.gradients(self._optimizers[number])
        return self._run.step(self._optimizers[number])

    def _measure(self) -> None:
        data = TensorDataset(torch.ones(3, FEATURES).double())
        for model in self._run.modules.values():
            self._run.evaluate(lambda batch, model=model: {"sum": model(batch[0]).sum(1)}, data, 2)


def _forever(batches: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    while True:
        yield from batches()


def _keep_meshes() -> None:
    """Groups of processes take time to make, and file descriptors."""
    made: dict[Any, Any] = {}
    make = sharded.make_mesh

    def kept(runtime: Any, group: Any, shape: Any, **more: Any) -> Any:
        key = (tuple(shape.items()), str(more))
        if key not in made:
            made[key] = make(runtime, group, shape, **more)
        return made[key]

    sharded.make_mesh = kept


def _whole(tensor: torch.Tensor) -> list[Any]:
    value = tensor.detach()
    found: list[Any] = getattr(value, "full_tensor", lambda: value)().tolist()
    return found


def _averages(entry: Any) -> list[Any] | None:
    """The averages of a model in the order of its parameters; where it has none, the weight was not trained yet."""
    if entry.average is None:
        return None
    averages = entry.average.weights
    return [_whole(averages.get(name, each)) for name, each in entry.module.named_parameters()]


def perform(ranks: Run, job: Mapping[str, Any]) -> dict[str, Any]:
    """Train a program on these ranks; what it came to, the same on all of them."""
    program, folder = Program.from_dict(job["program"]), Path(job["folder"])
    how = {"fsdp": {"strategy": FSDP}, "exact": {"train": {"exact": 2}}, "auto": {}}[job["strategy"]]
    settings = RunSettings.model_validate({**SETTINGS, **how})
    requests = StopRequests()
    known = ranks._engine
    run = Run(Engine(known.topology, known.runtime, known.group, settings, folder, Display(), requests))
    found: dict[str, Any] = {"left": False}
    try:
        loop = Loop(run, program, job["until"], requests if job["signal"] else None)
        try:
            loop.train()
            run._engine.finish()
        except Left:
            found["left"] = True
            run._engine.finish()
        except Preempted:
            found["left"] = True
    except LockstepError as error:
        _meet_again(ranks)
        return {"refused": f"{type(error).__name__}: {error}"}
    seen = ranks.gather(loop.seen, "what was seen")
    found |= {
        "step": run.progress.step,
        "seen": [[each[0][0], sorted((one for of_rank in each for one in of_rank[1]), key=lambda one: one[0])]
                 for each in zip(*seen, strict=True)],
        "weights": [[_whole(each) for each in module.parameters()] for module in loop.modules],
        "averages": [_averages(entry) for entry in run._engine.models.entries.values()],
    }  # fmt: skip
    return found


def _meet_again(run: Run) -> None:
    """Ranks that were refused at different places find out there."""
    for _ in range(3):
        with contextlib.suppress(OutOfStep):
            run.barrier("a refusal")
            return


def work(run: Run) -> None:
    _keep_meshes()
    with contextlib.ExitStack() as opened:
        folder = Path(os.environ["POOL"])
        jobs = opened.enter_context((folder / "jobs").open()) if run.is_main else None
        answers = opened.enter_context((folder / "answers").open("w")) if run.is_main else None
        while (job := run.agree(lambda: json.loads(jobs.readline() or "null") if jobs else None, "a job")) is not None:
            found = perform(run, job)
            if answers is not None:
                print(json.dumps(found), file=answers, flush=True)


class Pool:
    """A number of ranks, for whoever has programs to train."""

    def __init__(self, ranks: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        for name in ("jobs", "answers"):
            os.mkfifo(folder / name)
        environment = {**os.environ, "POOL": str(folder), "OMP_NUM_THREADS": "1"}
        with (folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(ranks), str(folder)], env=environment, stdout=log, stderr=log
            )
        self._files: list[Any] = []

    def train(self, job: Mapping[str, Any]) -> dict[str, Any]:
        if not self._files:
            self._files = [(Path(self._folder.name) / "jobs").open("w"), (Path(self._folder.name) / "answers").open()]
        jobs, answers = self._files
        print(json.dumps(job), file=jobs, flush=True)
        line = answers.readline() if select.select([answers], [], [], SECONDS)[0] else ""
        if not line:
            self.close()
            raise AssertionError(f"no answer:\n{(Path(self._folder.name) / 'log').read_text()[-3000:]}")
        found: dict[str, Any] = json.loads(line)
        return found

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        for each in self._files:
            each.close()
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


if __name__ == "__main__":
    patient = {"timeouts": {"collective": "60 s", "stall": "300 s"}}
    lockstep.launch(
        work, processes=int(sys.argv[1]), runtime="cpu", out=sys.argv[2], log={"every": "1000 steps"}, **patient
    )
