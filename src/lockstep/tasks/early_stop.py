"""When to stop early: a pure policy over metrics, decided on rank 0 and told to all."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

from lockstep.config.schema import Criterion, EarlyStop
from lockstep.errors import ConfigError


def metric_value(metrics: Mapping[str, float], name: str, path: str) -> float:
    """A metric by name; without validation data, `val/x` means the training metric `train/epoch_x`."""
    found = known_as(name, metrics)
    if found is None:
        raise ConfigError(unknown_metric(path, name, metrics))
    if isinstance(metrics[found], list):
        raise ConfigError(f"{path}: {found!r} is no single number, to be compared with others: name one that is")
    return metrics[found]


def known_as(name: str, metrics: Iterable[str]) -> str | None:
    """The name that a metric really has among others, where it is there."""
    there = set(metrics)
    kind, _, rest = name.partition("/")
    if name not in there and any(each.startswith(f"{kind}/") and each.endswith(f"/{rest}") for each in there):
        return None  # of several validation sets each has its own: that of the training is none of them
    trained = epoch_name(f"train/{name.removeprefix('val/')}")
    return next((each for each in (name, trained) if each in there), None)


def epoch_name(name: str) -> str:
    """Returns what a training value is called as its mean since the last validation: `train/epoch_loss`.

    `train/loss` is the mean since the last row (`log.every`): the two must not share a name.
    """
    kind, slash, last = name.rpartition("/")
    return f"{kind}{slash}epoch_{last}"


def unknown_metric(path: str, name: str, metrics: Iterable[str]) -> str:
    there = sorted(metrics)
    near = difflib.get_close_matches(name, there, 1)
    hint = f": did you mean {near[0]}?" if near else "."
    return f"{path}: there is no metric {name!r}{hint} This run has {', '.join(there) or 'none'}"


class EarlyStopping:
    """Counts, for each criterion, the validations since it last improved."""

    def __init__(self, settings: EarlyStop) -> None:
        self._settings = settings
        self._seen = 0
        self._best: list[float | None] = [None] * len(settings.criteria)
        self._stale = [0] * len(settings.criteria)

    def update(self, metrics: Mapping[str, float]) -> str | None:
        """Take in one validation; the reason to stop, if there is one now."""
        self._seen += 1
        for index, criterion in enumerate(self._settings.criteria):
            value = metric_value(metrics, criterion.metric, f"early_stop.criteria[{index}].metric")
            if _improves(value, self._best[index], criterion):
                self._best[index], self._stale[index] = value, 0
            elif self._seen > criterion.grace:
                self._stale[index] += 1
        exhausted = [stale >= self._settings.patience for stale in self._stale]
        stop = any(exhausted) if self._settings.combine == "any" else all(exhausted)
        return self._reason(exhausted) if stop else None

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self._seen, "best": self._best, "stale": self._stale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seen, self._best, self._stale = state["seen"], list(state["best"]), list(state["stale"])

    def _reason(self, exhausted: list[bool]) -> str:
        stale = [
            f"{criterion.metric} (best {best:.6g})"
            for criterion, best, done in zip(self._settings.criteria, self._best, exhausted, strict=True)
            if done and best is not None
        ]
        return f"no improvement of {', '.join(stale) or 'any metric'} in {self._settings.patience} validations"


def _improves(value: float, best: float | None, criterion: Criterion) -> bool:
    if not math.isfinite(value):
        return False
    if best is None:
        return True
    return value < best - criterion.delta if criterion.mode == "min" else value > best + criterion.delta
