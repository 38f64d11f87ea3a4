"""What every `--dry-run` over SSH prints: exactly the commands, quoted, ready to paste. Nothing is reached for it.

`LOCKSTEP_GOLDEN=write pytest tests/pod/test_dry_run.py` writes the golden files anew; look at the difference.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from lockstep.cli.commands import main
from lockstep.config.load import load
from lockstep.launchers.ssh import record as records

GOLDEN = Path(__file__).parent / "golden"
HOSTS = ["anna", "bert", "me@carl"]
AWKWARD = [
    "two  words", "", "it's", '"quoted"', "$(touch pwned)", "`id`", "$HOME", "a\nb", "*", "~", "-x", "--worker=0",
    "a;b", "|", ">file", "\\", "ünïcödé", "!x", "{a,b}", "#no comment",
]  # fmt: skip
# As OpenSSH's client and server do it: what follows the host is one string, for the shell at the other end.
STAND_IN = """#!{python}
import json, os, sys
with open({calls!r}, "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
os.execvp("sh", ["sh", "-c", sys.argv[-1]])
"""
COMMANDS = {
    "train": ["train", "demo.yaml"],
    "create": ["pod", "create", "demo", "--config", "demo.yaml"],
    "push": ["pod", "push", "demo", "--config", "demo.yaml"],
    "run": ["pod", "run", "demo", "--out", "/shared/runs"],
    "logs": ["pod", "logs", "demo"],
    "logs-follow": ["pod", "logs", "demo", "--follow", "--worker", "1"],
    "exec": ["pod", "exec", "demo", "--", "df", "-h", "/my disk"],
    "exec-worker": ["pod", "exec", "demo", "--worker", "2", "--", "nvidia-smi"],
    "ps": ["pod", "ps", "demo"],
    "stop": ["pod", "stop", "demo"],
    "stop-now": ["pod", "stop", "demo", "--now"],
    "resume": ["pod", "resume", "demo", "--set", "launch.max_restarts=3"],
    "pull": ["pod", "pull", "demo"],
    "delete": ["pod", "delete", "demo"],
}


class Desk:
    """A folder with a config, a pod that is remembered, and an `ssh` that notes its calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = folder / "calls"
        ssh = folder / "bin" / "ssh"
        ssh.parent.mkdir()
        ssh.write_text(STAND_IN.format(python=sys.executable, calls=str(self.calls)))
        ssh.chmod(0o755)
        (folder / "task.py").write_text("class MyTask: pass\n")
        config = {
            "task": "task.py:MyTask",
            "processes": 4,
            "launch": {"type": "ssh", "hosts": HOSTS},
            "pod": {"python": "~/train/bin/python", "env": ["DEMO_TOKEN"]},
        }
        (folder / "demo.yaml").write_text(yaml.safe_dump(config))

    def remember(self) -> None:
        loaded = load(self.folder / "demo.yaml").model_copy(update={"name": "demo"})
        made = records.Record(
            name="demo", config=records.plain(loaded), job="20261116-031500-abc123",
            folder="/home/me/.lockstep/demo/runs/demo-20261116-031500",
        )  # fmt: skip
        records.write(made)

    def said(self, *arguments: str) -> str:
        """By a command, without the YAML that comes first, and with the folder and the config by their names."""
        done = CliRunner().invoke(main, [*arguments[:2], "--dry-run", *arguments[2:]], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        text = done.stdout[done.stdout.index("# ") :] if arguments[0] == "train" else done.stdout
        return with_configs_named(text).replace(str(self.folder), "FOLDER")


def with_configs_named(text: str) -> str:
    """A config grows with every key that there is: its place is what counts here."""
    while (at := text.find('"config": {')) >= 0:
        start = at + len('"config": ')
        config, end = json.JSONDecoder().raw_decode(text, start)
        assert config.keys() == {"runtime", "devices", "strategy", "xla"}, "what is about devices, and nothing else"
        text = f"{text[:start]}CONFIG{text[end:]}"
    return text


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    made = Desk(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("DEMO_TOKEN", "not-to-be-seen")
    made.remember()
    return made


@pytest.mark.requirement("P11")
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_printed_as_it_would_be_run(desk: Desk, name: str) -> None:
    text, golden = desk.said(*COMMANDS[name]), GOLDEN / f"ssh-{name}.txt"
    if os.environ.get("LOCKSTEP_GOLDEN") == "write":
        golden.write_text(text)
    assert text == golden.read_text()
    assert not desk.calls.exists(), "a dry run has called ssh"
    assert "not-to-be-seen" not in text
    for line in text.splitlines():
        if not line.startswith("#"):
            assert subprocess.run(["sh", "-n", "-c", line]).returncode == 0
            assert shlex.split(line)[:2] == ["ssh", "-T"]


@pytest.mark.requirement("P11")
def test_a_line_that_is_pasted_brings_every_argument_as_it_is(desk: Desk) -> None:
    program = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.argv[1:]))"]
    done = CliRunner().invoke(main, ["pod", "exec", "demo", "--worker", "1", "--dry-run", "--", *program, *AWKWARD])
    assert done.exit_code == 0, done.output
    pasted = subprocess.run(["sh", "-c", done.stdout], cwd=desk.folder, capture_output=True, text=True)
    assert json.loads(pasted.stdout) == AWKWARD, pasted.stderr
    (arguments,) = map(json.loads, desk.calls.read_text().splitlines())
    assert arguments[-3:-1] == ["--", "bert"]
    options = [value for flag, value in itertools.pairwise(arguments) if flag == "-o"]
    assert {"StrictHostKeyChecking=yes", "BatchMode=yes", "ForwardAgent=no"} <= set(options)
    assert not (desk.folder / "pwned").exists() and not (desk.folder / "file").exists()
