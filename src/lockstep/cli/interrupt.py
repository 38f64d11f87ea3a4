"""Ctrl-C before a run has begun, or after its end: there is nothing to put in order."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import ParamSpec, TypeVar

from lockstep.distributed.signals import handled, unless_ignored
from lockstep.errors import INTERRUPTED_EXIT_CODE

Given = ParamSpec("Given")
Returned = TypeVar("Returned")


def leaving_at_once(command: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """Until ranks are started, who listens for them, Ctrl-C ends this process there and then.

    KeyboardInterrupt would come out of the midst of an import, as a traceback, or be lost in code that ignores it.
    """

    @functools.wraps(command)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
        with handled(dict.fromkeys(unless_ignored([signal.SIGINT]), _leave)):
            return command(*args, **kwargs)

    return run


def _leave(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"lockstep: interrupted\n")  # past the stream, which may be in the midst of a write
    os._exit(INTERRUPTED_EXIT_CODE)
