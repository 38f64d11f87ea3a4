"""How many examples a task's data has, kept in every checkpoint, so that a resume with more or fewer is noticed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from lockstep.errors import ConfigError

logger = logging.getLogger(__name__)


class Lengths:
    """Attached to the run before it is restored. What training walks, its cursors look after; this is for the rest."""

    def __init__(self, split: int | None, own: Mapping[str, int]) -> None:
        """`split` has the examples that the config splits at random; `own` those of the task's other datasets."""
        self._split, self._own = split, dict(own)

    def state_dict(self) -> dict[str, Any]:
        return {"split": self._split, "own": self._own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        before = state["split"]
        if None not in (before, self._split) and before != self._split:
            raise ConfigError(
                f"train_data() has {self._split} examples, and had {before} when the checkpoint was made: data.split "
                "would draw other examples for training and for validation, so that some that were trained on would be "
                f"validated on. Give it the {before} examples back, or start a new run"
            )
        for name, count in self._own.items():
            if state["own"].get(name, count) != count:
                logger.warning(
                    "%s has %d examples, and had %d when the checkpoint was made: its metrics before and after are not "
                    "of the same data", _method(name), count, state["own"][name],
                )  # fmt: skip


def _method(name: str) -> str:
    """`val_data()`; of several datasets `val_data()['NAME']`."""
    kind, _, one = name.partition("/")
    return f"{kind}_data()[{one!r}]" if one else f"{kind}_data()"
