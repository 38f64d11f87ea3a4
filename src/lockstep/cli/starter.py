"""Runs commands of Lockstep one after the other in one process, so that torch is loaded once for all of their ranks.

A fork server stays warm from one run to the next, as it does from one call of `lockstep.train` to the next. Commands
come as lines of JSON on standard input, and each is answered by a line with its exit code.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from lockstep.launchers.local.fork_server import warm_up


def main() -> None:
    asked = os.fdopen(os.dup(0), "r", encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # what commands print goes to the log, as what they complain of
    warm_up(int(os.environ.get("OMP_NUM_THREADS", "1")))
    for line in asked:
        code = _run(json.loads(line))
        answers.write(f"{code}\n")
        answers.flush()


def _run(arguments: Sequence[str]) -> int:
    from lockstep.cli import main

    try:
        main(list(arguments), prog_name="lockstep")
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    main()
