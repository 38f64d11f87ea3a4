"""What differs between the config a run was started with and the one it is to be resumed with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.errors import ConfigError

# What a checkpoint was made under. Changing one of these would restore state into a different computation, or be
# silently overruled by the restored state, so a resume refuses it. Everything else may change.
FIXED = {
    "task": "the saved weights belong to this task",
    "seed": "the order of examples is a function of it",
    "train.batch_size": "the position in the data is counted in batches of this size",
    "data.split": "examples would move between training and validation",
    "data.shuffle": "the order of examples is a function of it",
    "data.drop_last": "the number of batches in an epoch depends on it",
    "optimizer": "its settings are restored from the checkpoint",
    "scheduler": "its state is restored from the checkpoint",
    "early_stop.criteria": "the best values so far were measured by these criteria",
}


@dataclass(frozen=True)
class Change:
    path: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.path}: {self.before!r} -> {self.after!r}"


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Every path whose value differs, in the order of the config."""
    old, new = dict(_leaves(before)), dict(_leaves(after))
    return [
        Change(path, old.get(path), new.get(path))
        for path in dict.fromkeys([*old, *new])
        if old.get(path) != new.get(path)
    ]


def refuse_wrong_changes(found: list[Change]) -> None:
    """Raise for those changes under which going on from the checkpoint would be wrong."""
    wrong = [
        f"  {change} ({reason})" for change in found for fixed, reason in FIXED.items() if _concerns(change, fixed)
    ]
    if wrong:
        raise ConfigError(
            "this run cannot be resumed with a config that changed in\n"
            + "\n".join(wrong)
            + "\nTake the change back, or start a new run with `lockstep train`"
        )


def _concerns(change: Change, fixed: str) -> bool:
    if fixed == "early_stop.criteria" and (change.before is None or change.after is None):
        return False  # early stopping may be taken up or given up at any time; only its yardstick may not change
    return change.path == fixed or change.path.startswith((fixed + ".", fixed + "["))


def _leaves(node: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{at}.{key}" if at else str(key))
    elif isinstance(node, list) and node:
        for index, value in enumerate(node):
            yield from _leaves(value, f"{at}[{index}]")
    else:
        yield at, node
