"""Bad input and a machine that refuses: a message and exit code 2, at once, and never a traceback."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lockstep.cli import main
from lockstep.config.plain import read_bytes, read_text
from lockstep.record import run_folder
from lockstep.record.writers import JsonlWriter, read_rows, write_json

TASK = (
    "import lockstep\nclass Mine(lockstep.Task):\n    def __init__(self, hidden=3): pass\n"
    "    def model(self): pass\n    def train_data(self): pass\n    def loss(self, model, batch): pass\n"
)
CONFIG = "task: task_of_mine.py:Mine\nprocesses: 2\nruntime: cpu\n"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task_of_mine.py").write_text(TASK)
    (tmp_path / "config.yaml").write_text(CONFIG)
    os.mkfifo(tmp_path / "pipe")


def lockstep(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + before] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LAUGHS, "bad.yaml:6: not valid YAML: it stands for more than 100000 values, aliases (*name) included"),
        ("task: " + "[" * 3000, "bad.yaml:1: not valid YAML: it is nested deeper than 50 levels"),
        ("task: &a [*a]", "bad.yaml:1: not valid YAML: an alias (*name) stands inside of what it names"),
        (CONFIG + "seed: " + "9" * 5000, "bad.yaml:4: not valid YAML: this cannot be read as int"),
        (CONFIG + "seed: 0x" + "f" * 5000, "bad.yaml:4: not valid YAML: a whole number of more than 1024 bits"),
        (CONFIG + "seed: !!timestamp x", "bad.yaml:4: not valid YAML: this cannot be read as timestamp"),
        (CONFIG + "#" * 1_000_000, "bad.yaml: cannot be read: it has more than 1000000 bytes"),
        (CONFIG + "log: {every: " + "9" * 400 + " steps}", "log.every: an interval of more than 5e+15 steps would"),
        (
            CONFIG + "timeouts: {collective: 1e300}",
            "timeouts.collective: input should be less than or equal to 1000000000",
        ),
        (CONFIG + "launch: {threads: 1000000000}", "launch.threads: input should be less than or equal to 65536"),
        (CONFIG + "data: {workers: 1, prefetch: 1000000000}", "data.prefetch: input should be less than or equal to"),
        (
            CONFIG.replace("processes: 2", "processes: 1000000000"),
            "processes: input should be less than or equal to 65536",
        ),
        (CONFIG + "data: {workers: 1000000000}", "data.workers: input should be less than or equal to 1024"),
        (f"task: {'x' * 300}.py:Mine", "cannot be looked for: [Errno 36] File name too long"),
        ('task: "a\\0b.py:Mine"', "bad.yaml:1: task: not an import path"),
    ],
)
def test_a_config_that_asks_for_too_much(text: str, message: str) -> None:
    Path("bad.yaml").write_text(text)
    result = lockstep("train", "bad.yaml")
    assert message in result.stderr and result.exit_code == 2, result.output
    assert not isinstance(result.exception, Exception) or isinstance(result.exception, SystemExit)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "pipe"], "pipe: cannot be read: it is a pipe, not a regular file"),
        (["train", "/dev/zero"], "/dev/zero: cannot be read: it is a device, not a regular file"),
        (["train", "."], ".: cannot be read: Is a directory"),
        (["train", "config.yaml", "--sweep", "pipe"], "pipe: cannot be read: it is a pipe"),
        (["train", "config.yaml", "--set", "task.type=pipe.py:X"], "there is no file"),
        (["train", "latin.yaml"], "latin.yaml: cannot be read: not text in UTF-8: byte 0xff at position 7"),
        (["train", "config.yaml", "--set", "seed=" + "[" * 9000], "[... (9005 characters): not valid YAML"),
        (["resume", "run"], "run/config.yaml: cannot be read: "),
    ],
)
def test_what_is_no_file_and_no_text(arguments: list[str], message: str) -> None:
    Path("latin.yaml").write_bytes(b'task: "\xff"\n')
    os.mkfifo("pipe.py")
    Path("run").mkdir()
    os.mkfifo("run/config.yaml")
    result = lockstep(*arguments)
    assert message in result.stderr and result.exit_code == 2, result.output


def test_files_of_a_runs_folder_that_are_pipes() -> None:
    os.mkfifo("summary.json")
    assert run_folder.read_summary(Path()) == {}
    for read in (lambda path: list(read_rows(path)), lambda path: read_bytes(path, 10), read_text):
        with pytest.raises(OSError, match="it is a pipe, not a regular file: 'pipe'"):
            read(Path("pipe"))


def test_a_full_disk_names_the_file() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    writer = JsonlWriter(Path("metrics.jsonl"))
    with Path("/dev/full").open("w") as full:
        os.dup2(full.fileno(), writer._stream.fileno())
    with pytest.raises(OSError, match=r"No space left on device: 'metrics.jsonl'") as raised:
        writer.write({"step": 1})
    assert raised.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match=r"Not a directory: 'config.yaml/topology.json'"):
        write_json(Path("config.yaml/topology.json"), {})


# A machine that refuses, with processes of its own

COMMAND = [sys.executable, "-m", "lockstep"]
WITHOUT_RIGHTS = ["setpriv", "--inh-caps=-all", "--bounding-set=-all"]


def run(*argv: str) -> tuple[int, str]:
    finished = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in finished.stderr
    return finished.returncode, finished.stderr


def test_a_folder_that_was_deleted(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    for command in (["train", f"{tmp_path}/config.yaml"], ["init"], ["resume", "x"]):
        script = f'cd "{gone}" && rmdir "{gone}" && "$@"; code=$?; mkdir "{gone}"; exit $code'
        code, err = run("sh", "-c", script, "sh", *COMMAND, *command)
        assert code == 2 and "lockstep: the current folder cannot be entered any more: " in err


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="a disk of 4 KB takes root to make")
def test_a_disk_of_four_kilobytes(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    small = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=4k tmpfs tiny && exec "$@"', "sh"]
    if subprocess.run([*small, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    code, err = run(*small, *COMMAND, "train", "config.yaml", "--out", "tiny")
    assert code == 2 and "No space left on device" in err and "lockstep: tiny/config-" in err
    code, err = run(*small, *COMMAND, "init", "tiny/new")
    assert (code, err) == (2, "lockstep: tiny/new: cannot be written: No space left on device\n")


@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="root may do everything")
def test_folders_files_and_ports_that_others_own(tmp_path: Path) -> None:
    ordinary = WITHOUT_RIGHTS if os.geteuid() == 0 else []
    (tmp_path / "closed").mkdir(mode=0o555)
    code, err = run(*ordinary, *COMMAND, "train", "config.yaml", "--out", "closed")
    assert code == 2 and "lockstep: --out closed: the run's folder cannot be made there: Permission denied." in err
    code, err = run(*ordinary, *COMMAND, "init", "closed/new")
    assert (code, err) == (2, "lockstep: closed/new: cannot be written: Permission denied\n")
    lowest = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
    if lowest.exists() and int(lowest.read_text()) > 80:
        code, err = run(*ordinary, *COMMAND, "train", "config.yaml", "--set", "launch.port=80")
        assert code == 2 and "lockstep: launch.port: port 80 is one of those that only root may listen at" in err
    (tmp_path / "task_of_mine.py").chmod(0)
    code, err = run(*ordinary, *COMMAND, "train", "config.yaml")
    assert code == 2 and "task_of_mine.py: cannot be read: Permission denied" in err
