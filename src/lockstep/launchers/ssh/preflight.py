"""Checks what hosts answered to an inspection, before anything is started there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.errors import LaunchError
from lockstep.launchers.ssh.ssh import Done
from lockstep.launchers.ssh.transport import Transport, decoded
from lockstep.shown import in_a_line
from lockstep.version import installed

_LEAST_BYTES = 1 << 30
_CLOCK_SECONDS = 5.0
_OLDEST_PYTHON = (3, 11)


@dataclass(frozen=True)
class Inspection:
    """The answer of a host, and what is wrong with it."""

    index: int
    name: str
    found: dict[str, Any]
    problems: tuple[str, ...] = ()
    clock: float = 0.0  # seconds that it is ahead

    @property
    def reached(self) -> bool:
        return bool(self.found)


def answered(transport: Transport, done: Done) -> dict[str, Any]:
    """Returns the answer of a host to a command; raises LaunchError where it has none."""
    answer = decoded(done.out)
    if answer is not None and "error" in answer:
        raise LaunchError(str(answer["error"]))
    if done.code == 0 and answer is not None:
        return answer
    raise LaunchError(in_a_line(transport.explain(done.command, done.code, done.errors)))


def judge(transport: Transport, dones: Sequence[Done], began: float, ended: float) -> list[Inspection]:
    """Returns every host with what is wrong with it, by itself and compared with the others."""
    inspections = []
    for done in dones:
        index = done.command.worker or 0
        name = transport.workers[index]
        try:
            found = answered(transport, done)
        except LaunchError as error:
            inspections.append(Inspection(index, name, {}, (str(error),)))
            continue
        clock = _clock_offset(float(found["time"]), began, ended)
        inspections.append(Inspection(index, name, found, tuple(_problems(found, clock)), clock))
    return _compared(inspections)


def _clock_offset(theirs: float, began: float, ended: float) -> float:
    return theirs - ended if theirs > ended else min(theirs - began, 0.0)


def _problems(found: dict[str, Any], clock: float) -> list[str]:
    problems = []
    python = tuple(int(part) for part in str(found["python"]).split(".")[:2])
    if python < _OLDEST_PYTHON:
        problems.append(f"Python {found['python']} is too old: 3.11 or later is needed (pod.python)")
    if found["lockstep"] != installed():
        problems.append(f"it has Lockstep {found['lockstep']}, and this machine {installed()}: install the same")
    if found["torch"] is None:
        problems.append("torch is not installed for pod.python there")
    if not found["writable"]:
        problems.append(f"{found['path']} cannot be written: name another pod.directory")
    elif found["free_bytes"] < _LEAST_BYTES:
        problems.append(f"only {found['free_bytes'] / 2**20:.0f} MB are free at {found['path']}: make room there")
    if abs(clock) > _CLOCK_SECONDS:
        ahead = "ahead" if clock > 0 else "behind"
        problems.append(
            f"its clock is {abs(clock):.0f} s {ahead} of this machine's: set it (chrony or ntpd keeps it so)"
        )
    if not found["address"]:
        problems.append(f"it has no address in launch.network; it has {', '.join(found['addresses'])}")
    if found["running"]:
        problems.append(f"job {found['running']} is still at work there: `lockstep pod stop` has it save and leave")
    devices = found.get("devices") or {}
    if "error" in devices:
        problems.append(str(devices["error"]))
    return problems


def _compared(inspections: list[Inspection]) -> list[Inspection]:
    """Adds problems that need a comparison: one host under two names, another torch, another folder."""
    there = [each for each in inspections if each.reached]
    judged = []
    for each in inspections:
        problems = list(each.problems)
        for other in there[: there.index(each)] if each in there else ():
            if (each.found["host"], each.found["address"]) == (other.found["host"], other.found["address"]):
                problems.append(f"is the same host as {other.name}: name every host once")
        if each.reached and each is not there[0]:
            for key, what in (("torch", "torch"), ("path", "the pod's folder at")):
                if each.found[key] != there[0].found[key]:
                    problems.append(
                        f"it has {what} {each.found[key]}, and {there[0].name} {there[0].found[key]}"
                        + ("; make pod.directory absolute" if key == "path" else ": install the same")
                    )
        judged.append(Inspection(each.index, each.name, each.found, tuple(problems), each.clock))
    return judged


def _row(each: Inspection) -> tuple[str, ...]:
    found, devices = each.found, each.found.get("devices") or {}
    return (
        str(found["address"]),
        str(found["python"]),
        str(found["torch"]),
        f"{devices.get('processes', '-')} {devices.get('runtime', '')}".strip(),
        f"{found['free_bytes'] / 2**30:.0f} GB",
        f"{each.clock:+.1f} s",
    )


def table(inspections: Sequence[Inspection]) -> str:
    rows: list[tuple[str, ...]] = [("host", "address", "python", "torch", "devices", "free", "clock", "verdict")]
    for each in inspections:
        rows.append((each.name, *(_row(each) if each.reached else ("-",) * 6), "; ".join(each.problems) or "ok"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
    return "\n".join(in_a_line(line) for line in lines)
