"""The end of a rank is that of any Python process: its threads, its atexit handlers, what it had not written yet."""

from __future__ import annotations

import signal
from pathlib import Path

from conftest import Project, summary, wait_until

# What a logger or a tracker leaves to the end of the process, one file per rank and way.
HABITS = """
import atexit, logging, logging.handlers, os, pathlib, socket, sys, tempfile, threading, time

def leave_things_to_the_end(rank):
    out = pathlib.Path("left")
    out.mkdir(exist_ok=True)

    def handler():
        # Its own module, the network and the terminal are still there.
        assert sys.modules[leave_things_to_the_end.__module__].HABIT == "yes"
        with socket.create_server(("127.0.0.1", 0)) as open, socket.create_connection(open.getsockname(), timeout=5):
            print(f"rank {rank} says goodbye")
        (out / f"handler-{rank}").write_text("done" if (out / f"thread-{rank}").exists() else "before the thread")

    def thread():
        time.sleep(0.3)
        (out / f"thread-{rank}").write_text("done")

    atexit.register(handler)
    threading.Thread(target=thread).start()
    memory = logging.handlers.MemoryHandler(1000, target=logging.FileHandler(out / f"log-{rank}"))
    logging.getLogger("kept").addHandler(memory)
    logging.getLogger("kept").warning("done")
    global unfinished, temporary
    unfinished = (out / f"file-{rank}").open("w")
    unfinished.write("done")
    temporary = tempfile.TemporaryDirectory(dir=out, suffix=f"-{rank}")

HABIT = "yes"
"""
EXPECTED = ("file", "handler", "log", "thread")

LAUNCHED = """
import lockstep

def main(run):
    leave_things_to_the_end(run.rank)
    return run.rank

if __name__ == "__main__":
    print(lockstep.launch(main, processes=2, runtime="cpu"))
"""

TASK = """
import torch
import lockstep
from torch.utils.data import TensorDataset

class Mine(lockstep.Task):
    def __init__(self, sleep=0.0):
        leave_things_to_the_end(int(os.environ["RANK"]))
        self.sleep = sleep

    def model(self):
        return torch.nn.Linear(4, 1)

    def train_data(self):
        return TensorDataset(torch.randn(24, 4))

    def loss(self, model, batch):
        time.sleep(self.sleep)
        return model(batch[0]).square().mean()
"""


def left(project: Project) -> dict[str, str]:
    """What lies there, by name; a temporary folder should not."""
    entries = (project.folder / "left").iterdir()
    return {each.name: each.read_text().strip() if each.is_file() else "a folder" for each in entries}


def of_ranks(*ranks: int) -> dict[str, str]:
    return {f"{what}-{rank}": "done" for what in EXPECTED for rank in ranks}


def test_a_function_that_was_launched(project: Project) -> None:
    (project.folder / "habits.py").write_text(HABITS)
    (project.folder / "script.py").write_text("from habits import *\n" + LAUNCHED)
    finished = project.start_python("script.py").wait()
    assert finished.code == 0, finished.text
    assert "[0, 1]" in finished.out
    assert left(project) == of_ranks(0, 1)


def test_a_task_that_is_trained_and_one_that_is_preempted(project: Project) -> None:
    (project.folder / "mine.py").write_text(HABITS + TASK)
    config = project.config(task={"type": "mine.py:Mine"}, data={}, train={"epochs": 1, "batch_size": 12})
    finished = project.run("train", config)
    assert finished.code == 0, finished.text
    assert left(project) == of_ranks(0, 1)

    for file in (project.folder / "left").iterdir():
        file.unlink()
    command = project.start("train", config, "--out", "more", "--set", "task.sleep=0.1", "--set", "train.epochs=500")
    run = Path(wait_until(lambda: list(project.folder.glob("more/*/metrics.jsonl")), what="the first step")[0]).parent
    command.process.send_signal(signal.SIGTERM)
    finished = command.wait()
    assert finished.code == 75, finished.text
    assert summary(run)["status"] == "preempted"
    assert left(project) == of_ranks(0, 1)


HANGS = """
import atexit, os, pathlib, sys, time
import lockstep, lockstep.launchers.local.child
lockstep.launchers.local.child.LEAVE_SECONDS = 2.0

def hangs():
    while True:
        time.sleep(0.1)

def main(run):
    if run.rank == 1:
        atexit.register(hangs)
    atexit.register(lambda: pathlib.Path(f"handler-{run.rank}").touch())
    if sys.argv[1] == "fail":
        raise ValueError("the cause")

if __name__ == "__main__":
    lockstep.launch(main, processes=2, runtime="cpu")
"""


def test_a_handler_that_hangs_holds_nothing_up_and_changes_no_exit_code(project: Project) -> None:
    (project.folder / "script.py").write_text(HANGS)
    for how, expected in (("end", 0), ("fail", 1)):
        finished = project.start_python("script.py", how).wait()
        assert finished.code == expected, finished.text
        assert "rank 1 was still at script.py:" in finished.err and "2 s after the end of its work" in finished.err
        assert "rank 0 was" not in finished.err
    assert all((project.folder / f"handler-{rank}").exists() for rank in (0, 1))


SLOW_CONSEQUENCE = """
import atexit, pathlib, time
import lockstep

def uploads():
    time.sleep(7)
    pathlib.Path("uploaded").touch()

def main(run):
    run.barrier("together")
    if run.rank == 0:
        atexit.register(uploads)
        run.barrier("never")
    raise ValueError("the cause")

if __name__ == "__main__":
    lockstep.launch(main, processes=2, runtime="cpu")
"""


def test_a_rank_that_falls_with_another_gets_the_time_for_its_handlers(project: Project) -> None:
    """The one with the tracker is seldom the one that failed."""
    (project.folder / "script.py").write_text(SLOW_CONSEQUENCE)
    finished = project.start_python("script.py").wait()
    assert finished.code == 1 and "ValueError: the cause" in finished.err, finished.text
    assert (project.folder / "uploaded").exists()
