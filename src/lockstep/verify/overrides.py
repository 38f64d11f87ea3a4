"""What is changed in a config to compare by it: few steps, each with its loss, and one save half-way."""

from __future__ import annotations

# Before the user's own: what makes a comparison sharp and quick, and may be set back.
USUAL = (
    "train.precision=float32",
    "train.compile=false",
    "data.workers=0",
    "data.prefetch=null",
)


def halfway(steps: int) -> int:
    """The step after which every run is saved: late enough that the next multiple is the end."""
    return (steps + 1) // 2


def needed(steps: int) -> tuple[str, ...]:
    """After the user's own: what the comparison itself rests on."""
    return (
        "train.epochs=null",
        f"train.steps={steps}",
        "early_stop=null",
        "log={every: 1 step, jsonl: true}",  # and no loggers: these runs are nobody's to look at
        f"checkpoint.every={halfway(steps)} steps",
        "checkpoint.keep.last=2",
        "checkpoint.keep.best=0",
        "launch.max_restarts=0",
        "launch.port=null",
        "launch.grace=10 s",
    )
