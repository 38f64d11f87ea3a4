"""What runs inside a started process: a command, or a function, with its failure written down for the launcher.

Imported by the fork server before any process is made, so that all of them share one import of torch.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lockstep.errors import PREEMPTED_EXIT_CODE
from lockstep.launcher.failure import report

logger = logging.getLogger(__name__)

_GRACEFUL = (None, 0, PREEMPTED_EXIT_CODE)


def run_command(argv: tuple[str, ...], error_file: str) -> int:
    """Run `python script.py ...` or `python -m module ...` in this process; its exit code where it ended in order."""
    with_failure = _writing_failure(error_file, lambda: _run_python(argv))
    return int(with_failure or 0)


def call_function(pickled: bytes, error_file: str) -> Any:
    """Call a function that our own launcher pickled a moment ago."""
    return _writing_failure(error_file, pickle.loads(pickled))


def _writing_failure(error_file: str, body: Callable[[], Any]) -> Any:
    _end_with_parent()
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the launcher says it in our words
    # What this process starts itself (data workers) is started in the platform's usual way, not by a fork server.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        return body()
    except SystemExit as leaving:
        if leaving.code in _GRACEFUL:
            return leaving.code or 0
        raise
    except BaseException as error:
        report(error, int(os.environ.get("RANK", "0")), socket.gethostname()).write(Path(error_file))
        raise


def _run_python(argv: tuple[str, ...]) -> int:
    if argv[1] == "-m":
        sys.argv = list(argv[2:])
        runpy.run_module(argv[2], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(argv[1:])
        sys.path.insert(0, str(Path(argv[1]).resolve().parent))
        runpy.run_path(argv[1], run_name="__main__")
    return 0


def _end_with_parent() -> None:
    """Ask this process to stop when the launcher is gone, however it went; without a launcher nobody else would."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="lockstep-parent", daemon=True).start()
