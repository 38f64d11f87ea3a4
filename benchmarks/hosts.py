"""Several hosts: how long a start takes, on hosts made of network namespaces.

Four ranks on three hosts, reached by real sshd servers: `launch: ssh` beside torchrun by hand over ssh. Needs root.
"""

from __future__ import annotations

import itertools
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import report
import yaml

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))
from host_network import Network, why_not  # noqa: E402  the hosts of the tests

RANKS = {"anna": 2, "bert": 1, "carl": 1}
LIMIT = 120.0

STARTS = {"torchrun": "`torchrun`, by hand over ssh", "lockstep": "`lockstep train` with `launch: ssh`"}

NOTES = """\
Three hosts, and a client, that are network namespaces of this machine with an sshd each. First step: from the command
to the end of the first optimizer step on rank 0, of four ranks (2, 1 and 1), with CPU, gloo and one thread each; both
train the network and data of benchmarks/workload.py. torchrun gets its three commands at once, by three ssh, with the
address, the port and the script that it needs on the hosts already; Lockstep's side looks at the hosts, brings the
code there, starts agents, holds the roll call, and ends with a checkpoint. Medians, with the slowest in brackets."""


class Bench:
    """The hosts, the client and a folder of its own."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self.folder = network, folder
        self._numbers = itertools.count()
        folders = {"XDG_STATE_HOME": str(folder / "state"), "XDG_CACHE_HOME": str(folder / "cache")}
        self._env = {**os.environ, **folders, "OMP_NUM_THREADS": "1"}
        self._env.pop("PYTHONDONTWRITEBYTECODE", None)  # what is installed has its bytecode, on the hosts and here

    def fresh(self) -> Path:
        made = self.folder / f"case-{next(self._numbers)}"
        made.mkdir()
        return made

    def config(self, folder: Path, **values: Any) -> Path:
        """Of a run on the three hosts; its pod has the name of the folder."""
        config = {
            "name": folder.name,
            "task": {"type": f"{HERE / 'startup_task.py'}:Stamped", "file": str(folder / "stamp")},
            "runtime": "cpu",
            "processes": sum(RANKS.values()),
            "train": {"steps": 1, "batch_size": 128},
            "checkpoint": {"every": None},
            "launch": {"type": "ssh", "hosts": list(RANKS), "threads": 1},
            "pod": {"python": sys.executable, "directory": str(self.network.disk)},
        }
        file = folder / "config.yaml"
        file.write_text(yaml.safe_dump({**config, **values}), encoding="utf-8")
        return file

    @contextmanager
    def started(self, *argv: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        """A command of the client, and the file that its output goes to."""
        said = self.fresh() / "output"
        with said.open("wb") as out:
            process = subprocess.Popen(
                self.network.client.enter(*argv), stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=self._env
            )
        try:
            yield process, said
        finally:
            process.kill()
            process.wait(10)

    def run(self, *argv: str) -> None:
        with self.started(*argv) as (process, said):
            limit = threading.Timer(LIMIT, process.kill)  # a wait with a limit looks only every 50 ms
            limit.start()
            code = process.wait()
            limit.cancel()
            if code:
                raise report.MeasurementFailed(f"{shlex.join(argv)}\n{said.read_text()[-6000:]}\nexit code {code}")

    def lockstep(self, *argv: str | Path) -> None:
        self.run(*report.lockstep(), *map(str, argv))


def start(bench: Bench, name: str) -> tuple[float, float]:
    """Seconds to the first step and to the end of the command."""
    folder = bench.fresh()
    config, stamp = bench.config(folder), folder / "stamp"
    began = time.time()
    if name == "lockstep":
        bench.lockstep("train", config)
    else:
        bench.run("sh", "-c", by_hand(bench.network, stamp))
    return float(stamp.read_text(encoding="ascii")) - began, time.time() - began


def by_hand(network: Network, stamp: Path) -> str:
    """What one would type: torchrun on every host, in the background, and wait for all of them."""
    address, lines = network.hosts["anna"].address, []
    for number, (host, ranks) in enumerate(RANKS.items()):
        torchrun = [
            sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(RANKS)}", f"--node_rank={number}",
            f"--nproc_per_node={ranks}", f"--master_addr={address}", "--master_port=29600",
            str(HERE / "startup_plain.py"), str(stamp),
        ]  # fmt: skip
        there = f"OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=eth0 {shlex.join(torchrun)}"
        lines.append(f"{shlex.join(['ssh', host, there])} &")
    return "\n".join([*lines, "wait"])


def shown(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} s ({max(values):.2f})"


def tables(found: dict[str, list[Any]]) -> str:
    """One of each kind that something was measured of."""
    first = {name: [each for each, _ in found[name]] for name in STARTS if name in found}
    starts = [
        [STARTS[name], shown(values), ratio(values, first.get("torchrun")), shown([end for _, end in found[name]])]
        for name, values in first.items()
    ]
    return report.table(["three hosts, four ranks", "first step", "to torchrun", "end of the command"], starts)


def ratio(values: list[float], reference: list[float] | None) -> str:
    return f"{statistics.median(values) / statistics.median(reference):.2f}" if reference else "-"


def main() -> None:
    parser = report.options(__doc__, repeats=5)
    cases = list(STARTS)
    parser.add_argument("--only", nargs="+", choices=cases, default=cases, help="leave the others out")
    chosen = report.parse(parser)
    reason = why_not()
    if reason is not None:
        print(f"nothing was measured: {reason}", file=sys.stderr)
        return
    found: dict[str, list[Any]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        network = Network(Path(folder) / "network")
        try:
            network.add(*RANKS)
            network.client  # noqa: B018  made where it is first asked for
            bench = Bench(network, Path(folder))
            for case in report.interleaved(chosen.only, chosen):
                network.restore()
                found[case].append(start(bench, case))
        finally:
            network.close()
    busy = f"load average over five minutes at the end: {os.getloadavg()[1]:.1f}"
    report.publish(f"{tables(found)}\n\n{NOTES}\n\n{busy}", {"found": found, "load": os.getloadavg()}, chosen.json)


if __name__ == "__main__":
    main()
