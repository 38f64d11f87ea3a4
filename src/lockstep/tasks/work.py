"""What a run is for: to train, or to do something with a model that was trained."""

from __future__ import annotations

from typing import Any

from lockstep.config.schema import RunConfig
from lockstep.engine.run import Run
from lockstep.tasks import evaluate, predict
from lockstep.tasks.trainer import fit


def carry_out(run: Run, config: RunConfig) -> dict[str, Any]:
    """Do what the config asks for; what it came to: `status`, `metrics` and the rest."""
    if config.after is None:
        return fit(run, config)
    return {"evaluate": evaluate.evaluate, "predict": predict.predict}[config.after.do](run, config, config.after)
