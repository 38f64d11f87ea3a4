"""Run folders that mean harm: what only looks at them answers in seconds, says "damaged", and shows no traceback."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from test_checkpoint_storage import FILES, snapshot

from browser import measured, needs_browser
from lockstep import run_files
from lockstep.checkpoint import manifest, reader
from lockstep.checkpoint.manifest import MANIFEST_FILE, MODEL_FILE, STATE_FILE, TREE_FILE
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.checkpoint.writer import write
from lockstep.cli import main
from lockstep.distributed.group import Group
from lockstep.errors import CheckpointError
from lockstep.runs.reader import read_run
from lockstep.runs.report import report_page
from lockstep.runs.server import RunsFolder, Server
from run_folders import completed, lines

LIMIT = 10.0  # seconds for any one look, on a machine that is busy
WRONG: tuple[Any, ...] = (None, [], {}, "x", "\x1b[2J\u202e", -1, True, 1e308, 10**30, [[]], {"a": None})


class TookTooLong(BaseException):
    """No OSError, as TimeoutError is: nobody gets on after it."""


@contextlib.contextmanager
def limit(seconds: float = LIMIT) -> Iterator[None]:
    def over(*_: Any) -> None:
        raise TookTooLong(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 1 and 2."""
    run = completed(tmp_path_factory.mktemp("made") / "run", count=10)
    for step in (1, 2):
        about = {"epoch": 1, "value": 0.5, "metrics": {"loss": 0.5}, "world_size": 1, "created": "2026-01-01",
                 "versions": {"lockstep": "1", "torch": "2"}}  # fmt: skip
        write(CheckpointStorage(run / "checkpoints"), snapshot(step, about=about))
    return run


EXPORT = ("export", "--to", "safetensors")


def looks(folder: Path, out: Path) -> dict[str, str]:
    """All commands that only look at a run, by one of its checkpoints, and what resume and serve do first; what they
    printed. Each has its time."""
    run = folder.parents[1]
    commands = {
        "list": ["checkpoint", "list", run],
        "json": ["checkpoint", "list", run, "--json"],
        "verify": ["checkpoint", "verify", run],
        "export": [*EXPORT, run, "--step", "2", "--weights", "ema", "--out", out / "merged.safetensors"],
        "report": ["report", run, "--out", out / "report.html"],
        "runs": ["runs", run.parent],
        "watch": ["watch", run, "--once"],
    }
    printed = {}
    for name, command in commands.items():
        with limit():
            told = CliRunner().invoke(main, [str(each) for each in command])
        assert told.exception is None or isinstance(told.exception, SystemExit), (command, told.exc_info, told.output)
        assert told.exit_code in (0, 1, 2, 5) and "Traceback" not in told.output, (command, told.output)
        assert not [each for each in told.output if not (each.isprintable() or each in "\n\t")], (command, told.output)
        printed[name] = told.output
    storage = CheckpointStorage(run / "checkpoints")
    with limit(), contextlib.suppress(CheckpointError):
        storage.newest_good()
    with limit(), contextlib.suppress(CheckpointError):
        reader.restore(storage, Group(0, 1, timeout=0.0))
    with limit():
        RunsFolder(run.parent).listed()
        RunsFolder(run.parent).read(run.name)
    return printed


def reseal(folder: Path, **changes: Any) -> None:
    """Make a manifest that matches the files as they are: a stranger can, too."""
    told = json.loads((folder / MANIFEST_FILE).read_text())
    for name, entry in told["files"].items():
        with contextlib.suppress(OSError):
            data = run_files.read_bytes(folder / name, 1_000_000)
            entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest.write(folder, {**told, **changes})


def _pipe(file: Path) -> None:
    os.mkfifo(file)


def _socket(file: Path) -> None:
    with contextlib.chdir(file.parent), socket.socket(socket.AF_UNIX) as made:  # a path of a socket is short
        made.bind(file.name)


KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": _pipe,
    "socket": _socket,
    "folder": lambda file: file.mkdir(),
    "link to a device": lambda file: file.symlink_to("/dev/zero"),
    "link to itself": lambda file: file.symlink_to(file.name),
    "empty": lambda file: file.write_bytes(b""),
    "no text": lambda file: file.write_bytes(b"\xff\xfe\x00" * 100),
    "deep": lambda file: file.write_text("[" * 100_000),
    "number": lambda file: file.write_text("1" * 10_000),
    "another type": lambda file: file.write_text("[1, 2]"),
    "huge": lambda file: os.truncate(file, 2**40) if not file.write_bytes(b"") else None,
}


@pytest.fixture
def hostile(made: Path, tmp_path: Path) -> Callable[[], Path]:
    """Makes the run anew, and gives the checkpoint of its step 2 to do harm to."""

    def again() -> Path:
        run = tmp_path / "runs" / "gift"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(made, run)
        return run / "checkpoints" / "step-00000002"

    return again


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_kind_is_damage(hostile: Callable[[], Path], tmp_path: Path, name: str) -> None:
    for kind, make in KINDS.items():
        folder = hostile()
        (folder / name).unlink()
        make(folder / name)
        verified = looks(folder, tmp_path)["verify"]
        assert f"step-00000002 is damaged: {name}" in verified and "step-00000001 is whole" in verified, (
            kind,
            verified,
        )
        if name != MANIFEST_FILE and (folder / name).is_file() and kind != "huge":  # its content is wrong alone
            reseal(folder)
            looks(folder, tmp_path)


def test_a_manifest_of_any_content_is_damage_or_nothing_to_fall_over(
    hostile: Callable[[], Path], tmp_path: Path
) -> None:
    told = json.loads((hostile() / MANIFEST_FILE).read_text())
    for number, key in enumerate([*told, "problem", "shared"]):
        for value in WRONG[number % 3 :: 3] if key not in ("step", "files", "metrics", "versions") else WRONG:
            folder = hostile()
            reseal(folder, **{key: value})
            looks(folder, tmp_path)
    for name in (MODEL_FILE, "../../../summary.json", "model-00001-of-00001.safetensors"):
        for entry in ({}, {"bytes": 10**30, "sha256": "0"}, {"bytes": 1, "sha256": {"\u00b2": "0"}}, 1):
            folder = hostile()
            reseal(folder, files={**told["files"], name: entry}, format=1 if number % 2 else 2)
            looks(folder, tmp_path)


HEADERS: tuple[Any, ...] = (
    [], 1, {"w": 1}, {"w": {}}, {"__metadata__": 1}, {"__metadata__": {"complex": "["}},
    {"__metadata__": {"complex": "[[]]", "a": []}},
    {"w": {"dtype": "F32", "shape": "x", "data_offsets": [0, 4]}},
    {"w": {"dtype": 1, "shape": [1], "data_offsets": [0, 4]}},
    {"w": {"dtype": "F32", "shape": [1], "data_offsets": None}},
    {"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
    {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 10**40]}},
    {"w": {"dtype": "\x1b[2J", "shape": [1], "data_offsets": [0, 4]}},
)  # fmt: skip


@pytest.mark.parametrize("name", [MODEL_FILE, STATE_FILE])
def test_a_header_of_any_content_is_damage(hostile: Callable[[], Path], tmp_path: Path, name: str) -> None:
    headers = [json.dumps(each).encode() for each in HEADERS]
    packed = [len(each).to_bytes(8, "little") + each + bytes(4) for each in headers]
    for data in (*packed, b"\xff" * 8, (10**8).to_bytes(8, "little"), b"\x01", bytes(8)):
        folder = hostile()
        (folder / name).write_bytes(data)
        reseal(folder)
        looks(folder, tmp_path)


def test_a_state_of_any_content_is_damage(hostile: Callable[[], Path], tmp_path: Path) -> None:
    for tree in (
        *WRONG, {"state": 1}, {"state": {}, "shared": []}, {"state": {"averages": {"m": 1}}, "shared": {"a": "b"}},
        {"state": {"a": {"$tensor": "none"}}, "shared": {}}, {"state": {"a": {"$map": [[{}, 1]]}}, "shared": {}},
        {"state": {"averages": {"m": {"weights": {"w": {"$tensor": []}}}}, "models": []}, "shared": {}},
    ):  # fmt: skip
        folder = hostile()
        (folder / TREE_FILE).write_text(json.dumps(tree))
        reseal(folder)
        looks(folder, tmp_path)


def test_names_that_are_none_of_ours_are_left_alone(hostile: Callable[[], Path], tmp_path: Path) -> None:
    folder = hostile()
    for name in ("step-\u00b2", "step-1", "step-" + "9" * 200, "step-\u0661\u0662",
                 "aside-step-\x1b[2J", "damaged-step-\u202e", "step-\udcff"):  # fmt: skip
        (folder.parent / name).mkdir()
    (folder.parent / "step-00000003").symlink_to("step-00000001")
    (folder.parent / "step-00000004").write_text("")
    _pipe(folder.parent / "step-00000005")
    printed = looks(folder, tmp_path)
    assert CheckpointStorage(folder.parent).steps() == [1, 2, 3, 4, 5]
    assert "step-00000003 is damaged" in printed["verify"] and "a link" in printed["verify"]


RECORDS = ("config.yaml", "summary.json", "metrics.jsonl", "timeline.jsonl", "lags.jsonl", "live.json", "topology.json",
           ".lock", ".lock-rank", ".lock-lease", "sweep.yaml", ".bucket.json")  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_of_another_kind_is_left_out(hostile: Callable[[], Path], tmp_path: Path, kind: str) -> None:
    folder = hostile()
    run = folder.parents[1]
    for name in RECORDS[1:]:
        (run / name).unlink(missing_ok=True)
        KINDS[kind](run / name)
    looks(folder, tmp_path)


FAR = 10**400


def test_numbers_that_nothing_can_be_computed_with_are_left_out(hostile: Callable[[], Path], tmp_path: Path) -> None:
    folder = hostile()
    run = folder.parents[1]
    largest = sys.float_info.max
    lines(run / "timeline.jsonl", *({"at": at, "kind": "train", "step": FAR} for at in (-largest, 1.0, largest)))
    lines(run / "metrics.jsonl", {"step": FAR, "loss": 1.0}, {"step": 3, "loss": largest}, {"step": 4, "loss": FAR})
    (run / "summary.json").write_text(json.dumps({"status": "running", "step": FAR, "seconds": largest, "epoch": FAR,
                                                  "best": {"value": FAR, "metric": [[]], "step": FAR}}))  # fmt: skip
    (run / "live.json").write_text(json.dumps({"at": time.time(), "ranks": [{"rank": 0, "step": FAR}], "step": FAR,
                                               "total_steps": FAR, "latest": eval("[" * 90 + "]" * 90)}))  # fmt: skip
    looks(folder, tmp_path)
    assert "Infinity" not in report_page([read_run(run)])
    told = CliRunner().invoke(main, ["watch", str(run), "--once", "--json"])
    assert told.exit_code == 0 and json.loads(told.output)["live"]["step"] == 0


# What serve and report show


def served(folder: Path, *paths: str) -> str:
    """What a browser gets of these pages."""
    server = Server(RunsFolder(folder), "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        return "".join(urllib.request.urlopen(f"{server.url}{path}", timeout=10).read().decode() for path in paths)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_serve_reads_through_no_link(tmp_path: Path, made: Path) -> None:
    home, run = tmp_path / "home", Path(shutil.copytree(made, tmp_path / "runs" / "gift"))
    shutil.copytree(made, home / "run")
    for secret, name in enumerate(("config.yaml", "topology.json", "metrics.jsonl", "timeline.jsonl", "summary.json")):
        row = {"step": 1, "at": 1.0, "kind": "end", "status": "failed", "note": "hidden", f"hidden{secret}": 1.5,
               "ranks": [{"rank": 0, "host": "hidden"}], "reason": "hidden"}  # fmt: skip
        (home / name).write_text(json.dumps(row) + "\n")
        (run / name).unlink()
        (run / name).symlink_to(home / name)
    told = json.loads((home / "run/checkpoints/step-00000001/manifest.json").read_text())
    manifest.write(home / "run/checkpoints/step-00000001", {**told, "created": "hidden"})
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").symlink_to(home / "run/checkpoints")
    (run / "launch.yaml").write_text("settings: {}\n")
    (run.parent / "lent").symlink_to(home / "run")
    text = served(tmp_path / "runs", "runs.json", "data.json?run=gift")
    assert "gift" in text and "hidden" not in text and "2026-01-01" not in text and "lent" not in text


def test_a_line_without_an_end_costs_no_memory(made: Path, tmp_path: Path) -> None:
    import tracemalloc

    run = Path(shutil.copytree(made, tmp_path / "runs" / "gift"))
    with (run / "metrics.jsonl").open("r+b") as stream:
        stream.seek(0, os.SEEK_END)
        stream.write(b'{"step": 11, "x": "')
        stream.seek(150_000_000, os.SEEK_CUR)
        stream.write(b'"}\n{"step": 12, "loss": 1.0}\n')
    tracemalloc.start()
    try:
        runs = RunsFolder(run.parent)
        assert [runs.read("gift").step, read_run(run).step] == [12, 12]
        assert tracemalloc.get_traced_memory()[1] < 100_000_000
    finally:
        tracemalloc.stop()


def test_secrets_are_left_out_of_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_environment")
    run = completed(tmp_path / "runs" / "mine", count=3, status="failed", reason="hf_of_the_environment is wrong")
    (run / "config.yaml").write_text(
        "task: {type: a.py:A, api_key: sk-1234567890, url: 'https://me:pass-word@host/x'}\nlog: {every: 1 step}\n"
    )
    for text in (report_page([read_run(run)]), served(run.parent, "runs.json", "data.json?run=mine")):
        assert "task.api_key" in text and "https://" in text
        for secret in ("sk-1234567890", "pass-word", "hf_of_the_environment"):
            assert secret not in text


def test_a_status_is_written_out_on_a_terminal(made: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(made, tmp_path / "runs" / "gift"))
    (run / "summary.json").write_text(json.dumps({"status": "\x1b[2J\u202edone", "reason": "\x1b]0;x\x07", "step": 3}))
    lines(run / "timeline.jsonl", {"at": 1.0, "kind": "end", "status": "\x1b[31m"})
    text = looks(run / "checkpoints" / "step-00000002", tmp_path)["runs"]
    assert "\\x1b[2J\\u202edone" in text


NAMES = ("constructor", "__proto__", "toString", "hasOwnProperty")


@needs_browser
def test_a_metric_may_have_any_name_where_runs_are_compared(tmp_path: Path) -> None:
    first, second = (completed(tmp_path / name, count=5) for name in ("first", "second"))
    lines(first / "metrics.jsonl", *({"step": step, **dict.fromkeys(NAMES, 1.0 * step)} for step in range(1, 5)))
    wide, _ = measured({"both": report_page([read_run(first), read_run(second)])}, False, tmp_path)
    assert {*NAMES} <= {*wide["titles"]} and wide["plots"] == len(wide["titles"])


# What is imported

_TRAP = "from pathlib import Path\nPath(__file__).with_name('imported').touch()\n"
_ALL = """
import sys
from click.testing import CliRunner
from lockstep.cli import main
for command in {commands!r}:
    told = CliRunner().invoke(main, command)
    assert told.exit_code == 0, (command, told.output)
from lockstep.runs.server import RunsFolder
from lockstep.runs.data import page_data
runs = RunsFolder(__import__("pathlib").Path({parent!r}))
runs.listed(), page_data([runs.read({name!r})])
print([name for name, each in sys.modules.items() if (getattr(each, "__file__", "") or "").startswith({run!r})])
"""


def test_looking_imports_nothing_from_a_run(made: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(made, tmp_path / "runs" / "gift"))
    for name in ("task.py", "random.py", "yaml.py", "torch.py", "numpy.py", "lockstep.py", "sitecustomize.py"):
        (run / name).write_text(_TRAP)
        (run / "checkpoints" / "step-00000002" / name).write_text(_TRAP)
    (run / "config.yaml").write_text(f"task: {{type: '{run}/task.py:A'}}\noptimizer: {{type: 'task:B'}}\n")
    commands = [
        ["report", "."], ["runs", ".."], ["watch", ".", "--once"],
        ["checkpoint", "list", "."], ["checkpoint", "verify", "."],
        [*EXPORT, ".", "--out", "../m.safetensors"],
    ]  # fmt: skip
    code = _ALL.format(commands=commands, parent=str(run.parent), name=run.name, run=str(run))
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=run, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip() == "[]", done.stdout + done.stderr
    assert not list(run.rglob("imported"))
