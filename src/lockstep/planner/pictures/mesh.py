"""The mesh: hosts as boxes with their devices, once for each axis. Devices of one colour are a line along it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

from lockstep.planner.pictures.chart import COLOURS
from lockstep.planner.plan import Plan

_HOSTS = 8  # that are drawn, of more
_RANKS = 8  # that are named, of a longer line


def picture(plan: Plan) -> str:
    axes = {axis: size for axis, size in plan.step.mesh.items() if size > 1}
    if not axes or math.prod(axes.values()) != plan.target.count:
        return _hosts(plan, {}, None)
    return "".join(_along(plan, axes, axis) for axis in axes)


def _along(plan: Plan, axes: Mapping[str, int], axis: str) -> str:
    lines, size = plan.target.count // axes[axis], axes[axis]
    ranks = _line(axes, axis, 0)
    inside = max(ranks) < plan.target.device.per_host or plan.target.hosts == 1
    where = "" if plan.target.hosts == 1 else ", within a host" if inside else ", over hosts"
    count = "one line" if lines == 1 else f"{lines} lines"
    return f'<p class="axis"><b>{escape(axis)}</b>: {count} of {size}{where}</p>{_hosts(plan, axes, axis)}'


def _hosts(plan: Plan, axes: Mapping[str, int], axis: str | None) -> str:
    per_host, hosts = plan.target.device.per_host, plan.target.hosts
    shown = min(hosts, _HOSTS)
    boxes = []
    for host in range(shown):
        first = host * per_host
        count = min(per_host, plan.target.count - first)
        devices = "".join(_device(rank, axes, axis) for rank in range(first, first + count))
        boxes.append(f'<div class="host"><div class="devices">{devices}</div><small>host {host}</small></div>')
    more = f'<div class="more">and {hosts - shown} more hosts</div>' if hosts > shown else ""
    return f'<div class="hosts" role="img" aria-label="hosts and devices">{"".join(boxes)}{more}</div>'


def _device(rank: int, axes: Mapping[str, int], axis: str | None) -> str:
    if axis is None:
        return f'<span title="rank {rank}">{rank}</span>'
    line = _line(axes, axis, rank)
    place = ", ".join(f"{name} {at}" for name, at in _place(axes, rank).items())
    others = ", ".join(map(str, line[:_RANKS])) + (f", ... {line[-1]}" if len(line) > _RANKS else "")
    colour = COLOURS[_number(axes, axis, rank) % len(COLOURS)]
    told = escape(f"rank {rank}: {place}; along {axis} with {others}")
    return f'<span style="border-color:{colour};background:{colour}44" title="{told}">{rank}</span>'


def _place(axes: Mapping[str, int], rank: int) -> dict[str, int]:
    """Along every axis; the last runs fastest."""
    found = {}
    for axis, size in reversed(list(axes.items())):
        rank, found[axis] = divmod(rank, size)
    return dict(reversed(found.items()))


def _line(axes: Mapping[str, int], axis: str, rank: int) -> list[int]:
    """The ranks of the line along an axis that a rank is in."""
    stride = math.prod(list(axes.values())[list(axes).index(axis) + 1 :])
    first = rank - _place(axes, rank)[axis] * stride
    return [first + number * stride for number in range(axes[axis])]


def _number(axes: Mapping[str, int], axis: str, rank: int) -> int:
    """Which of the lines along an axis a rank is in."""
    number = 0
    for name, at in _place(axes, rank).items():
        number = number if name == axis else number * axes[name] + at
    return number
