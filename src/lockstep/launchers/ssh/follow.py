"""The consoles of all hosts of a job, as they come: the head's as it is, the others' with their name before every line.

A connection that is lost is made again, from where it was: the job does not notice.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import IO

from lockstep.errors import LockstepError
from lockstep.launchers.ssh.transport import Command, ConsoleStart, Transport, decoded
from lockstep.shown import visible

# How long a host may be out of reach before it is given up.
_PATIENCE_SECONDS = 60.0
_RETRY_SECONDS = 1.0
_CHUNK = 64 * 1024

Ask = Callable[[int], list[Command]]  # the command that follows from an offset on


class HeadLost(LockstepError):
    """The host that leads a job is gone: what became of the run, nobody can say."""

    exit_code = 5


class Console:
    """One host's, followed in a thread of its own."""

    def __init__(self, transport: Transport, worker: int, ask: Ask, prefix: str, out: IO[bytes]) -> None:
        self._transport, self._worker, self._ask, self._prefix, self._out = transport, worker, ask, prefix, out
        self._offset = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._left = False
        self.code: int | None = None  # of the run, once it is known
        self.trouble = ""
        self._thread = threading.Thread(target=self._follow, name=f"lockstep-console-{worker}", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def leave(self) -> None:
        self._left = True
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._process.kill()

    def _follow(self) -> None:
        quiet_since = time.monotonic()
        while not self._left:
            before = self._offset
            code, errors = self._stream()
            if code != 255 and not self._left:
                self.code = code
                return
            self.trouble = self._transport.explain(self._ask(0)[0], code, errors)
            if self._offset > before:
                quiet_since = time.monotonic()
            if time.monotonic() > quiet_since + _PATIENCE_SECONDS:
                return
            time.sleep(_RETRY_SECONDS)

    def _stream(self) -> tuple[int, str]:
        (command,) = self._ask(self._offset)
        # Not in the terminal's process group: Ctrl-C is for us to hear, and to pass on in our own way.
        self._process = subprocess.Popen(
            command.argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        pending, start = b"", ConsoleStart()
        while received := self._process.stdout.read1(_CHUNK):  # type: ignore[attr-defined]
            data = start.rest(received)
            self._offset += len(data)
            *lines, pending = (pending + data).split(b"\n")
            self._show(lines)
        self._offset -= len(pending)  # an unfinished line is asked for again
        errors = self._process.stderr.read().decode(errors="replace")
        code = self._process.wait()
        if pending and code != 255:
            self._show([pending])
        if code != 255 and (answer := decoded(start.instead.decode(errors="replace"))) is not None:
            self._show([f"lockstep: {answer.get('error')}".encode()])
        return code, errors

    def _show(self, lines: list[bytes]) -> None:
        """What hosts say is the text of others: without control characters."""
        for line in lines:
            text = visible(line.decode(errors="replace"))
            try:
                self._out.write(f"{self._prefix}{text}\n".encode())
                self._out.flush()
            except (OSError, ValueError):  # whoever read it is gone; the console is on the host
                return


def follow(transport: Transport, ask: Callable[[int, int], list[Command]], head: int, stop: Callable[[], bool]) -> int:
    """Show all consoles until the run is over; its exit code. `stop` says whether to leave it alone from now on."""
    out = getattr(sys.stdout, "buffer", None)
    consoles = {}
    for worker, name in enumerate(transport.workers):
        prefix = "" if worker == head else f"[{name}] "
        consoles[worker] = Console(transport, worker, lambda offset, at=worker: ask(at, offset), prefix, out)  # type: ignore[misc, arg-type]
    leading = consoles[head]
    try:
        while not leading.is_over:
            if stop():
                return 0
            others = [each for worker, each in consoles.items() if worker != head]
            # Where the head's host is gone, the others end, and say so; nobody is left who could say how it ended.
            if leading.trouble and others and all(each.is_over for each in others):
                break
            time.sleep(0.1)
    finally:
        for console in consoles.values():
            console.leave()
    if leading.code is not None:
        return leading.code
    raise HeadLost(f"{transport.workers[head]}, which leads the job, is out of reach: {leading.trouble}")
