"""`python -m lockstep.planner.child CONFIG WORLD_SIZE OUT [KEY=VALUE ...]`: one step of a run, traced into a file.

A process of its own: what it makes torch do on fake tensors is taken back by its end, and a crash is only its own.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

from lockstep.config.load import load
from lockstep.errors import LockstepError


def main(config: str, world_size: str, out: str, *overrides: str) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a plan is the same on machines with GPUs and without
    logging.disable(logging.WARNING)
    try:
        from lockstep.planner import gpu_rules
        from lockstep.planner.step import trace

        gpu_rules.install()
        found = trace(load(Path(config), overrides), int(world_size)).plain()
    except LockstepError as error:
        found = {"error": str(error), "exit_code": error.exit_code}
    Path(out).write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
