"""Trains every shape as a rank that torchrun has started: resumed where one process ended it, or under a strategy."""

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

from lit_modules import SHAPES, Digits

from lockstep.adapters.lightning import fit


def train(folder: Path, module: Any, **options: Any) -> None:
    outcome = fit(module, Digits(10), max_epochs=3, runtime="cpu", folder=folder, log={"every": "1 step"}, **options)
    folder.with_suffix(".json").write_text(json.dumps(outcome["metrics"]))


if __name__ == "__main__":
    folder, strategy = Path(sys.argv[1]), sys.argv[2]
    for shape, options in SHAPES.items():
        if strategy == "fsdp" and not shape().automatic_optimization:
            continue
        module = shape()
        train(folder / shape.__name__, module, strategy=strategy, **options)
        (folder / f"{shape.__name__}-{os.environ['RANK']}.pickle").write_bytes(pickle.dumps(module))
