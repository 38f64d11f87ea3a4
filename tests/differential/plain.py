"""Runs a program in plain PyTorch, on one process: what Lockstep has to compute on any number of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from programs import Program, Source, Walk, build_models, build_source, computed, freeze, is_walked
from torch import Tensor, nn

from lockstep.data.order import Sequential, Shuffled

DECAY = 0.8


class PlainSource:
    """A position in a source: a loop that is left early continues there, and a batch counts when it was stepped on."""

    def __init__(self, number: int, source: Source) -> None:
        data: Any = build_source(number, source)
        self._rows = torch.stack([row for (row,) in list(data)])
        self._source = source
        shuffles = source.shuffle and source.kind != "stream"
        self._order = Shuffled(source.length, 0) if shuffles else Sequential(source.length)
        self.epoch, self.batch = 0, 0

    def batches(self) -> Iterator[tuple[int, Tensor]]:
        for number in range(self.batch, self._source.batches):
            size = self._source.batch_size
            places = np.arange(number * size, min((number + 1) * size, self._source.length))
            yield number, self._rows[torch.from_numpy(self._order.at(self.epoch, places))]

    @property
    def count(self) -> int:
        return self._source.batches

    def leave(self, finished: bool) -> None:
        if finished or self.batch == self._source.batches:
            self.epoch, self.batch = self.epoch + 1, 0


def _together(walk: Walk, sources: list[PlainSource]) -> Iterator[list[tuple[int, Tensor]]]:
    rest = sources[1:]
    passes = [each.batches() for each in sources]
    if walk.form == "nested":
        for one in passes[0]:
            for two in rest[0].batches():
                yield [one, two]
            rest[0].leave(True)
        return
    for one in passes[0]:
        found = [one]
        for two in passes[1:]:
            following = next(two, None)
            if following is None and walk.form == "begins again":
                rest[0].leave(True)
                passes[1] = rest[0].batches()
                following = next(passes[1])
            if following is None:
                return
            found.append(following)
        yield found


class Trainer:
    def __init__(self, program: Program) -> None:
        self._program = program
        self.models, self._optimizers = build_models(program)
        self._sources = [PlainSource(*each) for each in enumerate(program.sources)]
        self.averages: list[list[Tensor] | None] = [None for _ in self.models]
        self.step, self.seen = 0, list[Any]()
        self._counts: dict[tuple[int, int], int] = {}
        self._has_quit = False
        self._kept = self._gradients()  # as they were after the last step

    def train(self) -> None:
        for epoch in range(self._program.epochs):
            freeze(self._program, self.models, epoch)
            for number, walk in enumerate(self._program.walks):
                if is_walked(walk, epoch):
                    self._walk(number)

    def _walk(self, number: int) -> None:
        walk = self._program.walks[number]
        sources = [self._sources[each] for each in walk.sources]
        ended = True
        taken: list[tuple[int, Tensor]] = []
        for taken in _together(walk, sources):
            stepped = self._train_on(number, [batch for _, batch in taken])
            if stepped is None:
                ended = False
                break
            rows = torch.cat([batch for _, batch in taken])[:, :2].int().tolist()
            self.seen.append([number, sorted(rows, key=lambda row: row[0])])
            if stepped:
                self.step += 1
                self._kept = self._gradients()
                for source, (batch, _) in zip(sources, taken, strict=True):
                    source.batch = batch + 1
                if walk.leave and self.step % walk.leave == 0:
                    ended = False
                    break
        for place, (source, (batch, _)) in enumerate(zip(sources, taken, strict=True)):
            is_left = walk.form == "nested" and place == 1
            source.leave(ended and not is_left and batch == source.count - 1)
        if ended:
            self._kept = self._gradients()  # what waits at the end of a pass is carried over

    def _train_on(self, number: int, batches: list[Tensor]) -> bool | None:
        """Whether any optimizer stepped; None where the loop is left."""
        stepped, late = False, dict[int, None]()
        for place, loss in enumerate(self._program.walks[number].losses):
            before = self._counts.get((number, place), 0)
            if before % loss.every == 0:
                for optimizer in self._program.owners(loss.steps):
                    self._optimizers[optimizer].zero_grad()
                    for each in self._program.owned(optimizer):
                        self._kept[each] = [None for _ in self._kept[each]]
            total, count = computed(loss, self.models, batches, frozen)
            (total if count is None else total / count).backward()
            if self._program.quit_at == self.step and not stepped and not self._has_quit:
                self._has_quit = True
                self._restore_gradients()
                return None
            self._counts[number, place] = before + 1
            if (before + 1) % loss.every == 0:
                if self._program.walks[number].steps_last:
                    late |= dict.fromkeys(self._program.owners(loss.steps))
                    continue
                for each in self._program.owners(loss.steps):
                    self._step(each)
                stepped = True
        for each in late:
            self._step(each)
        return stepped or bool(late)

    def _step(self, number: int) -> None:
        models = self._program.owned(number)
        if self._program.clip is not None:
            nn.utils.clip_grad_norm_([p for each in models for p in self.models[each].parameters()], self._program.clip)
        for each in models:
            if self.averages[each] is None:
                self.averages[each] = [one.detach().clone() for one in self.models[each].parameters()]
        self._optimizers[number].step()
        self._optimizers[number].zero_grad()
        for each in models:
            averages = self.averages[each]
            assert averages is not None
            for average, parameter in zip(averages, self.models[each].parameters(), strict=True):
                average.lerp_(parameter.detach(), 1 - DECAY)

    def _gradients(self) -> list[list[Tensor | None]]:
        found = [[each.grad for each in model.parameters()] for model in self.models]
        return [[None if one is None else one.clone() for one in each] for each in found]

    def _restore_gradients(self) -> None:
        for model, gradients in zip(self.models, self._kept, strict=True):
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = None if gradient is None else gradient.clone()


@contextlib.contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    trained = [each for each in model.parameters() if each.requires_grad]
    for each in trained:
        each.requires_grad_(False)
    yield
    for each in trained:
        each.requires_grad_(True)


def result(program: Program) -> dict[str, Any]:
    trainer = Trainer(program)
    trainer.train()
    return {
        "step": trainer.step,
        "seen": trainer.seen,
        "weights": [[each.tolist() for each in model.parameters()] for model in trainer.models],
        "averages": [None if each is None else [one.tolist() for one in each] for each in trainer.averages],
    }
