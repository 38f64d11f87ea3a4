"""`breakpoint()` at a real terminal, with one process: the prompt answers, and nobody ends the run while it waits."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from select import select

from conftest import Project, summary

TASK = """
import torch
import lockstep
from torch.utils.data import TensorDataset

class Mine(lockstep.Task):
    steps = 0

    def model(self):
        return torch.nn.Linear(4, 1)

    def train_data(self):
        return TensorDataset(torch.randn(24, 4))

    def loss(self, model, batch):
        self.steps += 1
        if self.steps == 2:
            breakpoint()
        return model(batch[0]).square().mean()
"""
SCRIPT = "number = 6\nbreakpoint()\nprint('went', 'on')\n"


class Terminal:
    """A command at a terminal of its own: what it shows, and what is typed."""

    def __init__(self, process: subprocess.Popen[bytes], end: int) -> None:
        self.process, self._end, self.shown = process, end, ""

    def expect(self, text: str, limit: float = 120.0) -> None:
        deadline = time.monotonic() + limit
        while text not in self.shown:
            assert time.monotonic() < deadline, f"no {text!r} in:\n{self.shown}"
            assert self._read(), f"it ended without {text!r}:\n{self.shown}"

    def watch(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._read()

    def type(self, line: str) -> None:
        self.shown = ""
        os.write(self._end, f"{line}\n".encode())

    def wait(self, limit: float = 60.0) -> int:
        deadline = time.monotonic() + limit
        while self._read() and time.monotonic() < deadline:
            pass
        return self.process.wait(max(deadline - time.monotonic(), 1.0))

    def _read(self) -> bool:
        """Take what is there; whether anybody is still at the terminal."""
        if select([self._end], [], [], 0.2)[0]:
            try:
                self.shown += os.read(self._end, 65536).decode(errors="replace")
            except OSError:
                return False
        return True


@contextmanager
def at_a_terminal(project: Project, *arguments: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep", *arguments],
        cwd=project.folder, stdin=theirs, stdout=theirs, stderr=theirs,
        env={**os.environ, "TERM": "xterm", "PYTHONBREAKPOINT": ""},  # not Ray's, which sets it where it was imported
        start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        os.close(ours)


def test_a_breakpoint_in_a_task(project: Project) -> None:
    (project.folder / "mine.py").write_text(TASK)
    config = project.config(
        task={"type": "mine.py:Mine"}, processes=1, data={}, train={"epochs": 2, "batch_size": 8},
        timeouts={"stall": 2, "first_step": 2},
    )  # fmt: skip
    with at_a_terminal(project, "train", str(config)) as terminal:
        terminal.expect("(Pdb) ")
        assert "mine.py" in terminal.shown and "return model(batch[0])" in terminal.shown
        terminal.type("p self.steps * 21")
        terminal.expect("42\r\n")
        terminal.expect("(Pdb) ")
        terminal.shown = ""
        terminal.watch(5)  # longer than a rank may go without progress
        assert not terminal.shown, "nothing draws over the prompt"
        terminal.type("c")
        terminal.expect("completed: ")
        assert terminal.wait() == 0, terminal.shown
    assert summary(project.only_run())["step"] == 6
