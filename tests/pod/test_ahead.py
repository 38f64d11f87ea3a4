"""A push asks its hosts while it still reads the config: by what it asked the last time, and never in place of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from lockstep.cli.commands import main
from lockstep.launchers.ssh.record import cache_of

# As OpenSSH's client and server do it: what follows the host is one string, for the shell at the other end.
STAND_IN = """#!{python}
import json, os, sys
with open({calls!r}, "a") as file:
    file.write(json.dumps(sys.argv[-2:]) + "\\n")
os.execvp("sh", ["sh", "-c", sys.argv[-1]])
"""


class Desk:
    """A machine with an `ssh` that stays on it: every host is this one, so there is one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._calls = folder, folder / "calls"
        ssh = folder / "bin" / "ssh"
        ssh.parent.mkdir()
        ssh.write_text(STAND_IN.format(python=sys.executable, calls=str(self._calls)))
        ssh.chmod(0o755)
        code = folder / "code"
        code.mkdir()
        (code / "task.py").write_text("class MyTask: pass\n")
        self.config = code / "demo.yaml"
        self.name_host("anna")

    def name_host(self, host: str) -> None:
        config = {
            "task": "task.py:MyTask",
            "launch": {"type": "ssh", "hosts": [host]},
            "pod": {"python": sys.executable, "directory": str(self.folder / "there")},
        }
        self.config.write_text(yaml.safe_dump(config))

    def push(self) -> tuple[Result, list[str]]:
        """And which hosts were asked what."""
        self._calls.write_text("")
        done = CliRunner().invoke(main, ["pod", "push", "demo", "--config", str(self.config)])
        calls = [json.loads(line) for line in self._calls.read_text().splitlines()]
        return done, [f"{host} {'inspect' if 'host inspect' in command else 'other'}" for host, command in calls]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    made = Desk(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return made


def test_a_second_push_asks_once_and_before_it_knows_the_config(desk: Desk) -> None:
    first, asked = desk.push()
    assert first.exit_code == 0 and "2 files on 1 hosts; 2 of them were new" in first.output, first.output
    assert asked == ["anna inspect", "anna other", "anna other"]
    assert (cache_of("demo") / "asked.json").stat().st_mode & 0o077 == 0
    second, asked = desk.push()
    assert "; 0 of them were new" in second.output, second.output
    assert asked == ["anna inspect"]
    desk.config.write_text("task: [")
    wrong, asked = desk.push()
    assert wrong.exit_code == 2 and "demo.yaml" in wrong.output
    assert asked in (["anna inspect"], [])  # ended at once where it had not come that far


def test_what_was_asked_of_others_is_dropped(desk: Desk) -> None:
    assert desk.push()[0].exit_code == 0
    desk.name_host("bert")
    pushed, asked = desk.push()
    assert pushed.exit_code == 0 and "; 1 of them were new" in pushed.output, pushed.output  # the config itself
    assert asked.count("bert inspect") == 1 and asked.count("bert other") == 2 and "anna other" not in asked
    (cache_of("demo") / "asked.json").write_text('{"hosts": 5}')
    assert "; 0 of them were new" in desk.push()[0].output
