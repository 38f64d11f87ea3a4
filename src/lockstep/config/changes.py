"""Compares the config of a run with the one it is resumed with, and refuses changes that would be wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.config.plain import leaves
from lockstep.errors import ConfigError

# What a checkpoint was made under. Changing one of these would restore state into a different computation, or be
# silently overruled by the restored state, so a resume refuses it. Everything else may change: of the optimizer's
# settings, those that lockstep.tasks.changes can bring the restored state to.
FIXED = {
    "task": "the saved weights belong to this task",
    "seed": "the order of examples is a function of it",
    "train.batch_size": "the position in the data is counted in batches of this size",
    "train.batch_ramp": "the position in the data is counted in batches of these sizes",
    "train.sequence_ramp": "the tokens so far were counted at these lengths",
    "train.limit": "the position in the data is a place among these examples",
    "train.overfit": "the position in the data is a place among these examples",
    "data.split": "examples would move between training and validation",
    "data.shuffle": "the order of examples is a function of it",
    "data.order": "the position in the data is a place in this order",
    "data.drop_last": "the number of batches in an epoch depends on it",
    "optimizer.type": "the saved state belongs to this optimizer",
    "train.freeze": "the optimizer's state belongs to the parameters that are trained",
    "scheduler": "its state is restored from the checkpoint",
    "checkpoint.save": "the checkpoints hold these weights and no others",
    "early_stop.criteria": "the best values so far were measured by these criteria",
}


# Settings of an optimizer that count only while it is new, and schedules that do not start from its rate.
_COUNT_AT_FIRST = ("initial_accumulator_value",)
_RATES_OF_THEIR_OWN = ("OneCycleLR", "CyclicLR")


@dataclass(frozen=True)
class Change:
    path: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.path}: {self.before!r} -> {self.after!r}"


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Returns every path whose value differs, in the order of the config."""
    old, new = (dict(leaves(config, into_lists=True)) for config in (before, after))
    return [
        Change(path, old.get(path), new.get(path))
        for path in dict.fromkeys([*old, *new])
        if old.get(path) != new.get(path)
    ]


def refuse_wrong_changes(found: list[Change], after: Mapping[str, Any]) -> None:
    """Raises ConfigError for changes that a checkpoint does not allow."""
    # Early stopping may be taken up or given up at any time; only its criteria may not change.
    switched = any(each.path == "early_stop.criteria[0].metric" and None in (each.before, each.after) for each in found)
    judged = [each for each in found if not (switched and each.path.startswith("early_stop."))]
    wrong = [f"  {change} ({reason})" for change in judged if (reason := _reason_against(change, after))]
    if wrong:
        raise ConfigError(
            "this run cannot be resumed with a config that changed in\n"
            + "\n".join(wrong)
            + "\nTake the change back, or start a new run with `lockstep train`"
        )


def described(change: Change) -> str:
    """Describes an allowed change and its effect."""
    if not _is_of_optimizer(change):
        return str(change)
    effect = "from the first step on that is trained now"
    if _name(change) == "lr":
        effect += "; a schedule goes on as if it had started from the new rate"
    return f"{change} ({effect})"


def _reason_against(change: Change, after: Mapping[str, Any]) -> str | None:
    """Of the settings of an optimizer, numbers may change; those that decide what state it keeps may not."""
    for fixed, reason in FIXED.items():
        if change.path == fixed or change.path.startswith((fixed + ".", fixed + "[")):
            return reason
    if not _is_of_optimizer(change):
        return None
    if change.path.startswith(("optimizer.groups", "optimizer.others")) and (
        change.path.count(".") < 2 or _name(change) in ("match", "type")
    ):
        return "the saved state belongs to these groups of parameters"
    name, numbers = _name(change), [each for each in (change.before, change.after) if each is not None]
    if any(isinstance(each, bool) or not isinstance(each, (int, float)) for each in numbers):
        return "it decides what the optimizer's state is, which is restored from the checkpoint"
    if name == "momentum" and bool(change.before) != bool(change.after):
        return "whether there is any decides what the optimizer's state is, which is restored from the checkpoint"
    if name in _COUNT_AT_FIRST:
        return "it counts only for an optimizer that is new"
    schedule = str((after.get("scheduler") or {}).get("type", "")).replace(":", ".").rpartition(".")[2]
    if name == "lr" and schedule in _RATES_OF_THEIR_OWN:
        return f"{schedule} has rates of its own, whatever the optimizer's is"
    return None


def _is_of_optimizer(change: Change) -> bool:
    return change.path.startswith("optimizer.") and change.path != "optimizer.type"


def _name(change: Change) -> str:
    inner = change.path.startswith(("optimizer.groups[", "optimizer.others."))
    return change.path.split(".")[2 if inner else 1].split("[")[0]
