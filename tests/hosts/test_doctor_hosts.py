"""`lockstep doctor --hosts` on real sshd servers: a verdict per host, and what to do."""

from __future__ import annotations

import json
import sys

from conftest import Finished
from laptop import Laptop


def verdicts(table: Finished) -> dict[str, str]:
    """The last column, by host."""
    title, *lines = table.out.splitlines()
    at = title.index("verdict")
    return {line.split()[0]: line[at:] for line in lines[:-1]}


def test_every_host_gets_a_verdict(laptop: Laptop) -> None:
    network, config = laptop.network, laptop.config("looked-at")
    well = laptop.run("doctor", "--hosts", config)
    assert well.code == 0, well.text
    assert verdicts(well) == {"anna": "ok", "bert": "ok", "carl": "ok"}
    assert well.out.splitlines()[-1] == "all hosts can take part"

    # One whose key is not known, and one that no sshd is at; from a list, without any config.
    network.write_ssh_config(known=["anna", "carl"])
    network.hosts["carl"].stop_sshd()
    settings = ["--set", f"pod.python={sys.executable}", "--set", f"pod.directory={network.disk}"]
    try:
        ill = laptop.run("doctor", "--hosts", "anna,bert,carl", *settings)
        as_data = laptop.run("doctor", "--hosts", "anna, bert, carl", *settings, "--json")
    finally:
        network.hosts["carl"].start_sshd()
    assert ill.code == 1, ill.text
    told = verdicts(ill)
    assert told["anna"] == "ok"
    assert "its host key is not known here" in told["bert"] and "(ssh bert)" in told["bert"]
    assert "nothing listens for SSH there" in told["carl"]
    assert ill.out.splitlines()[-1] == "does not work: bert, carl"
    assert as_data.code == 1
    found = json.loads(as_data.out)
    assert found["verdict"] == "fail"
    assert {each["name"]: each["verdict"] for each in found["checks"]} == {"anna": "ok", "bert": "fail", "carl": "fail"}
    assert found["checks"][0]["data"]["address"] == network.hosts["anna"].address

    # What cannot be meant is a matter of usage.
    assert "--processes is about this machine" in refused(laptop, "--hosts", "anna", "--processes", "2")
    assert "--hosts, which is not given" in refused(laptop, "--set", "pod.python=python3")
    assert "launch: ssh needs hosts" in refused(laptop, "--hosts", ",")
    assert "not the name of a host" in refused(laptop, "--hosts", "-oProxyCommand=id")
    for host in network.hosts.values():
        assert not host.processes("lockstep")


def refused(laptop: Laptop, *arguments: str) -> str:
    finished = laptop.run("doctor", *arguments)
    assert finished.code == 2, finished.text
    assert "Traceback" not in finished.text
    return finished.text
