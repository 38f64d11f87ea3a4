"""A run in a notebook: whoever interrupts it twice gets the cell back, and keeps the kernel."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

from conftest import wait_until

CELL = """
import pathlib, time, torch, lockstep

def main(run):
    model = torch.nn.Linear(4, 1)
    model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in run.epochs(None):
        for (inputs,) in run.batches(torch.utils.data.TensorDataset(torch.ones(24, 4)), 12):
            pathlib.Path(f"stepping-{run.rank}").touch()
            while True:  # a step that never ends: the run cannot save and leave
                time.sleep(0.05)

lockstep.launch(main, processes=PROCESSES, runtime="cpu")
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_two_interrupts_end_the_cell(tmp_path: Path, processes: int) -> None:
    manager, client = start_new_kernel(cwd=str(tmp_path))
    shown: list[dict[str, Any]] = []
    try:
        client.execute("remembered = 41")
        cell = client.execute(CELL.replace("PROCESSES", str(processes)))
        wait_until((tmp_path / f"stepping-{processes - 1}").exists, what="the first step")
        manager.interrupt_kernel()
        time.sleep(1.5)
        manager.interrupt_kernel()
        answer: dict[str, Any] = {}
        while answer.get("parent_header", {}).get("msg_id") != cell:
            answer = client.get_shell_msg(timeout=30)
        assert (answer["content"]["status"], answer["content"].get("ename")) == ("error", "KeyboardInterrupt"), answer
        with suppress(Empty):
            while True:
                shown.append(client.get_iopub_msg(timeout=1))
        client.execute_interactive("print(remembered + 1)", timeout=30, output_hook=shown.append)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    text = "".join(str(each["content"].get("text", "")) for each in shown)
    assert "the run's folder is runs/main-" in text and "go on with: lockstep.launch(main, folder='runs/main-" in text
    assert text.endswith("42\n")
