"""Which hosts a config names: in a list or a file, each of them once, and enough of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.config.schema import RunConfig
from lockstep.errors import ConfigError
from lockstep.launchers.ssh.commands import host_names


def named(processes: int | str = "auto", **launch: Any) -> list[str]:
    settings = {"type": "ssh", **launch}
    return host_names(RunConfig.model_validate({"task": "a:B", "processes": processes, "launch": settings}))


def test_a_list_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# the new ones\nanna\n\n  me@bert.example  # has the most memory\n10.0.0.3\n")
    assert named(hosts_file=str(file)) == ["anna", "me@bert.example", "10.0.0.3"]
    assert named(hosts=["carl", "anna"]) == ["carl", "anna"]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "name them in launch.hosts, or in a file"),
        ({"hosts": ["anna", "bert", "anna"]}, "launch.hosts: anna is listed twice"),
        ({"hosts": ["anna"], "nodes": 2}, "launch.nodes: 2 hosts are to train, but launch.hosts has 1"),
        ({"hosts": ["anna", "bert"], "processes": 1}, "processes: 1 ranks cannot be spread over 2 hosts"),
        ({"hosts_file": "nowhere"}, "launch.hosts_file nowhere: cannot be read"),
    ],
)
def test_what_cannot_be_is_told_before_anybody_is_reached(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        named(**settings)


def test_a_spare_needs_no_rank() -> None:
    assert named(processes=2, hosts=["anna", "bert", "carl"], nodes=2) == ["anna", "bert", "carl"]


def test_a_line_that_names_no_host_is_told_with_its_number(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("anna\nbert carl\n")
    with pytest.raises(ConfigError, match=r"hosts:2: not the name of a host.*got 'bert carl'"):
        named(hosts_file=str(file))
