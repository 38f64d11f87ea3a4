"""A task as a program, with the options and the lines of PyTorch/XLA's own example programs.

PJRT_DEVICE in the environment puts it on XLA devices; without it, it runs on GPUs where there are any, else on the CPU.
"""

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

import lockstep

PROCESSES_ON_A_CPU = 2


def options(description: str, *, batch_size: int, examples: int, lr: float) -> argparse.ArgumentParser:
    """The options that the programs share, with the defaults of one of them."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--ddp", action="store_true", help="one process per device")
    parser.add_argument(
        "--processes", type=positive, help=f"how many with --ddp; all chips or GPUs, {PROCESSES_ON_A_CPU} on a CPU"
    )
    parser.add_argument("--num_epochs", type=positive, default=1)
    parser.add_argument("--batch_size", type=positive, default=batch_size, help="over all devices together")
    parser.add_argument("--examples", type=positive, default=examples, help="how many to make up for --fake_data")
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument("--log_steps", type=positive, default=20, help="a line every so many steps")
    parser.add_argument("--out", default="runs", help="where the run's folder is made")
    return parser


def positive(text: str) -> int:
    """A type for argparse, which shows the value and the reason."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, got {text!r}")
    return int(text)


def run_program(task: lockstep.Task, chosen: argparse.Namespace) -> None:
    """Train and test the task, on all processes that it takes."""
    if chosen.processes is not None and not chosen.ddp:
        fail("--processes is for --ddp: without it there is one device, or all that the host has", 2)
    if chosen.fake_data and chosen.examples < chosen.batch_size:
        fail(f"--examples {chosen.examples} does not fill one batch of --batch_size {chosen.batch_size}", 2)
    settings: dict[str, Any] = {
        "name": Path(sys.argv[0]).stem,
        "out": chosen.out,
        "seed": 1,
        "log": {"every": "1 epoch"},
    }
    if chosen.ddp:
        settings |= {"strategy": "ddp", "processes": chosen.processes or processes_for_ddp(os.environ)}
        # As PyTorch/XLA's programs are started for DDP: MASTER_ADDR=localhost MASTER_PORT=6000 python mnist.py --ddp
        if os.environ.get("MASTER_PORT", "").isdecimal():
            settings["launch"] = {"port": int(os.environ["MASTER_PORT"])}
    try:
        lockstep.launch(functools.partial(train_and_test, task, chosen), **settings)
    except lockstep.LockstepError as error:
        fail(str(error), error.exit_code)


def processes_for_ddp(env: Mapping[str, str]) -> int | str:
    """One process per chip or GPU, which Lockstep counts; a CPU can be shared by as many as one likes."""
    device = env.get("PJRT_DEVICE") or ("CUDA" if torch.cuda.is_available() else "CPU")
    return PROCESSES_ON_A_CPU if device.upper() == "CPU" else "auto"


def train_and_test(task: lockstep.Task, chosen: argparse.Namespace, run: lockstep.Run) -> float:
    """What every process does; the best accuracy, in percent."""
    train, test = task.train_data(), task.val_data()
    assert test is not None
    model = task.model()
    model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), lr=chosen.lr, momentum=0.9))
    rate, best = Rate(), 0.0
    for epoch in run.epochs(chosen.num_epochs):
        main_print(run, f"Epoch {epoch + 1} train begin {now()}")
        # Without the short batch at the end of an epoch: batch norm would take it for as good as a whole one.
        for batch in run.batches(train, chosen.batch_size, drop_last=True):
            step = run.progress.batch
            loss = task.loss(model, batch)
            run.backward(loss)
            run.step(optimizer)
            rate.add(chosen.batch_size)
            if step % chosen.log_steps == 0:
                print_update(run, epoch + 1, step, mean_over_ranks(run, loss), rate)
        main_print(run, f"Epoch {epoch + 1} train end {now()}")
        measured = run.evaluate(
            lambda batch: task.evaluate_step(run.module, batch), test, chosen.batch_size, name="test"
        )
        accuracy = 100 * measured["accuracy"]
        best = max(best, accuracy)
        main_print(run, f"Epoch {epoch + 1} test end {now()}, Accuracy={accuracy:.2f}")
    main_print(run, f"Max Accuracy: {best:.2f}%")
    return best


def mean_over_ranks(run: lockstep.Run, loss: Tensor) -> float:
    """The loss of the whole batch (where it divides by the ranks), so that all of them print the same.

    To be called after the step: an XLA device has computed the loss there, and reading it compiles nothing. Not at
    every step, since reading waits for the device.
    """
    return statistics.fmean(run.gather(loss.item(), "the loss"))


class Rate:
    """Examples per second, since the last time somebody asked and since the start."""

    def __init__(self) -> None:
        self._start = self._asked = time.monotonic()
        self._total = self._since_asked = 0

    def add(self, examples: int) -> None:
        self._total += examples
        self._since_asked += examples

    def take(self) -> tuple[float, float]:
        clock = time.monotonic()
        rates = self._since_asked / (clock - self._asked), self._total / (clock - self._start)
        self._asked, self._since_asked = clock, 0
        return rates


def print_update(run: lockstep.Run, epoch: int, step: int, loss: float, rate: Rate) -> None:
    recent, overall = rate.take()
    print(
        f"| Training Device={run.device}/{run.rank} Epoch={epoch} Step={step} Loss={loss:.5f} Rate={recent:.2f} "
        f"GlobalRate={overall:.2f} Time={now()}",
        flush=True,
    )


def main_print(run: lockstep.Run, text: str) -> None:
    if run.is_main:
        print(text, flush=True)


def now() -> str:
    return time.strftime("%H:%M:%S")


def fail(message: str, exit_code: int) -> NoReturn:
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(exit_code)
