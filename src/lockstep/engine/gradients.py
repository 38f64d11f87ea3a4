"""Tracks which optimizers received gradients from which backward pass: what to divide by, and what to drop.

Backward passes add up until an optimizer steps, as in plain PyTorch; `run.step(optimizer)` clears what it has used. Of
several optimizers, one may be left with gradients of a pass that another one stepped with: a generator's loss reaches
the discriminator, too.

- An optimizer that has stepped on this batch starts the next batch from zero, whatever reached it after its step, if
  the loop never calls its `zero_grad()`.
- Gradients of a pass that no optimizer has stepped with are kept: the loop accumulates over batches.
- In any other case plain PyTorch has a `zero_grad()`, and where that stands decides between adding and dropping. A loop
  that calls it after every step gets what plain PyTorch computes; others are refused, by the name of the model.

Until `run.step`, gradients may be those of a part of the batch, or not divided yet: what a loop does to them before, as
it did in plain PyTorch, is refused in the first steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lockstep.engine.step import Step
from lockstep.errors import ConfigError

Count = Tensor | float
Drop = Callable[[Optimizer, bool], None]

_LOOKED_AT = 3  # steps in which gradients are looked at between run.backward and run.step


@dataclass(eq=False)
class BackwardPass:
    step: Step
    batches: tuple[Any, ...]  # the global batches that it is of, where it has a count
    micro: int  # which micro-batch of the step
    number: int  # which pass over that micro-batch
    count: Count | None  # None where the loss was a mean
    reached: set[int]  # the optimizers whose parameters got gradients
    of_part: bool = False  # whether micro-batches of its batch were still to come
    settled: set[int] = field(default_factory=set)  # those that have stepped with them, or were cleared
    kept: set[int] = field(default_factory=set)  # those whose gradients are put aside, where zero_grad does not reach
    wanted: set[int] = field(default_factory=set)  # those that the loop wanted to step before the batch was complete
    used: bool = False  # whether any optimizer has stepped with it
    carried_over: bool = False  # whether the pass over the data ended before any did

    @property
    def of_done_batch(self) -> bool:
        """Whether its batch is not handed out again."""
        return self.step.counted or self.carried_over

    def waits_for(self, optimizer: int) -> bool:
        return optimizer in self.reached and optimizer not in self.settled

    def is_needed_by(self, optimizer: int) -> bool:
        """Returns whether the micro-batches to come add to its gradients."""
        is_done = self.micro < self.step.taken or optimizer in self.wanted
        return self.of_part and is_done and self.waits_for(optimizer) and optimizer not in self.kept


@dataclass(eq=False)
class Watched:
    """An optimizer that run.setup was given."""

    name: str
    optimizer: Optimizer
    clear: Callable[[], None]
    drop_unreduced: Drop
    stepped_in: Step | None = None
    cleared_by_loop: bool = False  # since its last step: from then on its gradients are what plain PyTorch has
    calls_zero_grad: bool = False  # whether the loop has ever cleared it

    def cleared(self) -> None:
        self.cleared_by_loop = self.calls_zero_grad = True

    @property
    def gradients(self) -> list[Tensor | None]:
        return [each.grad for group in self.optimizer.param_groups for each in group["params"]]

    def is_left_over(self, waiting: Sequence[BackwardPass]) -> bool:
        """Returns whether these passes came after its step and others used them: the next batch drops them."""
        return all(each.used and each.step is self.stepped_in for each in waiting)


class GradientTracker:
    def __init__(self, by_leaf: bool = False) -> None:
        """With train.exact, `by_leaf`, gradients are put aside leaf by leaf: a loop may clear them after each."""
        self._by_leaf = by_leaf
        self._watched: dict[int, Watched] = {}
        self._passes: list[BackwardPass] = []
        self._before: dict[int, Versions] = {}
        self.step: Step | None = None  # the current one, of a loop over batches
        self._left: dict[int, Versions] = {}  # gradients as a backward pass left them, where they are not finished
        self._looks = _LOOKED_AT

    def watch(self, name: str, optimizer: Optimizer, drop_unreduced: Drop) -> None:
        """Follows an optimizer; `drop_unreduced` drops those of its gradients that its zero_grad does not reach."""
        plain = optimizer.zero_grad
        is_torchs = getattr(plain, "__func__", None) is Optimizer.zero_grad

        def clear(set_to_none: bool = True) -> None:
            if is_torchs and set_to_none:  # what it does, without the region of a profile that it opens: 30 µs
                for group in optimizer.param_groups:
                    for each in group["params"]:
                        each.grad = None
            else:
                plain(set_to_none)
            drop_unreduced(optimizer, False)

        watched = Watched(name, optimizer, clear, drop_unreduced)

        @functools.wraps(plain)
        def zero_grad(set_to_none: bool = True) -> None:
            if any(each.step is self.step and each.is_needed_by(id(optimizer)) for each in self._passes):
                raise ConfigError(
                    f"zero_grad() of the optimizer of {name!r} was called between the micro-batches of one batch, "
                    "whose gradients add up: it would be trained on the last of them alone. Leave it out (run.step "
                    "clears gradients), or call it after run.step has returned True"
                )
            clear(set_to_none)
            watched.cleared()
            self._settle(watched, with_kept=False)

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        self._watched[id(optimizer)] = watched

    def begin(self, step: Step) -> None:
        """Drops what is left of the batch before, when a backward pass begins."""
        self.require_unchanged()
        if len(self._watched) == 1:
            return
        self._passes = [each for each in self._passes if each.step is step or not each.reached <= each.settled]
        for watched in self._watched.values():
            waiting = self._waiting(watched)
            if not waiting or watched.cleared_by_loop:
                continue
            if not self._by_leaf and all(each is None for each in watched.gradients):  # by model.zero_grad()
                watched.cleared()
                self._settle(watched)
            elif any(each.used for each in waiting):
                self._drop(watched, waiting, step)
        self._before = {key: _versions(each.gradients) for key, each in self._watched.items()}

    def add(self, step: Step, count: Count | None, scaled: bool = False) -> None:
        """Notes a backward pass, of a loss that was `scaled` for float16 or not."""
        known = [each for each in self._passes if each.step is step and each.micro == step.taken]
        reached = {key for key, each in self._watched.items() if self._is_reached(key, each)}
        batches = () if count is None else step.batches
        of_part = not step.completes_batch
        self._passes.append(BackwardPass(step, batches, step.taken, len(known), count, reached, of_part))
        self._before = {}
        if self._looks and not self._by_leaf and (scaled or of_part or count is not None):
            self._left = {key: _versions(each.gradients) for key, each in self._watched.items()}

    def require_unchanged(self) -> None:
        """Refuses gradients that the loop has written to since a backward pass that did not finish them."""
        left, self._left = self._left, {}
        for key, before in left.items():
            now = self._watched[key].gradients
            if any(_is_written(each, *was) for each, was in zip(now, before, strict=False)):
                raise ConfigError(
                    f"the gradients of {self._watched[key].name!r} were changed between run.backward and run.step, "
                    "where they are those of a part of the batch, or not divided or unscaled yet. To clip them, set "
                    "clip_norm in run.setup or train.clip_norm; for other changes use what run.gradients() returns"
                )

    def want(self, optimizer: Optimizer) -> None:
        """Notes that the loop wanted to step an optimizer before the batch was complete."""
        for each in self._passes:
            each.wanted.add(id(optimizer))

    def keep(self, optimizer: Optimizer | None = None) -> None:
        """The gradients of an optimizer, or of all, are put aside: they wait for its step whatever the loop clears."""
        for each in self._passes:
            each.kept |= self._watched.keys() if optimizer is None else {id(optimizer)}

    def require_known(self, parameters: Sequence[Tensor]) -> None:
        """Refuses a step with gradients of which no backward pass is known."""
        if not self._passes and any(each.grad is not None for each in parameters):
            raise ConfigError(
                "run.step: the parameters have gradients that run.backward has not computed: they are not weighed, "
                "and not averaged over ranks. Replace loss.backward() by run.backward(loss). Gradients that the loop "
                "makes by itself: call run.backward, then change what run.gradients(optimizer) returns"
            )

    def counts_for(self, optimizer: Optimizer) -> list[Count]:
        """Returns what to divide the gradients of an optimizer by; nothing where they are those of means."""
        if all(each.count is None for each in self._passes):
            return []
        key = id(optimizer)
        # A pass over a micro-batch whose gradients are not exchanged yet may not show whom it reached: it reaches whom
        # the same pass over the last micro-batch reaches.
        numbers = {each.number for each in self._passes if each.waits_for(key)}
        passes = [each for each in self._passes if each.number in numbers and key not in each.settled]
        counts = [each.count for each in passes if each.count is not None]
        if not counts:
            return []
        if len(counts) < len(passes) or len({each.micro for each in passes}) < len(passes):
            raise ConfigError(
                f"run.step: {len(passes)} backward passes came before it, and {len(counts)} of them gave a sum and a "
                "count: their gradients can no longer be separated. Add the losses up before run.backward, or step "
                "each optimizer right after its own loss"
            )
        if len({each.batches for each in passes}) > 1:
            raise ConfigError(
                "run.step: the losses of several batches were given as a sum and a count, without a step between them. "
                "Let run.batches(..., accumulate=N) make one batch of them, or give their means"
            )
        return counts

    def stepped(self, optimizer: Optimizer, step: Step) -> None:
        """Clears the gradients that an optimizer has used."""
        watched = self._watched[id(optimizer)]
        self._looks = max(self._looks - 1, 0)
        if len(self._watched) == 1:
            self._passes.clear()
        for each in self._passes:
            each.used = each.used or each.waits_for(id(optimizer))
        watched.clear()
        watched.stepped_in, watched.cleared_by_loop = step, False
        self._settle(watched)

    def carry_over(self, step: Step) -> None:
        """Keeps the gradients of a step at whose end the data has ended: the next batches add to them."""
        for each in self._passes:
            each.carried_over = each.carried_over or each.step is step

    def abandon(self, step: Step) -> None:
        """Drops the gradients of a step that the loop has left half way: its batch comes again, whole."""
        for watched in self._watched.values():
            watched.drop_unreduced(watched.optimizer, True)
            waiting = self._waiting(watched)
            if any(each.step is step for each in waiting):
                if any(each.step is not step for each in waiting):
                    raise ConfigError(
                        f"run.batches: the loop was left between two steps of {watched.name!r}, whose gradients are "
                        "added up over several batches: those of the batch that was left, which comes again, cannot be "
                        "taken out. Leave the loop after a step of every optimizer"
                    )
                watched.clear()
                self._settle(watched)
        self._passes = [each for each in self._passes if each.step is not step]

    def to_save(self) -> dict[str, dict[str, Any]]:
        """Returns, by model, whether its gradients wait for a step ("used": of which passes), and whether the loop
        clears them."""
        found = {}
        for watched in self._watched.values():
            waiting = self._waiting(watched)
            done = [each for each in waiting if each.of_done_batch]
            left_over = not watched.cleared_by_loop and watched.is_left_over(done)
            if (not done and len(self._watched) == 1) or (left_over and not watched.calls_zero_grad):
                continue  # nothing, or what the next batch drops
            if not left_over and done and (len(done) < len(waiting) or any(each.count is not None for each in done)):
                raise ConfigError(
                    f"run.checkpoint: the gradients of {watched.name!r} are added up over several batches, and one of "
                    "them is not done or was given as a sum and a count: a resumed run could not continue with them. "
                    "Save after a step of every optimizer"
                )
            found[watched.name] = {
                "used": sorted({each.used for each in done}),
                "by_loop": watched.cleared_by_loop,
                "calls_zero_grad": watched.calls_zero_grad,
            }
        return found

    def restore(self, name: str, saved: Mapping[str, Any]) -> None:
        """Restores which gradients of a model wait for a step."""
        watched = next(each for each in self._watched.values() if each.name == name)
        watched.cleared_by_loop, watched.calls_zero_grad = saved["by_loop"], saved["calls_zero_grad"]
        before = Step()
        before.counted = True
        for used in saved["used"]:
            self._passes.append(BackwardPass(before, (), 0, 0, None, {id(watched.optimizer)}, used=used))

    def _waiting(self, watched: Watched) -> list[BackwardPass]:
        return [each for each in self._passes if each.waits_for(id(watched.optimizer))]

    def _drop(self, watched: Watched, waiting: Sequence[BackwardPass], step: Step) -> None:
        stepped_with = {
            other.name
            for each in waiting
            for key, other in self._watched.items()
            if key in each.settled and other.stepped_in is each.step
        }
        if watched.calls_zero_grad or not watched.is_left_over(waiting) or waiting[0].step is step:
            raise ConfigError(
                f"run.backward: the parameters of {watched.name!r} still hold gradients of a backward pass that the "
                f"optimizer of {' and '.join(sorted(stepped_with)) or 'another model'} has stepped with. Call "
                "zero_grad() of its optimizer where plain PyTorch does: before this backward pass to drop them, at the "
                "start of the step to add to them"
            )
        watched.clear()
        self._settle(watched)

    def _settle(self, watched: Watched, with_kept: bool = True) -> None:
        for each in self._passes:
            if with_kept or id(watched.optimizer) not in each.kept:
                each.settled.add(id(watched.optimizer))

    def _is_reached(self, key: int, watched: Watched) -> bool:
        if len(self._watched) == 1:
            return True
        return any(
            now is not None and (now is not before or _version(now) != version)
            for now, (before, version) in zip(watched.gradients, self._before[key], strict=True)
        )


Versions = list[tuple[Tensor | None, int]]


def _versions(gradients: list[Tensor | None]) -> Versions:
    return [(each, 0 if each is None else _version(each)) for each in gradients]


def _is_written(now: Tensor | None, before: Tensor | None, version: int) -> bool:
    return now is not None and before is not None and (now is not before or _version(now) != version)


def _version(gradient: Tensor) -> int:
    """Changes with every write to a gradient, also to this rank's part of one."""
    part: Tensor = getattr(gradient, "_local_tensor", gradient)
    return part._version
