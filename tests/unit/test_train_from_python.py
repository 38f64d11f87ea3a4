"""What `lockstep.train` makes of its arguments, before anything is trained."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import lockstep
from lockstep.config import objects
from lockstep.config.load import from_plain, parse_yaml, to_yaml
from lockstep.config.schema import RunConfig
from lockstep.errors import ConfigError, LaunchError
from lockstep.launchers.train import _loaded

BASE: dict[str, Any] = {
    "task": {"type": "mine.py:Mine", "hidden": 3},
    "train": {"epochs": 2, "batch_size": 8},
    "optimizer": {"type": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9},
}
SOURCE = "class Mine:\n    def __init__(self, hidden=1): pass\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def module(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(here)
    yield __import__("mine")
    del sys.modules["mine"]


def test_the_package_is_the_function_whatever_was_imported_first() -> None:
    import lockstep.engine.run

    assert callable(lockstep.train) and lockstep.engine.run.Run is lockstep.Run
    with pytest.raises(ConfigError, match=r"^lockstep\.train: task: missing"):
        lockstep.train()


@pytest.mark.parametrize("form", ["file", "text", "mapping", "config"])
def test_a_config_may_be_a_file_plain_data_or_the_thing_itself(here: Path, form: str) -> None:
    import yaml

    (here / "some where").mkdir()
    (here / "mine.py").rename(here / "some where" / "mine.py")
    file = here / "some where" / "my config.yaml"
    file.write_text(yaml.safe_dump(BASE))
    located = {**BASE, "task": {**BASE["task"], "type": "some where/mine.py:Mine"}}
    given: Any = {"file": file, "text": str(file), "mapping": located, "config": RunConfig.model_validate(located)}[
        form
    ]
    config = _loaded(given, {"train": {"epochs": 5}, "seed": 3})
    assert config.task.type == f"{here}/some where/mine.py:Mine"
    assert (config.train.epochs, config.train.batch_size, config.seed) == (5, 8, 3)
    assert config.name == ("my-config" if form in ("file", "text") else "Mine")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"train.epochs": 5}, {"train": {"epochs": 5, "batch_size": 8}}),
        ({"optimizer": {"lr": 1}}, {"optimizer": {"type": "torch.optim.SGD", "lr": 1, "momentum": 0.9}}),
        ({"optimizer": {"type": "torch.optim.Adam"}}, {"optimizer": {"type": "torch.optim.Adam"}}),
        ({"optimizer": "torch.optim.Adam"}, {"optimizer": {"type": "torch.optim.Adam"}}),
        ({"optimizer": None}, {"optimizer": None}),
        ({"task": {"hidden": 4}}, {"task": {"hidden": 4}}),
        ({"task.hidden": 4}, {"task": {"hidden": 4}}),
        ({"data": {"split": {"train": 0.5, "val": 0.5}}}, {"data": {"split": {"train": 0.5, "val": 0.5}}}),
        (
            {"strategy": {"type": "tensor", "shard": {"a.*.weight": ["data"]}}},
            {"strategy": {"shard": {"a.*.weight": {"spec": ["data"]}}}},
        ),
        (
            {"launch": {"threads": None}, "launch.port": 4000},
            {"launch": {"type": "local", "threads": None, "port": 4000}},
        ),
    ],
)
def test_values_are_merged_and_those_of_another_type_take_its_place(
    values: dict[str, Any], expected: dict[str, Any]
) -> None:
    plain = _loaded(BASE, values).plain()
    for section, said in expected.items():
        if said is None:
            assert plain[section] is None
        elif section == "optimizer":
            assert plain[section] == {**said, "groups": None, "others": None}
        else:
            assert _part(plain[section], said) == said
    assert BASE["train"] == {"epochs": 2, "batch_size": 8}, "the caller's own is not changed"


def _part(found: Any, said: Any) -> Any:
    return {name: _part(found[name], below) for name, below in said.items()} if isinstance(said, dict) else found


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train.epoch": 3}, "lockstep.train: train.epoch=3: train.epoch: unknown key, did you mean epochs?"),
        (
            {"train": {"epochs": 0}},
            "lockstep.train: train.epochs=0: train.epochs: input should be greater than 0, got 0",
        ),
        ({"task": "other.py:Mine"}, "lockstep.train: task='other.py:Mine': task: there is no file"),
        ({"seed.x": 3}, "lockstep.train: seed.x=3: seed is 0, which has no keys below"),
        ({"train": {1: 2}}, "lockstep.train: train[1]=2: train[1]: keys should be strings"),
        (
            {"task": {"made": np.ones(2)}},
            "lockstep.train: task.made=array([1., 1.]): task: made: must be plain data (text, ",
        ),
        (
            {"task": {"labels": [{0: "cat"}]}},
            "lockstep.train: task.labels=[{0: 'cat'}]: task: labels[0]: the keys of a mapping",
        ),
    ],
)
def test_a_mistake_is_told_by_the_name_that_it_was_given_by(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        _loaded({**BASE, "seed": 0}, values)
    assert str(refused.value).startswith(message)


def test_one_process_gets_what_ranks_get_from_the_config_of_the_run(here: Path) -> None:
    """Tuples as lists, paths as text, and the numbers of numpy and torch as those of Python."""
    given = {"task": {"sizes": (np.int64(3), 4), "at": here, "rate": np.float32(0.5)}, "train.batch_size": np.int64(4)}
    config = _loaded(BASE, given)
    arguments = {name: config.task.arguments[name] for name in ("sizes", "at", "rate")}
    assert arguments == {"sizes": [3, 4], "at": str(here), "rate": 0.5}
    assert config == from_plain(parse_yaml(to_yaml(config.plain())), "config.yaml") and config.train.batch_size == 4


def test_a_class_stands_for_its_import_path(here: Path, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    assert _loaded({}, {"task": module.Mine}).task.type == f"{here}/mine.py:Mine"
    given = _loaded({"task": {"type": module.Mine, "hidden": 7}}, {})
    assert (given.task.type, given.task.arguments) == (f"{here}/mine.py:Mine", {"hidden": 7})


def test_what_ranks_cannot_import_is_refused(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class Inside:
        pass

    typed = type("Typed", (), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Typed", typed, raising=False)
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    for task, why in [
        (Inside, "is defined inside of something else"),
        (module.Mine(), "every rank makes its own"),
        (typed, "was typed into this session"),
        (3, "every rank makes its own"),
    ]:
        with pytest.raises(ConfigError, match=why):
            lockstep.train(BASE, task=task, processes=2)
    with pytest.raises(ConfigError, match="the config must be a file, a mapping or a RunConfig, got type"):
        lockstep.train(module.Mine)


def test_a_file_that_trains_when_it_is_imported_is_told(here: Path) -> None:
    (here / "unguarded.py").write_text("import lockstep\nclass Mine: pass\nlockstep.train({'task': 'mine.py:Mine'})\n")
    with pytest.raises(LaunchError, match='Put the call under `if __name__ == "__main__":`'):
        objects.import_object(f"{here}/unguarded.py:Mine", "task")
    assert not objects.loading
    assert "unguarded" not in sys.modules
    sys.path.remove(str(here))


TYPED = """
import torch, lockstep
from torch.utils.data import TensorDataset

class Line(lockstep.Task):
    def model(self):
        return torch.nn.Linear(1, 1)

    def train_data(self):
        return TensorDataset(torch.ones(4, 1), torch.ones(4, 1))

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()
"""


def test_a_task_that_was_typed_in_trains_on_one_process(tmp_path: Path) -> None:
    code = f"{TYPED}\nprint(lockstep.train(task=Line, processes=1, runtime='cpu')['status'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.endswith("completed\n"), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("if True:\n    x = 1\nlockstep.train({'task': 'x.py:X'}, processes=2)", ":9: lockstep.train is called at the"),
    ],
)
def test_a_script_that_ranks_cannot_import_is_told_what_to_move(script: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(TYPED.replace("Line", "X"))
    (tmp_path / "mine.py").write_text(f"import lockstep\n\ndef main(run):\n    pass\n\n\n{script}\n")
    done = subprocess.run([sys.executable, "mine.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("lockstep.errors.LaunchError:") and told in last, done.stderr
    assert not (tmp_path / "runs").exists()


class Held:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def main(self, run: lockstep.Run) -> None:
        pass


def _nested() -> Any:
    def inner(run: lockstep.Run) -> None:
        pass

    return inner


@pytest.mark.parametrize(
    ("main", "told"),
    [
        (
            lambda run: run,
            r"<lambda> cannot be sent to its processes \(.*\)\. Define it at the top level of the script",
        ),
        (partial(_nested()), r"_nested.<locals>.inner cannot be sent to its processes .* Define it at the top level"),
        (Held().main, r"Held.main cannot be sent to its processes \(cannot pickle '_thread.lock' object\)\. Make what"),
    ],
)
def test_a_function_that_cannot_be_sent_to_ranks_is_named(
    main: Any, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "script.py", raising=False)  # a process of xdist has none
    with pytest.raises(LaunchError, match=told):
        lockstep.launch(main, processes=2, runtime="cpu", out=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
