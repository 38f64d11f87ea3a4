"""`lockstep verify` of a config that names hosts: the run over them is compared like any other."""

from __future__ import annotations

import json

import pytest

from laptop import Laptop


@pytest.mark.long
def test_a_run_over_hosts_agrees_with_one_process(laptop: Laptop) -> None:
    config = laptop.config("compared", task={"type": "tasks.py:Tiny"})
    finished = laptop.run("verify", config, "--steps", "3", "--require", "cpu-hosts", "--only", "cpu-hosts", "--json")
    assert finished.code == 0, finished.text
    single, hosts = json.loads(finished.out[finished.out.index("{") :])["combinations"]
    assert (single["name"], hosts["name"]) == ("cpu-single", "cpu-hosts")
    assert hosts["verdict"] == "agrees" and sorted(hosts["losses"]) == ["1", "2", "3"]
    # A checkpoint of theirs is good for one process; none is brought to them.
    assert single["resumed"]["resumed_from"] == "cpu-hosts" and single["resumed"]["verdict"] == "agrees"
    assert hosts["resumed"] is None
    # Nothing is left of it: neither there nor here.
    for host in laptop.network.hosts.values():
        assert not list(host.disk.glob("verify-*")) and not host.processes("lockstep")
    assert not list((laptop.folder / "state").rglob("*.json"))


@pytest.mark.long
def test_hosts_that_cannot_take_part_are_told_in_their_row(laptop: Laptop) -> None:
    laptop.network.write_ssh_config(known=["anna", "bert"])
    config = laptop.config("half-known", task={"type": "tasks.py:Tiny"})
    finished = laptop.run("verify", config, "--steps", "2", "--only", "cpu-hosts", "--out", "kept")
    assert finished.code == 1, finished.text
    assert "cpu-hosts failed: not all hosts can take part; log: " in finished.text
    assert "its host key is not known here" in (laptop.folder / "kept" / "cpu-hosts" / "output.log").read_text()
