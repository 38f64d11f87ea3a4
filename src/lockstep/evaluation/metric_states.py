"""The states of torchmetrics objects: gathered from every rank, combined as each metric says, and computed once.

torchmetrics would use its own collectives, without our names and timeouts, and count the examples that a batch was
filled up with. A Metric says by its `dist_reduce_fx` how states of several ranks become one:
a function of the stacked tensors, or of the list of all that was in lists; without one, tensors are stacked and lists
put together, and what `compute` makes of that is its own affair.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.data.permutation import Indices
from lockstep.errors import ConfigError

# With so many examples each of two parts has some to compare: a correlation of one with itself is none.
_FEWEST = 6
# One rank's states: those of a metric and, by their place in it, of those inside of it (wrappers).
States = list[dict[str, Any]]


def require_metrics(given: Any, task: str) -> dict[str, Any]:
    """Returns what `Task.torchmetrics` returned as metrics by name, with their own exchange switched off."""
    if not given:
        return {}
    from torchmetrics import Metric, MetricCollection

    if isinstance(given, MetricCollection):
        given = dict(given.items())
    if not isinstance(given, Mapping):
        raise ConfigError(f"task: {task}.torchmetrics() must return a mapping by name, got a {type(given).__name__}")
    for name, each in given.items():
        if not isinstance(each, Metric):
            hint = ": return the collection by itself" if isinstance(each, MetricCollection) else ""
            raise ConfigError(
                f"task: {task}.torchmetrics()[{name!r}] is a {type(each).__name__}, not a torchmetrics.Metric{hint}"
            )
        for part in _parts(each):
            part.sync_on_compute = part._to_sync = False
            part.distributed_available_fn = lambda: False
    return dict(given)


def states_of(metric: Any) -> States:
    """Returns the states of a metric; an empty list where it was given no example."""
    if not any(part._update_count for part in _parts(metric)):
        return []
    return [{name: getattr(part, name) for name in part._defaults} for part in _parts(metric)]


def computed(metric: Any, found: Sequence[States]) -> Any:
    """Computes the value over the examples of all ranks; the metric keeps the combined states."""
    given = [each for each in found if each]  # a rank without an example has nothing to add, not even a zero
    for place, part in enumerate(_parts(metric)):
        for name, reduce in part._reductions.items():
            setattr(part, name, _on(part.device, _combined([each[place][name] for each in given], reduce)))
        part._computed, part._update_count = None, max(part._update_count, 1)
    return metric.compute()


def require_reducible(
    metrics: Mapping[str, Any], update: Callable[[Mapping[str, Any], Indices], None], rows: int
) -> None:
    """Refuses a metric whose value depends on how examples are spread over ranks, tried on a few of them.

    `update(metrics, rows)` updates all of them with some rows. A metric that has no value for so few is not judged.
    """
    taken = np.resize(np.arange(rows), max(rows, _FEWEST))  # again from the first, where there are fewer
    parts = np.split(taken, [len(taken) // 3])
    whole, *pieces, together = [copy.deepcopy(dict(metrics)) for _ in range(4)]
    for piece, part in zip(pieces, parts, strict=True):
        update(whole, part)
        update(piece, part)
    for name in metrics:
        try:
            expected = plain(whole[name].compute(), name)
        except Exception:
            continue
        try:
            found = plain(computed(together[name], [states_of(piece[name]) for piece in pieces]), name)
        except Exception as error:
            found = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else error!r}"
        if not _alike(expected, found):
            states = [each for part in _parts(metrics[name]) for each, how in part._reductions.items() if how is None]
            unreduced = f"dist_reduce_fx is None for its {', '.join(states)}. " if states else ""
            raise ConfigError(
                f"task: torchmetrics()[{name!r}]: a {type(metrics[name]).__name__} cannot be combined over ranks: a "
                f"few examples give {_brief(expected)} at once, and {_brief(found)} in two parts. "
                f'{unreduced}Give its states a dist_reduce_fx that adds up ("sum", "cat", "min", '
                '"max"), or compute it in epoch_metrics(outputs), which is given all examples at once'
            )


def plain(value: Any, name: str) -> Any:
    """Returns a result as it is logged: a number, nested lists, or a mapping of these by name."""
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        value = value.detach().cpu().double().numpy() if isinstance(value, Tensor) else np.asarray(value)
        if value.dtype.kind not in "biuf":
            raise ConfigError(f"metric {name!r} is an array of {value.dtype}: only numbers can be logged")
        return float(value.reshape(())) if value.size == 1 else value.astype(float).tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(each, f"{name}/{key}") for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each, name) for each in value]
    if isinstance(value, (bool, int, float)):
        return float(value)
    raise ConfigError(f"metric {name!r} is a {type(value).__name__}: return a number, a tensor or an array of numbers")


def _parts(metric: nn.Module) -> Iterator[Any]:
    from torchmetrics import Metric

    return (each for each in metric.modules() if isinstance(each, Metric))


def _combined(values: list[Any], reduce: Callable[[Any], Any] | None) -> Any:
    from torchmetrics.utilities import dim_zero_cat

    if len(values) == 1:
        return values[0]
    if isinstance(values[0], list):  # stays one: `compute` then finds what it finds on one process
        together = [each for value in values for each in value]
        return together if reduce in (None, dim_zero_cat) else reduce(together)
    if reduce is dim_zero_cat:
        return torch.cat([each.reshape(1) if each.dim() == 0 else each for each in values])
    stacked = torch.stack(values)
    return stacked if reduce is None else reduce(stacked)


def _on(device: torch.device, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return [_on(device, each) for each in value] if isinstance(value, list) else value


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    numbers = isinstance(one, float) and isinstance(other, float)
    return numbers and bool(np.isclose(one, other, rtol=1e-3, atol=1e-5, equal_nan=True))


def _brief(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) < 100 else text[:97] + "..."
