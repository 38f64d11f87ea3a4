"""What is left of a run is found and ended, also below a process that is only half gone."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from lockstep.distributed.signals import end_below, processes_below, state_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc shows the processes")

# The main thread of a killed process may be gone while another thread of it is still leaving.
HALF_GONE = """
import ctypes, subprocess, sys, threading, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
threading.Thread(target=time.sleep, args=(600,)).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[__import__("platform").machine()], 0)
"""


def test_what_is_below_a_process_whose_main_thread_is_gone_is_ended() -> None:
    others = processes_below([os.getpid()])
    parent = subprocess.Popen([sys.executable, "-c", HALF_GONE], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        _wait_for(lambda: state_of(parent.pid) == "Z")
        assert end_below([os.getpid()], spare=others) == [child]
        _wait_for(lambda: state_of(child) in (None, "Z"))
    finally:
        parent.kill()
        parent.wait()
        assert parent.stdout is not None
        parent.stdout.close()


def _wait_for(condition: object) -> None:
    deadline = time.monotonic() + 20
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)
