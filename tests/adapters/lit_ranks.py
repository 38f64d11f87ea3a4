"""Resumes a run of every shape, and trains with fsdp, as a rank that torchrun has started."""

import json
import sys
from pathlib import Path

from lit_modules import SHAPES, Classifier, Digits

from lockstep.adapters.lightning import fit

if __name__ == "__main__":
    runs = {each.__name__: (each, options) for each, options in SHAPES.items()}
    runs["Sharded"] = Classifier, {"strategy": "fsdp"}
    for name, (shape, options) in runs.items():
        folder = Path(sys.argv[1]) / name
        outcome = fit(
            shape(), Digits(10), max_epochs=3, runtime="cpu", folder=folder, log={"every": "1 step"}, **options
        )
        folder.with_suffix(".json").write_text(json.dumps(outcome["metrics"]))
