"""What is wrong with the ranks that reported: pure functions from reports to faults, and the message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.config.changes import changes
from lockstep.distributed.activity import Beat
from lockstep.distributed.rollcall.report import Evidence, Report, table
from lockstep.distributed.topology import ranks_text

# Rows of a table beyond this are left to topology.json.
SHOWN = 32


@dataclass(frozen=True)
class Fault:
    text: str
    ranks: tuple[int, ...]
    missing: bool = False  # whether these ranks did not report at all


def find_faults(reports: list[Report], world_size: int, share_devices: bool) -> list[Fault]:
    """Everything that the reports show to be wrong, gravest first."""
    reports = sorted(reports, key=lambda each: each.rank)
    return [
        *_rank_faults(reports, world_size),
        *_unequal(reports, "world_size", "WORLD_SIZE differs"),
        *_runtime_faults(reports),
        *([] if share_devices else _device_faults(reports)),
        *_unequal(reports, "python", "the versions of Python differ"),
        *_unequal(reports, "torch", "the versions of torch differ"),
        *_unequal(reports, "lockstep", "the versions of Lockstep differ"),
    ]


def differences(reports: Mapping[int, Report], evidence: Callable[[int], Evidence]) -> list[Fault]:
    """Which settings and which files differ from rank 0's, where a digest says that some do."""
    reference = next((number for number, each in reports.items() if each.rank == 0), None)
    if reference is None:
        return []
    zero = reports[reference]
    faults = []
    for number, report in reports.items():
        if (report.config, report.source) == (zero.config, zero.source):
            continue
        theirs, ours = evidence(number), evidence(reference)
        settings = "; ".join(
            f"{change.path} is {change.after!r}, on rank 0 {change.before!r}"
            for change in changes(ours.config, theirs.config)
        )
        if settings:
            faults.append(Fault(f"rank {report.rank} has another config: {settings}", (report.rank,)))
        # A file that only one of them has loaded is no contradiction: some imports depend on the rank.
        files = [file for file, value in theirs.source.items() if ours.source.get(file, value) != value]
        if files:
            names = ", ".join(sorted(files))
            faults.append(
                Fault(
                    f"rank {report.rank} has another version of the task's source: {names} on {report.host} differs "
                    f"from rank 0's on {zero.host}",
                    (report.rank,),
                )
            )
    return faults


def render(faults: list[Fault], reports: list[Report], missing: Mapping[int, Beat | None] | None = None) -> str:
    """One message: what is wrong, and a table of those who reported with the ranks concerned marked."""
    lines = ["the roll call failed:", *(f"  - {fault.text}" for fault in faults)]
    for rank, beat in (missing or {}).items():
        seen = f"last seen {beat.describe()} for {beat.still:.0f} s" if beat else "was never seen"
        lines.append(f"    rank {rank} {seen}")
    marked = {rank for fault in faults for rank in fault.ranks}
    ordered = sorted(reports, key=lambda each: (each.rank not in marked, each.rank))
    shown = sorted(ordered[:SHOWN], key=lambda each: each.rank)
    lines += ["", *table(shown, marked)]
    if len(reports) > SHOWN:
        lines.append(f"  and {len(reports) - SHOWN} more")
    return "\n".join(lines)


def _rank_faults(reports: list[Report], world_size: int) -> list[Fault]:
    faults = []
    by_rank: dict[int, list[Report]] = {}
    for report in reports:
        by_rank.setdefault(report.rank, []).append(report)
    for rank, claims in sorted(by_rank.items()):
        if not 0 <= rank < world_size:
            faults.append(Fault(f"rank {rank} does not exist in a world of {world_size}", (rank,)))
        if len(claims) > 1:
            who = " and ".join(f"process {each.pid} on {each.host}" for each in claims)
            faults.append(
                Fault(f"rank {rank} is claimed {len(claims)} times, by {who}: give every process its own RANK", (rank,))
            )
    missing = [rank for rank in range(world_size) if rank not in by_rank]
    if missing:
        faults.append(Fault(f"{ranks_text(missing)} of {world_size} did not arrive", tuple(missing), missing=True))
    return faults


def _runtime_faults(reports: list[Report]) -> list[Fault]:
    wrong = [each for each in reports if each.runtime_world not in (None, each.world_size)]
    return [
        Fault(
            f"rank {each.rank}: the device runtime believes in a world of {each.runtime_world}, "
            f"the run has {each.world_size} ranks: its collectives would leave the others out",
            (each.rank,),
        )
        for each in wrong
    ]


def _device_faults(reports: list[Report]) -> list[Fault]:
    holders: dict[str, list[int]] = {}
    for report in reports:
        holders.setdefault(report.physical_device, []).append(report.rank)
    return [
        Fault(
            f"{ranks_text(ranks)} are on the same physical device, {device}: give every process its own "
            "(LOCAL_RANK, CUDA_VISIBLE_DEVICES), or allow it with launch.share_devices: true",
            tuple(ranks),
        )
        for device, ranks in holders.items()
        if len(set(ranks)) > 1
    ]


def _unequal(reports: list[Report], name: str, headline: str) -> list[Fault]:
    values: dict[Any, list[int]] = {}
    for report in reports:
        values.setdefault(getattr(report, name), []).append(report.rank)
    if len(values) < 2:
        return []
    common = max(values, key=lambda value: len(values[value]))
    odd = tuple(rank for value, ranks in values.items() if value != common for rank in ranks)
    said = ", ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in values.items())
    return [Fault(f"{headline}: {said}", odd)]
