"""Resumes a run of every shape as a rank that torchrun has started."""

import json
import sys
from pathlib import Path

from lit_modules import SHAPES, Digits

from lockstep.adapters.lightning import fit

if __name__ == "__main__":
    for shape, options in SHAPES.items():
        folder = Path(sys.argv[1]) / shape.__name__
        outcome = fit(
            shape(), Digits(10), max_epochs=3, runtime="cpu", folder=folder, log={"every": "1 step"}, **options
        )
        folder.with_suffix(".json").write_text(json.dumps(outcome["metrics"]))
