"""What deciding together costs: each call by which ranks agree, and what a training step pays for being watched.

Two processes train a tiny network. Variants take turns, block by block, in the same processes: a slow moment of the
machine then hits all of them alike.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import report

BLOCK_SECONDS = 1.2  # at least two pulses
WARM_UP = 100  # steps
PROCESSES = 2

VARIANTS = {
    "silent": "no control sync, no heartbeat",
    "lockstep": "Lockstep",
    "asking": "Lockstep, and `run.any` in every step",
}

NOTES_CALLS = """\
Rank 0 of two processes on this host, µs per call; the smallest median of the repeats. An all-reduce of one number by
torch alone is what any of them would cost at the least. A pulse, one `run.gather`, comes every half second: its share
of the time is in the last column. Noting where a rank is happens five times a step; a heartbeat goes to the store once
a second, on a thread of its own."""

NOTES_STEPS = """\
The network of overhead.py, on two processes with one thread each, rank 0. Steps: the median over blocks of about
{seconds:g} s of their mean step, by the clock and in time of the processor that all threads of the process used, which
others on the same machine disturb less. The ratio is taken between blocks of the same round: its median, and in
brackets its quartiles. Inside the pulse: the share of the time that rank 0 spends there, waiting for the other rank
included. Without pulse and heartbeat, nobody would know where a rank is, or that another one was asked to stop."""


def main() -> None:
    parser = report.options(__doc__, repeats=3)
    parser.add_argument("--rounds", type=int, help="of all variants, per repeat (default: 5; 1 with --quick)")
    chosen = report.parse(parser)
    rounds = chosen.rounds or (1 if chosen.quick else 5)
    calls = 50 if chosen.quick else 400
    found = []
    for number in range(chosen.repeats):
        report.await_idle(chosen.patience)
        print(f"repeat {number + 1} of {chosen.repeats}", file=sys.stderr, flush=True)
        found.append(measure(calls, rounds, seed=number))
    text = "\n\n".join([calls_table(found), NOTES_CALLS, steps_table(found), NOTES_STEPS.format(seconds=BLOCK_SECONDS)])
    report.publish(text, {"found": found}, chosen.json)


def measure(calls: int, rounds: int, seed: int) -> dict[str, Any]:
    import lockstep

    order = random.Random(seed)
    blocks = [name for _ in range(rounds) for name in order.sample(list(VARIANTS), len(VARIANTS))]
    rank = partial(on_a_rank, calls, blocks)
    # Nothing but the pulse and the heartbeat is to happen now and then.
    settings: dict[str, Any] = {
        "log": {"every": "1000000 steps"},
        "watch": {"fingerprint_every": None},
        "launch": {"threads": 1},
    }
    with tempfile.TemporaryDirectory(prefix="control-") as out, report.silent_processes():
        return dict(lockstep.launch(rank, PROCESSES, runtime="cpu", out=out, **settings)[0])


# On every rank


def on_a_rank(calls: int, blocks: list[str], run: Any) -> dict[str, Any]:
    return {"calls": time_calls(run, calls), "blocks": time_steps(run, blocks)}


def time_calls(run: Any, calls: int) -> dict[str, float]:
    """Median seconds of each call."""
    import torch
    import torch.distributed as dist

    number = torch.zeros(1)
    actions: dict[str, Callable[[], Any]] = {
        "an all-reduce of one number, by torch": lambda: dist.all_reduce(number),
        "`run.agree`": lambda: run.agree(1.0),
        "`run.any`": lambda: run.any(False),
        "`run.gather`": lambda: run.gather(run.rank),
        "`run.barrier`": lambda: run.barrier(),
        "recording a position": lambda: run._engine.group.activity.enter("data", 0),
    }
    found = {}
    for name, action in actions.items():
        times = []
        for _ in range(calls + calls // 4):
            began = time.perf_counter()
            action()
            times.append(time.perf_counter() - began)
        found[name] = statistics.median(times[calls // 4 :])
    return found


def time_steps(run: Any, blocks: list[str]) -> list[tuple[str, dict[str, float]]]:
    """The mean step of each block, by the clock and in time of the processor, in the order in which they came."""
    from workload import make_data, make_model, make_optimizer

    model = make_model()
    model, optimizer = run.setup(model, make_optimizer(model))
    training = Training(run, model, optimizer, make_data())
    training.go(WARM_UP)
    # All ranks must do the same number of steps.
    steps = run.agree(lambda: max(1, round(BLOCK_SECONDS / training.step["clock"])), "how long a block is")
    found = []
    for name in blocks:
        run.barrier("the next block")
        with silence(run) if name == "silent" else timed_pulse(run) as pulses:
            training.go(steps, asking=name == "asking")
        found.append((name, {**training.step, "pulse": sum(pulses or ()) / steps}))
    return found


class Training:
    """A training loop that can be gone on with for so many steps."""

    def __init__(self, run: Any, model: Any, optimizer: Any, data: Any) -> None:
        self._run, self._model, self._optimizer, self._data = run, model, optimizer, data
        self.step: dict[str, float] = {}  # mean seconds of a step, of the last call

    def go(self, steps: int, asking: bool = False) -> None:
        from torch.nn.functional import cross_entropy
        from workload import BATCH

        run, done = self._run, 0
        clock, processor = time.perf_counter(), time.process_time()
        while done < steps:
            for inputs, targets in run.batches(self._data, BATCH * run.world_size):
                loss = cross_entropy(self._model(inputs), targets)
                run.backward(loss)
                run.step(self._optimizer)
                if asking:
                    run.any(False)
                done += 1
                if done == steps:
                    break
        clock, processor = time.perf_counter() - clock, time.process_time() - processor
        self.step = {"clock": clock / steps, "processor": processor / steps}


@contextlib.contextmanager
def silence(run: Any) -> Iterator[None]:
    """Without what makes a rank known to others."""
    from lockstep.distributed.watch.heartbeat import Heartbeat
    from lockstep.engine.control_sync import NOTHING

    control_sync, activity, send = run._engine.control_sync, run._engine.group.activity, Heartbeat._send
    control_sync.beat, activity.enter = (lambda step: NOTHING), (lambda *args, **kwargs: None)
    Heartbeat._send = lambda self: None
    try:
        yield
    finally:
        Heartbeat._send = send
        del control_sync.beat, activity.enter


@contextlib.contextmanager
def timed_pulse(run: Any) -> Iterator[list[float]]:
    """How long every look at the pulse took, waiting for the other rank included."""
    control_sync, times = run._engine.control_sync, []
    beat = control_sync.beat

    def timed(step: int) -> Any:
        began = time.perf_counter()
        asked = beat(step)
        times.append(time.perf_counter() - began)
        return asked

    control_sync.beat = timed
    try:
        yield times
    finally:
        del control_sync.beat


# Here again


def calls_table(found: list[dict[str, Any]]) -> str:
    from lockstep.engine.control_sync import SYNC_SECONDS

    rows = []
    for name in found[0]["calls"]:
        seconds = min(each["calls"][name] for each in found)
        share = f"{seconds / SYNC_SECONDS:.3%}" if name == "`run.gather`" else "-"
        rows.append([name, f"{1e6 * seconds:.1f}" if seconds < 1e-5 else f"{1e6 * seconds:.0f}", share])
    return report.table(["", "µs", "fraction of half a second"], rows)


def steps_table(found: list[dict[str, Any]]) -> str:
    rounds = [
        dict(each["blocks"][at : at + len(VARIANTS)])
        for each in found
        for at in range(0, len(each["blocks"]), len(VARIANTS))
    ]
    rows = []
    for name, label in VARIANTS.items():
        cells = []
        for what in ("clock", "processor"):
            ratios = [each[name][what] / each["silent"][what] for each in rounds]
            cells.append(f"{1e6 * statistics.median(each[name][what] for each in rounds):.0f}")
            cells.append("1.00" if name == "silent" else spread(ratios))
        inside = statistics.median(each[name]["pulse"] / each[name]["clock"] for each in rounds)
        rows.append([label, *cells, "-" if name == "silent" else f"{inside:.2%}"])
    header = ["", "µs per step", "to silence", "of the processor, µs", "to silence", "inside the sync"]
    return report.table(header, rows)


def spread(ratios: list[float]) -> str:
    if len(ratios) < 2:
        return f"{ratios[0]:.3f}"
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
