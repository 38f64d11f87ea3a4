"""Which line of a user's code a step that cannot be traced is about."""

from __future__ import annotations

import linecache
import re
import traceback
from pathlib import Path

_OURS = Path(__file__).resolve().parents[2]
_LIBRARIES = ("site-packages", "dist-packages", "torch", "torch_xla")
_FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+) in ', re.MULTILINE)
_FATAL = "Fatal Python error"


def told(error: Exception) -> str:
    frames = [each for each in traceback.extract_tb(error.__traceback__) if _is_users(each.filename)]
    where = f" at {_place(frames[-1].filename, frames[-1].lineno or 0)}" if frames else ""
    first = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
    return f"the step cannot be traced: {type(error).__name__}{where}: {first}"


def of_crash(log: str) -> str | None:
    """Of a process that ended where a placeholder was asked for its value; None where it ended otherwise.

    torch_xla has no answer to that, and Python's fault handler says where it was asked, the innermost line first.
    """
    _, found, after = log.partition(_FATAL)
    frames = [each for each in _FRAME.finditer(after) if _is_users(each["file"])] if found else []
    if not frames:
        return None
    place = _place(frames[0]["file"], int(frames[0]["line"]))
    return (
        f"the step reads a value at {place}: while it is traced there are none, so that it must not do so (.item(), "
        "print, a branch or a shape that depends on one)"
    )


def _place(file: str, line: int) -> str:
    return f"{file}:{line} ({linecache.getline(file, line).strip()})"


def _is_users(file: str) -> bool:
    path = Path(file)
    standard = Path(traceback.__file__).parent
    mine = path.is_relative_to(_OURS) or path.is_relative_to(standard) or file.startswith("<")
    return not mine and not set(_LIBRARIES) & set(path.parts)
