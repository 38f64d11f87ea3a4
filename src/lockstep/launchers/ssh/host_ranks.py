"""The ranks of one host in one attempt: started, polled and ended by what the head says."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.distributed.failure import Report, stop_file
from lockstep.distributed.store.wire import VARIABLE as SECRET
from lockstep.distributed.topology import NETWORK_STORE, Place, Topology
from lockstep.errors import LaunchError
from lockstep.launchers.local.exit import late_file
from lockstep.launchers.local.ranks import start_functions
from lockstep.launchers.local.supervisor import cannot_start
from lockstep.launchers.plan import LaunchPlan, ProcessPlan
from lockstep.launchers.ssh import network
from lockstep.launchers.ssh.order import Order, Share
from lockstep.terminal import tell


class HostRanks:
    """Processes of this host; what became of them is plain data, to be told to the head."""

    def __init__(self, order: Order, share: Share, slot: int, world: list[Share], attempt: int, threads: int) -> None:
        self._share = share
        self._folder = Path(tempfile.mkdtemp(prefix="lockstep-"))
        self._error_files = [self._folder / f"error-{index}.json" for index in range(share.count)]
        self._asked = self._dumped = False
        plan = _plan(order, share, slot, world, attempt, threads)
        try:
            self._ranks = start_functions(plan, None, None, self._error_files)
        except OSError as error:
            raise LaunchError(cannot_start(share.count, error)) from None

    def poll(self) -> dict[str, Any] | None:
        """How they ended; None while they are at work."""
        ended = self._ranks.poll()
        if ended is None:
            return None
        if ended.without_server is not None:
            report = Report(self._share.first, socket.gethostname(), "LaunchError", ended.without_server, 5, 0.0)
            return self._ended(reports=[asdict(report)], exit_codes={})
        if ended.exit_codes:
            return self._ended(exit_codes={self._share.first + at: code for at, code in ended.exit_codes.items()})
        codes = {self._share.first + at: outcome.exit_code for at, outcome in ended.returned.items()}
        return self._ended(returned=codes)

    def ask_to_stop(self) -> None:
        if not self._asked:
            self._asked = True
            self._ranks.ask_to_stop()
            stop_file(self._error_files[0]).touch()

    def ask_to_save(self) -> None:
        self._ranks.ask_to_save()

    def dump_stacks(self) -> None:
        if not self._dumped:
            self._dumped = True
            self._ranks.dump_stacks()

    def end(self) -> dict[str, Any]:
        """End them at once; what they had to say by then."""
        self._ranks.close(signal.SIGKILL)
        return self._ended(exit_codes={})

    def close(self) -> None:
        self._ranks.close(signal.SIGKILL)
        for file in map(late_file, self._error_files):
            with contextlib.suppress(FileNotFoundError):
                tell(f"lockstep: {file.read_text(encoding='utf-8')}")
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ended(self, **found: Any) -> dict[str, Any]:
        return {"reports": self._reports(), **found}

    def _reports(self) -> list[dict[str, Any]]:
        reports = []
        for file in self._error_files:
            with contextlib.suppress(FileNotFoundError, ValueError):
                reports.append(json.loads(file.read_text(encoding="utf-8")))
        return reports


def _plan(order: Order, share: Share, slot: int, world: list[Share], attempt: int, threads: int) -> LaunchPlan:
    argv = (sys.executable, "-P", "-m", "lockstep.worker", order.folder)
    shared = {"OMP_NUM_THREADS": str(threads), SECRET: order.secret}
    interface = network.interface_of(order.here.address)
    if interface is not None:  # what gloo and NCCL listen at is of the run's own network
        shared.update({"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface})
    processes = []
    for local_rank, rank in enumerate(share.ranks):
        topology = Topology(
            place=Place(rank=rank, local_rank=local_rank, host_index=slot, host=order.here.name),
            world_size=world[-1].first + world[-1].count,
            local_world_size=share.count,
            address=order.head.address,
            port=order.port,
            attempt=attempt,
            store=NETWORK_STORE,
            launched_by_us=True,
            watched=True,
            hosts=len(world),
        )
        processes.append(ProcessPlan(order.here.name, argv, {**topology.to_env(), **shared}))
    return LaunchPlan(tuple(processes), threads, order.port)
