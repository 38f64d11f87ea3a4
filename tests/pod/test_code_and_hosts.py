"""What is brought to hosts and how they are named: without any host."""

from __future__ import annotations

import fcntl
import io
import json
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.load import load_python
from lockstep.errors import ConfigError, LaunchError
from lockstep.launchers.ssh import code
from lockstep.launchers.ssh.commands import host_names
from lockstep.launchers.ssh.folder import Job, PodFolder
from lockstep.launchers.ssh.record import spread

TASK = Path(__file__).parents[1] / "tasks.py"


def config(**launch: Any) -> Any:
    values = {"task": f"{TASK}:Tiny", "processes": launch.pop("processes", "auto"), "launch": {"type": "ssh", **launch}}
    return load_python(values, {}, "test")


def files(folder: Path) -> dict[str, str]:
    return {str(each.relative_to(folder)): each.read_text() for each in folder.rglob("*") if each.is_file()}


def test_what_travels_and_what_does_not(tmp_path: Path) -> None:
    here, there, packed = tmp_path / "here", tmp_path / "there" / "code", tmp_path / "push.tar"
    (here / "part").mkdir(parents=True)
    (here / "task.py").write_text("1")
    (here / "part" / "a b.py").write_text("2")
    (here / "link.py").symlink_to(here / "task.py")
    (here / ".env").write_text("SECRET=1")
    (here / "runs").mkdir()
    (here / "runs" / "large").write_text("3")
    there.mkdir(parents=True)
    (there / "gone.py").write_text("4")
    assert code.pack(packed, here, "an order") == 3
    assert packed.stat().st_mode & 0o077 == 0
    assert code.unpack(packed, there) == "an order"
    assert files(there) == {"task.py": "1", "part/a b.py": "2", "link.py": "1"}
    assert code.pack(packed, None) == 0 and code.unpack(packed, there) == "" and not files(there)


def test_a_folder_with_data_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("1")
    with (tmp_path / "data.bin").open("wb") as file:
        file.truncate(code.MOST_BYTES)
    with pytest.raises(ConfigError, match="more than 512 MB"):
        code.pack(tmp_path / "push.tar", tmp_path)


@pytest.mark.parametrize("name", ["code/../../escaped", "code//absolute", "code/.."])
def test_nothing_of_an_archive_is_written_elsewhere(tmp_path: Path, name: str) -> None:
    packed = tmp_path / "push.tar"
    with tarfile.open(packed, "w") as tar:
        member = tarfile.TarInfo(name)
        member.size = 1
        tar.addfile(member, io.BytesIO(b"x"))
    with pytest.raises(LaunchError, match="did not arrive"):
        code.unpack(packed, tmp_path / "there" / "code")
    assert not list(tmp_path.rglob("escaped"))


def test_an_archive_that_arrived_in_part_is_not_taken_for_the_code(tmp_path: Path) -> None:
    here, packed, there = tmp_path / "here", tmp_path / "push.tar", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        (folder / "task.py").write_text(folder.name)
    code.pack(packed, here, "an order")
    with packed.open("r+b") as file:
        file.truncate(1024)
    with pytest.raises(LaunchError, match="did not arrive"):
        code.unpack(packed, there)
    assert files(there) == {"task.py": "there"}


def test_hosts_come_from_the_config() -> None:
    assert host_names(config(hosts=["a", "me@b"])) == ["a", "me@b"]
    with pytest.raises(ConfigError, match="launch: ssh needs hosts"):
        host_names(config())
    with pytest.raises(ConfigError, match="a is listed twice"):
        host_names(config(hosts=["a", "b", "a"]))
    with pytest.raises(ConfigError, match="processes: 1 ranks cannot be spread over 2 hosts"):
        host_names(config(hosts=["a", "b"], processes=1))
    with pytest.raises(ConfigError, match=r"launch\.hosts\[0\]: not the name of a host.*got '\$\(id\)'"):
        config(hosts=["$(id)"])


def test_ranks_are_spread_over_the_hosts() -> None:
    assert spread(5, [1, 1]) == [(0, 3), (3, 2)]
    assert spread("auto", [4, 2]) == [(0, 4), (4, 2)]


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


def test_whoever_looks_whether_an_agent_is_alive_does_not_keep_it_from_its_job(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with (tmp_path / "agent.lock").open("w") as looked_at:
        fcntl.flock(looked_at, fcntl.LOCK_SH)  # as is_alive has it for a moment
        assert not job.is_alive
        threading.Timer(0.1, fcntl.flock, (looked_at, fcntl.LOCK_UN)).start()
        job.hold()
    assert job.is_alive
