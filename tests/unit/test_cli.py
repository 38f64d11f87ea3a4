"""The command line: what it says and how it ends, and that it answers without torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result

from conftest import ROOT
from lockstep.cli import main
from lockstep.config.load import load, parse_yaml
from lockstep.config.schema import RunConfig
from lockstep.errors import ConfigError
from lockstep.record import run_folder

TASK = """
import lockstep

class Mine(lockstep.Task):
    def __init__(self, hidden: int = 3): pass
    def model(self): pass
    def train_data(self): pass
    def loss(self, model, batch): pass
"""


@pytest.fixture(autouse=True)
def imports_as_before() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if not name.startswith(("torch", "lockstep", "numpy")):
            sys.modules.pop(name, None)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A project on a machine without GPUs, in a shell that no launcher has touched."""
    for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "config.yaml").write_text("task: task.py:Mine\nprocesses: 2\ntrain: {batch_size: 8}\n")


def lockstep(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def printed_config(result: Result) -> RunConfig:
    assert result.exit_code == 0, result.output
    return RunConfig.model_validate(parse_yaml(result.stdout.split("\nrank 0 on ")[0]))


# Without torch

PROGRAM = """
import json, sys
from lockstep.cli import main
outcomes = []
for arguments in json.loads(sys.argv[1]):
    try:
        main(arguments)
    except SystemExit as leaving:
        outcomes.append([leaving.code, sorted({"torch", "rich"} & set(sys.modules))])
print("\\n" + json.dumps(outcomes))
"""


def test_help_mistakes_and_plans_are_answered_without_torch(tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("task: task.py:Mine\ntrain: {batchsize: 3}\n")
    commands: list[tuple[list[str], int]] = [
        (["--help"], 0),
        (["train", "--help"], 0),
        (["train", "wrong.yaml"], 2),
        (["train", "nowhere.yaml"], 2),
        (["train", "config.yaml", "--set", "task.hiden=1"], 2),
        (["train", "config.yaml", "--dry-run", "--set", "train.batchsize=3"], 2),
        (["resume", "nowhere"], 2),
        (["schema"], 0),
        (["init", "new"], 0),
        (["doctor", "--help"], 0),
        (["doctor", "--runtime", "tpu"], 2),
        (["verify", "--help"], 0),
        (["verify", "nowhere.yaml"], 2),
        (["verify", "config.yaml", "--only", "cpu-dpp-2"], 2),
    ]
    argv = [sys.executable, "-c", PROGRAM, json.dumps([arguments for arguments, _ in commands])]
    finished = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    outcomes = json.loads(finished.stdout.splitlines()[-1])
    assert outcomes == [[code, []] for _, code in commands], finished.stderr


def test_a_rank_imports_buckets_and_loggers_where_its_config_names_them() -> None:
    code = (
        "import sys, lockstep.launchers.local.preload, lockstep.worker, lockstep.launchers.launch\n"
        "there = [each for each in sys.modules if each.startswith(('lockstep.mirror.', 'lockstep.record.to_'))]\n"
        "assert set(there) <= {'lockstep.mirror.mark', 'lockstep.mirror.url'}, there"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, lockstep; lockstep.ConfigError; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


VERSION = "__version__"


def test_the_version_has_one_source(tmp_path: Path) -> None:
    """That of pyproject.toml, which is what an installation knows it by."""
    import lockstep as package

    said = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (package.__version__, lockstep("--version").stdout.split()[-1]) == (said, said)
    assert not re.search(r"__version__ *= *[\"']", Path(package.__file__).read_text())
    # A copy of the source that nobody installed has none to tell, and works.
    (tmp_path / "lockstep").symlink_to(Path(package.__file__).parent)
    code = "import lockstep; print(lockstep.__version__)"
    alone = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert alone.stdout.strip() == "unknown"


def test_every_public_name_is_there_and_no_other() -> None:
    import lockstep as package

    assert all(getattr(package, name) is not None for name in package.__all__)
    assert {"Mean", "Run", "Task", "launch", "train"} <= set(package.__all__)
    assert [name for name in dir(package) if not name.startswith("_")] == sorted(
        {*package.__all__, "nn", "ray", "testing"} - {VERSION}
    )
    with pytest.raises(AttributeError, match="has no attribute 'Trainer'"):
        package.Trainer  # noqa: B018


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nowhere.yaml"], "lockstep: nowhere.yaml: there is no such file. `lockstep init` writes"),
        (
            ["train", "config.yaml", "--set", "train.batchsize=3"],
            "lockstep: --set train.batchsize=3: train.batchsize: ",
        ),
        (["train", "config.yaml", "--set", "strategy=single"], "lockstep: strategy: single trains on one process"),
        (["train", "config.yaml", "--set", "runtime=cuda"], "lockstep: runtime: cuda was asked for but torch"),
        (
            ["train", "config.yaml", "--set", "runtime=xla"],
            "lockstep: runtime: xla needs torch_xla",
        ),
        (["resume", "nowhere"], "lockstep: nowhere is not the folder of a run: there is no such folder"),
        (["resume", "."], "lockstep: . is not the folder of a run"),
        (["init", "."], "lockstep: task.py is there already; name another folder"),
        (["init", "task.py/new"], "lockstep: task.py/new: cannot be written"),
        (["train"], "Missing argument 'CONFIG'"),
        (["trian"], "there is no command 'trian': did you mean train?"),
        (["train", "config.yaml", "--dryrun"], "No such option"),
        (["doctor", "--runtime", "tpu"], "Invalid value for '--runtime'"),
        (["verify", "config.yaml", "--only", "cpu-dpp-2"], "lockstep: --only cpu-dpp-2: no combination has this name"),
        (["verify", "config.yaml", "--out", "."], "lockstep: --out .: a new folder cannot be made there: File exists"),
        (["verify", "config.yaml", "--steps", "1"], "Invalid value for '--steps'"),
        (
            ["verify", "config.yaml", "--set", "train.batchsize=3"],
            "lockstep: --set train.batchsize=3: train.batchsize:",
        ),
        (["doctor", "--processes", "0"], "Invalid value for '--processes'"),
        (["doctor", "--limit", "0"], "Invalid value for '--limit'"),
    ],
)
def test_a_mistake_is_told_on_stderr_with_exit_code_2(tmp_path: Path, arguments: list[str], message: str) -> None:
    if arguments == ["resume", "."]:
        (tmp_path / "config.yaml").unlink()
    result = lockstep(*arguments)
    assert message in result.stderr
    assert (result.exit_code, result.stdout) == (2, "")
    assert not (tmp_path / "runs").exists()


def test_every_line_of_a_message_says_who_speaks(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("task: task.py:Mine\ntrain: {batchsize: 3, epochs: 0}\n")
    lines = lockstep("train", "config.yaml").stderr.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("lockstep: config.yaml:2: train.") for line in lines)


# Dry runs


def test_a_dry_run_prints_the_resolved_config_and_the_plan_and_starts_nothing(tmp_path: Path) -> None:
    result = lockstep("train", "config.yaml", "--dry-run", "--set", "train.epochs=3")
    config = printed_config(result)
    assert (config.runtime, config.processes, config.train.epochs, config.name) == ("cpu", 2, 3, "config")
    plan = [line for line in result.stdout.splitlines() if line.startswith("rank ")]
    assert len(plan) == 2
    assert plan[1].endswith("-m lockstep.worker RUN_DIR")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "task.py"]


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        (["optimizer.type=torch.optim.AdamX"], ["optimizer: torch.optim has no 'AdamX', did you mean Adam?"]),
        (["optimizer.type=torch.optm.AdamW"], ["optimizer: there is no module 'torch.optm'"]),
        (["optimizer.type=collections.OrderedDict"], ["optimizer: collections.OrderedDict is not an optimizer"]),
        (
            ["optimizer={type: torch.optim.AdamW, learning_rate: 0.1}"],
            ["optimizer.learning_rate: AdamW has no such argument, did you mean lr? (value 0.1)"],
        ),
        (["scheduler.type=torch.optim.lr_scheduler.StepLR"], ["scheduler: StepLR cannot be made from {}: missing a"]),
        (["task=task:Mine", "task.hiden=5"], ["task.hiden: Mine has no such argument"]),
        (["task=collections:OrderedDict"], ["task: collections:OrderedDict is not a class derived from lockstep.Task"]),
        (["task=broken.py:Mine"], ["task: ", "ZeroDivisionError: division by zero (", "broken.py:2)"]),
        (
            ["task=collate.py:Odd", "optimizer.type=torch.optim.AdamX"],
            ["task: Odd defines collate_fn, which Lockstep does not call: its name here is collate", "has no 'AdamX'"],
        ),
    ],
)
def test_a_dry_run_tells_what_an_import_can_tell(tmp_path: Path, changes: list[str], messages: list[str]) -> None:
    (tmp_path / "broken.py").write_text("class Mine: pass\n1 / 0\n")
    (tmp_path / "collate.py").write_text(
        "from task import Mine\nclass Odd(Mine):\n    def collate_fn(self, examples): pass\n"
    )
    result = lockstep("train", "config.yaml", "--dry-run", *(f"--set={each}" for each in changes))
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert all(message in result.stderr for message in messages), result.stderr


@pytest.mark.parametrize("name", ["my config.yaml", "café (2).yaml", "1e3.yaml", ".hidden.yaml", "a+b.yaml"])
def test_a_config_may_have_any_file_name(tmp_path: Path, name: str) -> None:
    """The run is named after it, and the ranks read that name back."""
    (tmp_path / "config.yaml").rename(tmp_path / name)
    assert printed_config(lockstep("train", name, "--dry-run")).name


@pytest.fixture
def existing(tmp_path: Path) -> Path:
    """The folder of a run that was trained on two processes."""
    config = load(tmp_path / "config.yaml").model_copy(update={"runtime": "cpu", "name": "mine"})
    folder = run_folder.create(tmp_path / "runs", "mine")
    run_folder.write_config(folder, config)
    return folder


def test_a_dry_run_of_a_resume_changes_nothing(existing: Path) -> None:
    before = (existing / "config.yaml").read_bytes()
    result = lockstep("resume", str(existing), "--dry-run", "--set", "processes=4")
    assert printed_config(result).processes == 4
    assert (existing / "config.yaml").read_bytes() == before


@pytest.mark.parametrize("change", ["seed=3", "train.batch_size=16", "task.hidden=4", "optimizer={type: a.b, lr: 1}"])
def test_a_resume_that_would_be_wrong_is_refused(existing: Path, change: str) -> None:
    before = (existing / "config.yaml").read_bytes()
    result = lockstep("resume", str(existing), "--set", change)
    assert result.exit_code == 2
    assert "this run cannot be resumed with a config that changed in" in result.stderr
    assert (existing / "config.yaml").read_bytes() == before


# What to start from


@pytest.mark.requirement("D12")
def test_init_writes_a_config_and_a_task_that_fit_each_other(tmp_path: Path) -> None:
    result = lockstep("init", "new")
    assert result.exit_code == 0
    assert "next: lockstep train new/config.yaml" in result.stderr
    config = load(tmp_path / "new" / "config.yaml")
    assert config.task.type == f"{tmp_path}/new/task.py:MyTask"
    assert printed_config(lockstep("train", "new/config.yaml", "--dry-run")).processes == 2


@pytest.mark.parametrize(
    ("folder", "name"), [("demo", "demo"), ("my project (2)", "my-project-2"), ("1e3", "1e3"), ("null", "null")]
)
def test_init_names_its_runs_after_its_folder(tmp_path: Path, folder: str, name: str) -> None:
    assert lockstep("init", folder).exit_code == 0
    assert load(tmp_path / folder / "config.yaml").name == name


def test_init_in_a_folder_of_its_own_names_its_runs_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert lockstep("init").exit_code == 0
    assert load(Path("config.yaml")).name == "here"


def test_gpu_means_cuda() -> None:
    plain = {"task": "task.py:Mine", "runtime": "gpu"}
    assert RunConfig.model_validate(plain).runtime == "cuda"
    jsonschema.validate(plain, json.loads(lockstep("schema").stdout))
    assert "runtime: cuda was asked for" in lockstep("train", "config.yaml", "--set", "runtime=gpu").stderr
    with pytest.raises(ConfigError, match="must be one of auto, cpu, cuda or xla; did you mean cuda"):
        load(Path("config.yaml"), ["runtime=cudda"])


def test_init_overwrites_nothing(tmp_path: Path) -> None:
    assert lockstep("init", ".").exit_code == 2
    assert (tmp_path / "task.py").read_text() == TASK


def test_the_printed_schema_is_the_one_that_configs_are_checked_with() -> None:
    schema: dict[str, Any] = json.loads(lockstep("schema").stdout)
    jsonschema.validate(parse_yaml((ROOT / "examples" / "digits.yaml").read_text()), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"task": {"type": "a.b:C"}, "bogus": 1}, schema)
