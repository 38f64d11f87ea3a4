"""The order of a task's training data: by the config, with what the task knows of its examples."""

from __future__ import annotations

import logging
from typing import Any

from torch.utils.data import Dataset

from lockstep.config.data import Ordering
from lockstep.config.schema import RunConfig
from lockstep.data.choosing import make_order
from lockstep.data.orders import Order
from lockstep.data.sources import is_stream
from lockstep.errors import ConfigError
from lockstep.train.task import Task

logger = logging.getLogger(__name__)


def order_of(task: Task, config: RunConfig, dataset: Dataset[Any]) -> Order | None:
    """The config's order; where it names none, the task's own, if it has one, else shuffled. None for a stream."""
    asked = config.data.order
    if is_stream(dataset):
        if asked is not None:
            raise ConfigError(
                f"data.order: {asked.type}: train_data() is a stream ({type(dataset).__name__}), which comes in the "
                "order that it has: take it away (data.shuffle and data.shuffle_buffer are for streams)"
            )
        return None
    if asked is None:
        own = _defines(task, "order")
        if _defines(task, "weights"):
            logger.warning(
                "task: %s defines weights, but examples are not drawn by them: set data.order to weighted",
                type(task).__name__,
            )
        asked = Ordering(type="sequential" if not config.data.shuffle else "own" if own else "shuffled")
    needs = {"weighted": "weights", "buckets": "lengths"}.get(asked.type)
    values = {needs: _value(task, needs)} if needs and _defines(task, needs) else {}
    if asked.type == "own" and _defines(task, "order"):
        values = {"order": task.order, "repeats": getattr(task, "order_repeats", False)}
    said_by = f"task: {type(task).__name__}.order"
    return make_order(asked, dataset, config.train.batch_size, config.seed, values, said_by)


def _defines(task: Task, name: str) -> bool:
    return name in vars(task) or getattr(type(task), name) is not getattr(Task, name)


def _value(task: Task, name: str) -> Any:
    found = getattr(task, name)
    return found() if callable(found) else found
