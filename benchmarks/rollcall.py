"""What the roll call costs, how it grows with the number of ranks, and how many connections a rank then has.

Real processes, started as `lockstep.launch` starts them, say what a run pays; up to 4,096 ranks that are threads of a
few processes say how that grows; up to 16 real processes say who is connected to whom.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import report

if TYPE_CHECKING:
    from lockstep.distributed.rollcall.report import Evidence, Report

Stamps = dict[str, tuple[float, float]]  # when each part of the roll call began and ended, by the system's clock

REMOTE, STATE, INODE, ESTABLISHED = 2, 3, 9, "01"  # in a line of /proc/net/tcp
CONNECTIONS_PER_RANK = 2  # to the store: one to talk, one for the heartbeat
OTHER_FILES = 100
# Torch asks for the name of every address that it connects to; a name server that is slow to answer must not hold up
# a thousand connections that are made before anything is measured.
IMPATIENT = "timeout:1 attempts:1"

NOTES_REAL = """\
Fresh processes on this host, through the launcher; medians, with the slowest in brackets. Together: from the moment
that the last rank begins to report until the data plane is proven on all ranks. In each measurement that is the sum of
the three before it: the verdict of rank 0 is known everywhere, the groups are formed, a reduction and a gathering have
shown that everybody takes part. Before that, on each rank: two connections to the store, and the digests of the task's
source."""

THREADS = 256  # ranks of one process
NOTES_GROWTH = f"""\
Ranks that are threads, at most {THREADS} of a process, each with its own two connections to a store that another
process serves, and with reports and evidence as long as real ones; the smallest of the repeats. From the moment that
all begin to report until the last has the verdict. The Python of all ranks takes turns on the cores here, so this is an
upper bound for the work that is to be done; there is no network in between, so a real one adds its latency. Messages:
calls to the store. Connections: two per rank."""

NOTES_CONNECTIONS = """\
Real processes; the most that any rank has with other ranks, without those to the store. The gathering is all that has
happened in the second and third column; in the other two, gradients were reduced and a message of 5000 characters was
agreed on as well. At once: gloo's own default, a connection between every two ranks, in each of the two groups."""


def main() -> None:
    parser = report.options(__doc__, repeats=5)
    parser.add_argument(
        "--child", nargs=5, metavar=("SOCKET", "FILE", "FIRST", "LAST", "COUNT"), help=argparse.SUPPRESS
    )
    chosen = report.parse(parser)
    if chosen.child:
        path, file, *ranks = chosen.child
        first, last, count = map(int, ranks)
        found = threads_report(path, first, last, count, chosen.repeats)
        Path(file).write_text(json.dumps(found), encoding="utf-8")
        return
    real, growth, connections = real_cost(chosen), grown_cost(chosen), counted_connections(chosen)
    text = "\n\n".join(
        [
            real_table(real),
            NOTES_REAL,
            growth_table(growth),
            NOTES_GROWTH,
            connections_table(connections),
            NOTES_CONNECTIONS,
        ]
    )
    report.publish(text, {"real": real, "growth": growth, "connections": connections}, chosen.json)


def launched(rank: Callable[[], Any], processes: int) -> list[Any]:
    """What a function returned on every rank, each in a fresh process of our launcher."""
    from lockstep.launchers.local import supervisor
    from lockstep.launchers.local.child import call_function
    from lockstep.launchers.plan import local_plan

    plan = local_plan([sys.executable], processes, threads=1)
    with report.silent_processes():
        result = supervisor.launch(plan, entry=call_function, argument=(pickle.dumps(rank),))
    if result.failure is not None:
        raise report.MeasurementFailed(result.failure.render(processes))
    return [result.returned[each] for each in range(processes)]


# Real processes


def real_cost(chosen: argparse.Namespace) -> dict[int, list[dict[str, float]]]:
    found: dict[int, list[dict[str, float]]] = defaultdict(list)
    for processes in report.interleaved((2,) if chosen.quick else (2, 4), chosen):
        with tempfile.TemporaryDirectory(prefix="rollcall-") as folder:
            found[processes].append(phases(launched(partial(roll_call, folder), processes)))
    return found


def roll_call(folder: str) -> Stamps:
    """One rank of a run that does nothing but join."""
    from lockstep import worker
    from lockstep.config.schema import RunSettings
    from lockstep.distributed.rollcall import call as hold
    from lockstep.distributed.topology import Topology

    stamps: Stamps = {}
    parts = [(worker, "meet"), (worker, "source_files")]
    for module, name in [*parts, (hold, "call"), (hold, "join"), (hold, "prove")]:
        setattr(module, name, stamped(getattr(module, name), name, stamps))
    worker.call(nothing, RunSettings(runtime="cpu"), Topology.from_env(os.environ), lambda: Path(folder))
    return stamps


def nothing(run: Any) -> None:
    """A run's `main`."""


def stamped(function: Callable[..., Any], name: str, stamps: Stamps) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()  # on one host, all processes read the same clock
        try:
            return function(*args, **kwargs)
        finally:
            stamps[name] = (began, time.monotonic())

    return wrapper


def phases(ranks: list[Stamps]) -> dict[str, float]:
    """Seconds between the moments at which the last rank has got so far."""
    arrived = max(each["call"][0] for each in ranks)
    verdict, joined, proven = (max(each[name][1] for each in ranks) for name in ("call", "join", "prove"))

    def longest(*names: str) -> float:
        return max(sum(each[name][1] - each[name][0] for name in names) for each in ranks)

    return {
        "verdict": verdict - arrived,
        "groups": joined - verdict,
        "proof": proven - joined,
        "together": proven - arrived,
        "connecting": longest("meet"),
        "digests": longest("source_files"),
    }


def real_table(found: dict[int, list[dict[str, float]]]) -> str:
    names = ["verdict", "groups", "proof", "together", "connecting", "digests"]

    def cell(measured: list[dict[str, float]], name: str) -> str:
        seconds = [each[name] for each in measured]
        return f"{1e3 * statistics.median(seconds):.0f} ms ({1e3 * max(seconds):.0f})"

    rows = [[str(count), *(cell(measured, name) for name in names)] for count, measured in sorted(found.items())]
    return report.table(["processes", *names[:4], "before: connecting", "before: digests"], rows)


# Growth: ranks that are threads


def simulated(chosen: argparse.Namespace) -> list[int]:
    return [2, 8, 32] if chosen.quick else [2, 8, 32, 128, 512, 1024, 2048, 4096]


def grown_cost(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Serve the store here, on a socket of our own as the launcher does, and let the ranks be other processes."""
    found = []
    for count in simulated(chosen):
        print(f"simulated ranks: {count}", file=sys.stderr, flush=True)
        needed = CONNECTIONS_PER_RANK * count + OTHER_FILES
        allowed = raise_file_limit(needed)
        if allowed < needed:
            reason = f"left out: needs {needed} open files, `ulimit -n` allows {allowed}"
            found.append({"ranks": count, "left out": reason})
        else:
            found.append(simulate(count, chosen.repeats))
    return found


def raise_file_limit(wanted: int) -> int:
    """The open files that this process may have, after asking for enough."""
    import resource

    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, max(wanted, most)))
            return wanted
    return allowed


def simulate(count: int, repeats: int) -> dict[str, Any]:
    """The best of several roll calls of so many ranks."""
    from lockstep.distributed.store.server import Server, listen_on_unix

    with tempfile.TemporaryDirectory(prefix="rollcall-") as folder:
        path = str(Path(folder) / "store")
        server = Server(listen_on_unix(path))
        files, commands = [], []
        for first in range(0, count, THREADS):
            last = min(first + THREADS, count)
            files.append(Path(folder) / f"found-{first}.json")
            child = [path, str(files[-1]), *map(str, (first, last, count))]
            commands.append([sys.executable, __file__, f"--repeats={repeats}", "--child", *child])
        with ThreadPoolExecutor(len(commands)) as threads:
            run = partial(report.run, limit=900, OMP_NUM_THREADS="1", RES_OPTIONS=IMPATIENT)
            list(threads.map(run, commands))
        server.close()
        parts = [json.loads(each.read_text(encoding="utf-8")) for each in files]
    rounds = [
        {
            "seconds": max(each["ended"] for each in of_round) - min(each["began"] for each in of_round),
            "calls": max(each["calls"] for each in of_round),
            "calls of rank 0": of_round[0]["calls of rank 0"],
        }
        for of_round in zip(*parts, strict=True)
    ]
    best = min(rounds, key=lambda each: each["seconds"])
    return {"ranks": count, **best, "connections": CONNECTIONS_PER_RANK * count}


def threads_report(path: str, first: int, last: int, count: int, repeats: int) -> list[dict[str, Any]]:
    """In a child: what its ranks saw of each roll call."""
    raise_file_limit(CONNECTIONS_PER_RANK * (last - first) + OTHER_FILES)
    stores = connections(path, CONNECTIONS_PER_RANK * (last - first))
    evidence, reports = what_ranks_say(first, last, count)
    processes = -(-count // THREADS)
    return [
        threads_call(stores[: last - first], f"{count}-{number}", evidence, reports, processes)
        for number in range(repeats)
    ]


def connections(path: str, count: int) -> list[Any]:
    from lockstep.distributed.store.client import connect_unix

    with ThreadPoolExecutor(64) as threads:
        return list(threads.map(lambda _: connect_unix(path, 60.0), range(count)))


class Counting:
    """A store that counts what it is asked for."""

    def __init__(self, store: Any) -> None:
        self._store, self.calls = store, 0

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        return getattr(self._store, name)


def threads_call(
    stores: list[Any], prefix: str, evidence: Evidence, reports: list[Report], processes: int
) -> dict[str, Any]:
    """A roll call, of as many ranks here as there are connections; they begin with those of the other processes."""
    from lockstep.distributed.rollcall.call import call

    count = len(stores)
    began, ended, calls = [0.0] * count, [0.0] * count, [0] * count

    def meet_processes() -> None:
        meeting = stores[0].under(f"{prefix}-meeting/")
        if meeting.add("here", 1) == processes:
            meeting.set("all", b"")
        if not meeting.wait(["all"], 600.0):
            raise report.MeasurementFailed("the processes of the simulated ranks did not meet")

    together = threading.Barrier(count, action=meet_processes)

    def rank(number: int) -> None:
        store = Counting(stores[number].under(prefix))
        together.wait()
        began[number] = time.monotonic()
        call(store, reports[number], evidence, 300.0)
        ended[number], calls[number] = time.monotonic(), store.calls

    with ThreadPoolExecutor(count) as threads:
        list(threads.map(rank, range(count)))
    others = calls[1:] if reports[0].rank == 0 else calls
    return {"began": min(began), "ended": max(ended), "calls": max(others, default=0), "calls of rank 0": calls[0]}


def what_ranks_say(first: int, last: int, count: int) -> tuple[Evidence, list[Report]]:
    """As long as what real ranks say: eight on every host, all settings, twenty files of source."""
    from lockstep.config.schema import RunSettings
    from lockstep.distributed.rollcall.call import report as report_of
    from lockstep.distributed.rollcall.report import Evidence
    from lockstep.distributed.topology import Place, Topology
    from lockstep.runtime.cpu import CpuRuntime

    settings = RunSettings().model_dump(mode="json", by_alias=True)
    evidence = Evidence(settings, {f"package/module_{number}.py": f"{number:016x}" for number in range(20)})
    reports = []
    for rank in range(first, last):
        place = Place(rank, rank % 8, rank // 8, f"host-{rank // 8}")
        mine = report_of(Topology(place, count, min(count, 8), port=1), CpuRuntime(), evidence)
        reports.append(replace(mine, physical_device=f"{place.host}/cuda/{place.local_rank}"))
    return evidence, reports


def growth_table(found: list[dict[str, Any]]) -> str:
    header = ["simulated ranks", "verdict everywhere", "per rank", "messages per rank", "of rank 0", "connections"]
    rows = []
    for each in found:
        if "left out" in each:
            rows.append([str(each["ranks"]), each["left out"], *["-"] * 4])
            continue
        seconds, ranks = each["seconds"], each["ranks"]
        time_cells = [f"{1e3 * seconds:.1f} ms", f"{1e3 * seconds / ranks:.2f} ms"]
        counts = [str(each["calls"]), str(each["calls of rank 0"]), str(each["connections"] or "-")]
        rows.append([str(ranks), *time_cells, *counts])
    return report.table(header, rows)


# Connections between real ranks


def counted_connections(chosen: argparse.Namespace) -> dict[str, list[list[tuple[int, int]]]]:
    """By number of ranks and whether they connect when needed: what every rank had after each of two moments."""
    found: dict[str, list[list[tuple[int, int]]]] = {}
    for processes in (2, 4) if chosen.quick else (2, 4, 8, 16):
        print(f"connections of {processes} processes", file=sys.stderr, flush=True)
        found[str(processes)] = [launched(partial(connect, lazily), processes) for lazily in (True, False)]
    return found


def connect(lazily: bool) -> tuple[int, int]:
    """One rank: its connections to others after a gathering, and after everything that a run does."""
    import torch
    import torch.distributed as dist

    from lockstep.distributed.rendezvous import join, meet
    from lockstep.distributed.topology import Topology
    from lockstep.runtime.cpu import CpuRuntime

    os.environ["TORCH_GLOO_LAZY_INIT"] = "1" if lazily else "0"
    topology = Topology.from_env(os.environ)
    _, store, _ = meet(topology, 60.0)
    group = join(topology, CpuRuntime(), store, 60.0)
    group.gather(group.rank)
    after_gather = connections_to_ranks(topology.port)
    group.barrier()
    dist.all_reduce(torch.zeros(100_000))
    group.agree("x" * 5000)
    after_all = connections_to_ranks(topology.port)
    group.barrier()
    group.leave()
    return after_gather, after_all


def connections_table(found: dict[str, list[list[tuple[int, int]]]]) -> str:
    header = ["ranks", "after a gather", "all at once", "after gradients and a long message", "all at once"]
    rows = []
    for processes, (lazy, eager) in found.items():
        moments = [max(rank[moment] for rank in ranks) for moment in (0, 1) for ranks in (lazy, eager)]
        rows.append([processes, *(str(count) if count else "-" for count in moments)])
    return report.table(header, rows)


def connections_to_ranks(store_port: int) -> int:
    """This process's connections, but for those to the store."""
    mine = set()
    with contextlib.suppress(FileNotFoundError):
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # the one that lists them is gone by now
                mine.add(str(descriptor.readlink()))
    return sum(f"socket:[{inode}]" in mine and remote != store_port for inode, remote in established())


def established() -> Iterator[tuple[str, int]]:
    """Inode and remote port of every TCP connection of this host, as Linux lists them; nothing on other systems."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[STATE] == ESTABLISHED:
                    yield fields[INODE], int(fields[REMOTE].rpartition(":")[2], 16)


if __name__ == "__main__":
    main()
