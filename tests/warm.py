"""Starts `python -m lockstep ...` and scripts in a process that has imported torch: most of a short run is that import.

A warm process waits beside each worker of pytest, and forks what a test starts. The forked command has a session, an
environment, a folder and files of its own, as a new process has, and a fork server of the usual kind as its child; that
one too is forked instead of executed. Ranks have one thread where the test does not say otherwise; those with more get
a new fork server, since libraries read the number of threads when they are loaded.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
from pathlib import Path
from typing import Any, NoReturn

# What a process reads at its start, so that only a new one can be given it.
READ_AT_START = ("PYTHON", "LD_", "OMP_", "MKL_", "KMP_", "GLIBC_", "MALLOC_", "TORCH", "XLA_", "PJRT_")
_LARGEST = 1 << 20


class Warm:
    """The warm process of this worker of pytest, as seen from there."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        argv = [sys.executable, __file__, str(theirs.fileno())]
        self._process = subprocess.Popen(
            argv, env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
        )
        theirs.close()
        self._control = ours
        atexit.register(self.end)

    def start(self, argv: list[str], cwd: Path, environment: dict[str, str], out: int, err: int) -> Forked:
        reply, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.umask(mask := os.umask(0))
        message = json.dumps({"argv": argv, "cwd": str(cwd), "env": environment, "umask": mask}).encode()
        with theirs:
            socket.send_fds(self._control, [message], [out, err, theirs.fileno()])
        return Forked(reply)

    def end(self) -> None:
        self._control.close()
        self._process.wait(10)


class Forked:
    """A command that was forked, with what tests use of `subprocess.Popen`."""

    def __init__(self, reply: socket.socket) -> None:
        self._reply, self.returncode = reply, None
        reply.settimeout(60)
        self.pid = int(reply.recv(64))

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._reply.settimeout(timeout)
            try:
                status = self._reply.recv(64)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(["lockstep"], timeout or 0) from None
            self.returncode = os.waitstatus_to_exitcode(int(status))
            self._reply.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_here: Warm | None = None


def start(argv: list[str], cwd: Path, environment: dict[str, str], out: int, err: int) -> Forked | None:
    """Starts `-m lockstep ARGUMENTS` or `SCRIPT ARGUMENTS`; None where a new process has to be started for it."""
    global _here
    if argv[:2] != ["-m", "lockstep"] and not argv[0].endswith(".py"):
        return None
    changed = {name for name in {*environment, *os.environ} if environment.get(name) != os.environ.get(name)}
    if any(name.startswith(READ_AT_START) and name != "PYTHONPATH" for name in changed) or sys.platform != "linux":
        return None
    _here = _here or Warm()
    return _here.start(argv, cwd, {"OMP_NUM_THREADS": "1", **environment}, out, err)


# What follows runs in the warm process.


def serve(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Forks a process for every request, and returns the request in it."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait for commands
    while True:
        message, files, _, _ = socket.recv_fds(control, _LARGEST, 3)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            control.close()
            return json.loads(message), files
        for each in files:
            os.close(each)


def watch(reply: int) -> None:
    """Forks the command and returns in it; the process that forked it says how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        return
    with socket.socket(fileno=reply) as told, contextlib.suppress(OSError):
        told.send(str(pid).encode())
        _, status = os.waitpid(pid, 0)
        told.send(str(status).encode())
    os._exit(0)


def become(request: dict[str, Any], out: int, err: int) -> None:
    """Makes this process what a new one would be."""
    os.setsid()
    os.umask(request["umask"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    for file, number in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (err, 2)):
        os.dup2(file, number)
    os.closerange(3, 256)
    is_script = request["argv"][0] != "-m"
    sys.path[0] = str((Path(request["cwd"]) / request["argv"][0]).parent) if is_script else request["cwd"]
    sys.path[1:1] = [each for each in request["env"].get("PYTHONPATH", "").split(os.pathsep) if each not in sys.path]
    sys.argv = request["argv"][0 if is_script else 1 :]
    import multiprocessing.process
    import random

    import numpy as np

    multiprocessing.process.ORIGINAL_DIR = request["cwd"]
    random.seed()
    np.random.seed()


class ForkServerToBe:
    """A child that becomes the fork server of this process, forked before there are threads."""

    def __init__(self) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if self._pid == 0:
            self._orders.close()
            _wait_for_orders(theirs)
        theirs.close()
        import multiprocessing.util

        self._execute, multiprocessing.util.spawnv_passfds = multiprocessing.util.spawnv_passfds, self.spawn

    def spawn(self, path: Any, args: Any, files: Any) -> int:
        """Stands in for `spawnv_passfds`."""
        import multiprocessing.util

        if "multiprocessing.forkserver" not in args[-1]:
            return int(self._execute(path, args, files))
        multiprocessing.util.spawnv_passfds = self._execute
        if os.environ.get("OMP_NUM_THREADS") != "1":
            self._orders.close()
            return int(self._execute(path, args, files))
        ignored = [each for each in signal.valid_signals() if signal.getsignal(each) == signal.SIG_IGN]
        numbers = [int(each) for each in files]
        message = json.dumps({"code": args[-1], "env": dict(os.environ), "ignored": ignored, "files": numbers})
        socket.send_fds(self._orders, [message.encode()], numbers)
        self._orders.close()
        return self._pid


def _wait_for_orders(orders: socket.socket) -> NoReturn:
    usual = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    for each in usual:
        signal.signal(each, signal.SIG_IGN)
    message, files, _, _ = socket.recv_fds(orders, _LARGEST, 8)
    if not message:
        os._exit(0)
    order = json.loads(message)
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, 300) for each in files]
    os.closerange(3, 300)
    for file, number in zip(moved, order["files"], strict=True):
        os.dup2(file, number)
        os.close(file)
    for each in usual:
        signal.signal(each, signal.SIG_DFL)
    if signal.SIGINT not in order["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for each in order["ignored"]:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(each, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(order["env"])
    sys.argv, sys.modules["__main__"] = ["-c"], types.ModuleType("__main__")
    del sys.path[0]
    run(lambda: exec(order["code"], vars(sys.modules["__main__"])))


def run_script() -> None:
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = sys.argv[0]
    vars(main).update(__builtins__=__builtins__, __spec__=None)
    exec(compile(Path(sys.argv[0]).read_bytes(), sys.argv[0], "exec"), vars(main))


def run(main: Any) -> NoReturn:
    """Calls main, and ends this process as Python does, but for taking torch apart."""
    code = 0
    try:
        main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    import importlib

    sys.path.insert(0, "")  # the first place is that of the command
    sys.path.remove(str(Path(__file__).parent))
    import torch._dynamo  # noqa: F401

    for name in (
        "cli",
        "launchers.local.child",
        "launchers.local.launcher",
        "launchers.checks",
        "record.display",
        "tasks.predict",
    ):
        importlib.import_module(f"lockstep.{name}")
    own = socket.socket(fileno=int(sys.argv[1]))
    asked, (out_file, err_file, answer) = serve(own)
    watch(answer)
    become(asked, out_file, err_file)
    server = ForkServerToBe()
    run(run_script if asked["argv"][0] != "-m" else lambda: runpy.run_module("lockstep", None, "__main__", True))
