"""What tests share: the command line as a user runs it, a small task, and proof that nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

import warm
from laptop import hosts, laptop, one_machine
from ray_cluster import end_after_the_last_test, fit, nodes
from ray_launching import on_ray, places, undisturbed
from s3_server import s3, stored
from slurm_cluster import slurm
from unchanged import Unchanged
from world_of_one import new_run

__all__ = [
    "fit", "hosts", "laptop", "new_run", "nodes", "on_ray", "one_machine", "places", "s3", "slurm", "stored",
    "undisturbed",
]  # fixtures  # fmt: skip

# A shell in the background, or nohup, has these ignored, which is honoured: tests send them, and mean it.
for _number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)

ROOT = Path(__file__).parents[1]
TASK_FILE = Path(__file__).parent / "tasks.py"
COMMAND_LIMIT = 120.0
# Every command in a new process, and not forked from one that has imported torch.
COLD = bool(os.environ.get("LOCKSTEP_COLD"))
# Tests that one worker runs one after the other, since they share something (decision 013): a Ray cluster, a SLURM
# cluster, hosts of network namespaces, checkpoints that are saved once for all of them.
TOGETHER = {
    "tests/ray/": "ray",
    "tests/slurm/": "slurm",
    "tests/hosts/": "hosts",
    "tests/xla/test_xla_hosts.py": "hosts",
    "tests/ranks/test_sliced_checkpoints.py": "sliced checkpoints",
}
# By torch, by Ray, and by torch_xla where it is installed.
SET_BY_OTHERS = {
    "KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK", "TORCHINDUCTOR_CACHE_DIR", "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "TRITON_CACHE_DIR", "TRITON_PTXAS_PATH",
}  # fmt: skip
if importlib.util.find_spec("torch_xla") is not None:
    SET_BY_OTHERS |= {
        "GRPC_VERBOSITY", "PJRT_DEVICE", "PJRT_DYNAMIC_PLUGINS", "PTXLA_TPU_LIBRARY_PATH", "TF_CPP_MIN_LOG_LEVEL",
        "TPU_LIBRARY_PATH", "XLA_FLAGS",
    }  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--whole-matrix", action="store_true", help="run every cell of tests/faults and write docs/reliability.md"
    )
    parser.addoption(
        "--long", action="store_true", help="also run tests that take about a minute and overlap with shorter ones"
    )
    parser.addoption(
        "--skip-unchanged", action="store_true", help="skip tests/ray and the like where nothing they test has changed"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--skip-unchanged"):
        config.pluginmanager.register(Unchanged())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="takes long, and a shorter test is near: --long runs it")
    for item in items:
        if item.get_closest_marker("long") and not config.getoption("--long"):
            item.add_marker(skip)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """By path: xdist's own groups have no effect with pytest 9.2, which keeps the ids of tests elsewhere."""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return next((group for start, group in TOGETHER.items() if nodeid.startswith(start)), nodeid)

    return Together(config, log)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if item.nodeid.startswith("tests/ray/") and not (nextitem and nextitem.nodeid.startswith("tests/ray/")):
        end_after_the_last_test()


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


class Started:
    """A command that runs in a session of its own, so that everything it starts can be found again."""

    def __init__(self, argv: list[str], cwd: Path, env: dict[str, str] | None = None) -> None:
        environment = {**os.environ, **(env or {})}
        environment.pop("PYTHONBREAKPOINT", None)  # which Ray sets wherever it was imported
        self._out, self._err = (cwd / ".stdout").open("w+"), (cwd / ".stderr").open("w+")
        forked = None
        if argv[0] == sys.executable and not COLD:
            forked = warm.start(argv[1:], cwd, environment, self._out.fileno(), self._err.fileno())
        self.process = forked or subprocess.Popen(
            argv, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._err,
            start_new_session=True,
        )  # fmt: skip

    def wait(self, limit: float = COMMAND_LIMIT) -> Finished:
        try:
            code = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            shown = self._read()
            self.end()
            pytest.fail(f"the command took more than {limit} s\n{shown[0]}\n{shown[1]}")
        left = self.wait_for_leftovers()
        out, err = self._read()
        self.end()
        assert not left, f"processes left behind: {left}\n{out}\n{err}"
        return Finished(code, out, err)

    def members(self) -> list[psutil.Process]:
        """Every living process of the command's session."""
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (ProcessLookupError, psutil.Error):
                continue
        return found

    def wait_for_leftovers(self, limit: float = 30.0) -> list[str]:
        deadline = time.monotonic() + limit
        while (members := [each for each in self.members() if each.pid != self.process.pid]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.1)
        return [f"{each.pid} {' '.join(each.cmdline()[:4])}" for each in members if each.is_running()]

    def end(self) -> None:
        for member in self.members():
            member.send_signal(signal.SIGKILL)
        self.process.wait(10)
        self._out.close()
        self._err.close()

    def _read(self) -> tuple[str, str]:
        for stream in (self._out, self._err):
            stream.flush()
            stream.seek(0)
        return self._out.read(), self._err.read()


@dataclass
class Project:
    """A folder with a config, where commands are run."""

    folder: Path

    def config(self, **values: Any) -> Path:
        """Write a config for the small task of tests/tasks.py; values replace whole top-level keys."""
        base: dict[str, Any] = {
            "name": "tiny",
            "task": {"type": f"{TASK_FILE}:Tiny"},
            "runtime": "cpu",
            "processes": 2,
            "train": {"epochs": 2, "batch_size": 12},
            "optimizer": {"type": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9},
            "data": {"split": {"train": 0.8, "val": 0.2}},
            "log": {"every": "1 step"},
        }
        path = self.folder / "config.yaml"
        path.write_text(yaml.safe_dump({**base, **values}), encoding="utf-8")
        return path

    def start(self, *arguments: str | Path, env: dict[str, str] | None = None) -> Started:
        return Started([sys.executable, "-m", "lockstep", *map(str, arguments)], self.folder, env)

    def start_python(self, *arguments: str | Path, env: dict[str, str] | None = None) -> Started:
        return Started([sys.executable, *map(str, arguments)], self.folder, env)

    def run(self, *arguments: str | Path, env: dict[str, str] | None = None, limit: float = COMMAND_LIMIT) -> Finished:
        return self.start(*arguments, env=env).wait(limit)

    def train(self, *arguments: str, out: str = "runs", **values: Any) -> Path:
        """Train to a good end; the run's folder."""
        finished = self.run("train", self.config(**values), "--out", out, *arguments)
        assert finished.code == 0, finished.text
        return self.only_run(out)

    def only_run(self, out: str = "runs") -> Path:
        (folder,) = (self.folder / out).iterdir()
        return folder


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> dict[int, float]:
    """The training loss of every step."""
    trained = [row for row in rows(run) if "examples_per_second" in row]
    return {row["step"]: row.get("train/loss", row.get("loss")) for row in trained}


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())  # type: ignore[no-any-return]


def steps_saved(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))


def last_weights(run: Path) -> dict[str, Any]:
    """The model in the newest checkpoint, in however many files it is."""
    from safetensors.torch import load_file

    newest = max((run / "checkpoints").glob("step-*"))
    return {name: each for file in sorted(newest.glob("model*.safetensors")) for name, each in load_file(file).items()}


def wait_until(condition: Callable[[], Any], limit: float = 60.0, what: str = "a condition") -> Any:
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    pytest.fail(f"waited {limit} s for {what}")


def rank_pids(run: Path) -> dict[int, int]:
    """The process ids of all ranks, once they have met."""
    file = run / "topology.json"
    wait_until(file.exists, what="topology.json")
    return {each["rank"]: each["pid"] for each in json.loads(file.read_text())["ranks"]}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.fixture
def new_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts commands as new processes, for tests of what an interpreter does at its start."""
    monkeypatch.setattr(sys.modules[__name__], "COLD", True)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """A test that leaks an environment variable or a thread fails."""
    variables, threads = dict(os.environ), set(threading.enumerate())
    yield
    changed = {name for name in {*variables, *os.environ} if variables.get(name) != os.environ.get(name)}
    changed -= {"PYTEST_CURRENT_TEST", "OMP_NUM_THREADS", *SET_BY_OTHERS}
    assert not changed, f"environment variables changed: {sorted(changed)}"

    def new() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each not in threads and not each.daemon and each.is_alive()]

    if new():  # those of other people's readers end with them, which may take the collector, and a moment
        gc.collect()
        deadline = time.monotonic() + 5
        while new() and time.monotonic() < deadline:
            time.sleep(0.05)
    assert not new(), f"threads left behind: {new()}"


@contextlib.contextmanager
def small_file_system(folder: Path, size: str) -> Iterator[Path]:
    """A folder with a file system of its own of so many bytes; skips where it may not be mounted."""
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"this container may not mount: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
