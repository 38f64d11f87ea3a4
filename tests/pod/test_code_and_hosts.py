"""What is brought to hosts and how they are named: without any host."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.load import load_python
from lockstep.errors import ConfigError, LaunchError
from lockstep.launchers.ssh import code
from lockstep.launchers.ssh.code import digests
from lockstep.launchers.ssh.commands import host_names
from lockstep.launchers.ssh.folder import Job, PodFolder
from lockstep.launchers.ssh.record import Host, Order
from lockstep.launchers.ssh.record import spread as spread_ranks

TASK = Path(__file__).parents[1] / "tasks.py"


def config(**launch: Any) -> Any:
    values = {"task": f"{TASK}:Tiny", "processes": launch.pop("processes", "auto"), "launch": {"type": "ssh", **launch}}
    return load_python(values, {}, "test")


def test_only_what_changed_travels_and_what_is_gone_goes(tmp_path: Path) -> None:
    here, there, packed = tmp_path / "here", tmp_path / "there", tmp_path / "push.tar"
    (here / "part").mkdir(parents=True)
    (here / "task.py").write_text("1")
    (here / "part" / "a b.py").write_text("2")
    (here / ".env").write_text("SECRET=1")
    (here / "runs").mkdir()
    (here / "runs" / "large").write_text("3")
    wanted = digests(here)
    assert set(wanted) == {"task.py", "part/a b.py"}
    assert code.pack(packed, here, wanted, {}, "an order") == ["part/a b.py", "task.py"]
    assert packed.stat().st_mode & 0o077 == 0
    assert code.unpack(packed, there) == "an order"
    assert digests(there, only_travelling=False) == wanted
    (here / "task.py").write_text("changed")
    (here / "part" / "a b.py").unlink()
    wanted = digests(here)
    assert code.pack(packed, here, wanted, digests(there, only_travelling=False)) == ["task.py"]
    code.unpack(packed, there)
    assert digests(there, only_travelling=False) == wanted


@pytest.mark.parametrize("name", ["code/../../escaped", "code//absolute", "code/.."])
def test_nothing_of_an_archive_is_written_elsewhere(tmp_path: Path, name: str) -> None:
    packed = tmp_path / "push.tar"
    with tarfile.open(packed, "w") as tar:
        member = tarfile.TarInfo(name)
        member.size = 1
        tar.addfile(member, io.BytesIO(b"x"))
    with pytest.raises(LaunchError, match="leads out of the folder"):
        code.unpack(packed, tmp_path / "there" / "code")
    assert not list(tmp_path.rglob("escaped"))


def test_an_archive_that_arrived_in_part_is_not_taken_for_the_code(tmp_path: Path) -> None:
    here, packed = tmp_path / "here", tmp_path / "push.tar"
    here.mkdir()
    (here / "task.py").write_text("1")
    code.pack(packed, here, {**digests(here), "lost.py": "0" * 64}, {"lost.py": "0" * 64})
    with pytest.raises(LaunchError, match=r"1 files are not what was pushed \(lost.py\)"):
        code.unpack(packed, tmp_path / "there")


def test_hosts_come_from_the_config_or_a_file(tmp_path: Path) -> None:
    assert host_names(config(hosts=["a", "me@b"])) == ["a", "me@b"]
    file = tmp_path / "hosts"
    file.write_text("# ours\na  # the first\n\n10.0.0.2\n")
    assert host_names(config(hosts_file=str(file))) == ["a", "10.0.0.2"]
    file.write_text("a\n-oProxyCommand=x\n")
    with pytest.raises(ConfigError, match=r"hosts:2: not the name of a host.*got '-oProxyCommand=x'"):
        host_names(config(hosts_file=str(file)))
    with pytest.raises(ConfigError, match="cannot be read"):
        host_names(config(hosts_file=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="launch: ssh needs hosts"):
        host_names(config())
    with pytest.raises(ConfigError, match="a is listed twice"):
        host_names(config(hosts=["a", "b", "a"]))
    with pytest.raises(ConfigError, match=r"launch\.hosts\[0\]: not the name of a host.*got '\$\(id\)'"):
        config(hosts=["$(id)"])


def order(processes: int | str, *of_hosts: int) -> Order:
    listed = tuple(Host(name=f"h{i}", address=f"10.0.0.{i}", processes=count) for i, count in enumerate(of_hosts))
    settings = {"task": f"{TASK}:Tiny", "processes": processes}
    return Order(pod="p", job="j", index=0, hosts=listed, nodes=2, port=1, secret="s", config=settings, folder="/f")


def test_ranks_are_spread_over_the_hosts_that_train() -> None:
    def spread(*given: Any) -> list[tuple[int, int, int]]:
        return [(each.host, each.first, each.count) for each in spread_ranks(*given)]

    assert spread(order(5, 1, 1, 1), [0, 1]) == [(0, 0, 3), (1, 3, 2)]
    assert spread(order(5, 1, 1, 1), [0, 2]) == [(0, 0, 3), (2, 3, 2)]
    assert spread(order("auto", 4, 2, 1), [0, 1]) == [(0, 0, 4), (1, 4, 2)]


def test_an_agent_is_alive_as_long_as_it_holds_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = PodFolder(".lockstep", "p")
    folder.make()
    assert folder.path == tmp_path / ".lockstep" / "p"
    assert folder.path.stat().st_mode & 0o077 == 0
    assert folder.newest_job() is None
    job = folder.job("20260101-000000-ab")
    job.path.mkdir()
    assert not job.is_alive
    (job.path / "agent.json").write_text(json.dumps({"pid": 1}))
    assert job.pid() is None
    job.hold()
    assert job.is_alive
    with pytest.raises(LaunchError, match="another agent is at work"):
        Job(job.path).hold()
    with pytest.raises(ConfigError, match="the name of a pod"):
        PodFolder(".lockstep", "../p")
