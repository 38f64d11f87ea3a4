"""Which line of a user's code an exception is about."""

from __future__ import annotations

import traceback
from pathlib import Path

_OURS = Path(__file__).resolve().parents[2]
_READS = ("placeholder", "HasValue", "has no value", "reads a value")


def told(error: Exception) -> str:
    frames = [each for each in traceback.extract_tb(error.__traceback__) if _is_users(each.filename)]
    first = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
    where = f" at {frames[-1].filename}:{frames[-1].lineno} ({(frames[-1].line or '').strip()})" if frames else ""
    if any(text in str(error) for text in _READS):
        return (
            f"the step cannot be traced: it reads a value{where}, and while a step is traced there are none (.item(), "
            f"print, a branch or a shape that depends on one): {first}"
        )
    return f"the step cannot be traced: {type(error).__name__}{where}: {first}"


def _is_users(file: str) -> bool:
    parts = Path(file).parts
    return "site-packages" not in parts and "torch" not in parts and "torch_xla" not in parts and not Path(
        file
    ).is_relative_to(_OURS) and not file.startswith("<")  # fmt: skip
