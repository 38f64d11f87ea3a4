"""SLURM's short forms: node lists (`n[1-2,07-09],gpu4`) and tasks per node (`2(x2),1`), written out."""

from __future__ import annotations

import itertools
import re

from lockstep.errors import TopologyError

_MOST = 1_000_000  # nodes; a range in an environment variable must not fill the memory
_SHORT = "n[1-2,07-09],gpu4"


def nodes(text: str, name: str = "SLURM_STEP_NODELIST") -> list[str]:
    """The nodes of a list, in its order, as `scontrol show hostnames` has them."""
    found: list[str] = []
    for part in _split(text, name):
        pieces = re.split(r"\[([^\[\]]*)\]", part)  # what is between brackets is at odd places
        if any(bracket in piece for piece in pieces for bracket in "[]") or not part:
            raise _wrong(text, name)
        choices = [_numbers(each, text, name) if at % 2 else [each] for at, each in enumerate(pieces)]
        count = 1
        for each in choices:
            count *= len(each)
        if count + len(found) > _MOST:
            raise TopologyError(f"{name}={text!r} stands for more than {_MOST} nodes")
        found += map("".join, itertools.product(*choices))
    return found


def tasks_per_node(text: str, name: str = "SLURM_STEP_TASKS_PER_NODE") -> list[int]:
    """How many tasks every node has."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", part.strip())
        if found is None or int(found[2] or 1) + len(counts) > _MOST:
            raise TopologyError(f"{name}={text!r} does not say how many tasks every node has, as 2(x3),1 does")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _split(text: str, name: str) -> list[str]:
    """At the commas outside of brackets."""
    parts, depth = [""], 0
    for character in text.strip():
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1):
            raise _wrong(text, name)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _numbers(inside: str, text: str, name: str) -> list[str]:
    """`1-2,07-09` as 1, 2, 07, 08, 09: a number is as wide as the first of its range."""
    found: list[str] = []
    for part in inside.split(","):
        ends = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", part)
        if ends is None:
            raise _wrong(text, name)
        first, last = ends[1], ends[2] or ends[1]
        if not 0 <= int(last) - int(first) < _MOST:
            raise _wrong(text, name)
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def _wrong(text: str, name: str) -> TopologyError:
    return TopologyError(f"{name}={text!r} is not a list of nodes, such as {_SHORT}")
