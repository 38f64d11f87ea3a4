"""XLA devices of several hosts: `launch: ssh` on real sshd servers, and the losses of the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from xla_ways import needs_torch_xla

from conftest import losses
from laptop import Laptop

pytestmark = needs_torch_xla


@pytest.mark.requirement("P13")
@pytest.mark.requirement("P01")
@pytest.mark.requirement("P07")
def test_xla_devices_of_three_hosts_agree_with_the_cpu(laptop: Laptop) -> None:
    task = {"type": "tasks.py:Tiny", "sleep": 0.0}
    ways = {"cpu": {"runtime": "cpu"}, "xla": {"runtime": "xla", "xla": {"device": "CPU"}, "strategy": "ddp"}}
    runs: dict[str, Path] = {}
    for name, way in ways.items():
        config = laptop.config(f"{name}-hosts", task=task, train={"epochs": 2, "batch_size": 12}, **way)
        finished = laptop.run("train", config, limit=300)
        assert finished.code == 0, finished.text
        (runs[name],) = laptop.runs("anna", f"{name}-hosts")
    assert losses(runs["xla"]) == pytest.approx(losses(runs["cpu"]), rel=1e-5)
    ranks = json.loads((runs["xla"] / "topology.json").read_text())["ranks"]
    assert [each["host"] for each in ranks] == ["anna", "anna", "bert", "carl"]
    assert all("xla" in each["device"] for each in ranks)
