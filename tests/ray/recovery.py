"""How long a run on a cluster takes to get over a fault, as a test saw it; and the table of docs/reliability.md."""

from __future__ import annotations

import time
from pathlib import Path

from conftest import ROOT, rank_pids, wait_until
from ray_launching import OnRay

PAGE = ROOT / "docs" / "reliability.md"
_MARK, _END = "<!-- ray -->", "<!-- end -->"
_HEADER = (
    "what was done",
    "seconds to the message",
    "seconds to the next step",
    "steps done again",
    "weights in the end",
)


class Recovery:
    """Follows a run over one fault: from the fault to its message, and to the first step of the ranks that follow."""

    def __init__(self, on_ray: OnRay, run: Path, done: str) -> None:
        self._on_ray, self._run, self._done = on_ray, run, done
        self._before = set(rank_pids(run).values())
        self._messages = self._headlines()
        self._restored = self._restores()
        self._lines = len(on_ray.seen())
        self._began = time.monotonic()
        self.message = self.step = 0.0
        self.again = 0

    def fault(self) -> None:
        """It happens now."""
        self._began = time.monotonic()
        self._lines = len(self._on_ray.seen())

    def wait(self, limit: float = 120.0) -> None:
        wait_until(lambda: self._headlines() > self._messages, limit, "the message")
        self.message = time.monotonic() - self._began
        wait_until(lambda: self._later() and self._restores() > self._restored, limit, "the next step")
        self.step = time.monotonic() - self._began
        rank_0 = [rank for pid, rank, _ in self._on_ray.seen() if pid in self._before and rank == 0]
        restored = [line for line in self._output(".stdout") if "restored step-" in line]
        first = int(restored[-2].split("step-")[1].split()[0]) if self._restored else 0
        # What rank 0 had begun, less the step that the fault interrupted, against where it went on.
        reached = first + len(rank_0) - 1
        self.again = max(reached - int(restored[-1].split("step-")[1].split()[0]), 0)

    def _headlines(self) -> int:
        return sum("restarting from the newest checkpoint" in line for line in self._output(".stderr"))

    def _restores(self) -> int:
        return sum("restored step-" in line for line in self._output(".stdout"))

    def _later(self) -> bool:
        return any(pid not in self._before for pid, _, _ in self._on_ray.seen()[self._lines :])

    def _output(self, name: str) -> list[str]:
        return (self._on_ray.folder / name).read_text().splitlines()

    def row(self, weights: str) -> tuple[str, ...]:
        return self._done, f"{self.message:.1f}", f"{self.step:.1f}", str(self.again), weights


def write(rows: list[tuple[str, ...]]) -> None:
    """Replace the rows of the table that are seen again; the prose around it stays."""
    before, rest = PAGE.read_text(encoding="utf-8").split(f"{_MARK}\n")
    inner, after = rest.split(_END, 1)
    known = {line.strip("| ").split(" | ")[0]: line for line in inner.splitlines()[2:]}
    known |= {row[0]: f"| {' | '.join(row)} |" for row in rows}
    lines = [f"| {' | '.join(_HEADER)} |", "|" + " --- |" * len(_HEADER), *known.values()]
    PAGE.write_text(before + f"{_MARK}\n" + "\n".join(lines) + f"\n{_END}{after}", encoding="utf-8")
