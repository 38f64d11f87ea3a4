"""What the reference run's checkpoints tell about the task: whether its loss can depend on the number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def draws_random_numbers(run: Path) -> bool:
    """Whether any generator moved between the run's checkpoints: dropout, or another draw of the training step.

    Every rank draws numbers of its own, so that the losses of such a task differ with the number of ranks by design.
    What a dataset draws is the same on any number of ranks, and moves none of these generators.
    """
    states = [_generators(folder) for folder in sorted((run / "checkpoints").glob("step-*"))]
    return any(state != states[0] for state in states)


def batch_statistics(run: Path) -> list[str]:
    """The layers that normalise by statistics of a rank's share of the batch."""
    newest = max((run / "checkpoints").glob("step-*"), default=None)
    if newest is None:
        return []
    return [name.removesuffix(".running_mean") for name in _tensors(newest) if name.endswith(".running_mean")]


def _generators(checkpoint: Path) -> Any:
    from lockstep.checkpoint.manifest import TREE_FILE

    return json.loads((checkpoint / TREE_FILE).read_text(encoding="utf-8"))["state"]["generators"]


def _tensors(checkpoint: Path) -> list[str]:
    from lockstep.checkpoint import manifest, merge

    return [each.name for each in merge.weights(checkpoint, manifest.read(checkpoint))[0]]
