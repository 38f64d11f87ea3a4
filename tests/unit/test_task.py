"""The user's code: found, made, and what is wrong with it said."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import TASK_FILE
from lockstep.config.load import load
from lockstep.config.schema import Component
from lockstep.errors import ConfigError
from lockstep.train.task import Task, construct, create_task, import_object

WHOLE = """
import lockstep

class Whole(lockstep.Task):
    def __init__(self, hidden: int = 3, *, rate: float = 0.1): self.hidden, self.rate = hidden, rate
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
        del sys.modules[name]


def component(type: str | Path, **arguments: Any) -> Component:
    return Component.model_validate({"type": str(type), **arguments})


def test_a_task_is_made_from_its_file_with_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "whole_task.py").write_text(WHOLE)
    task = create_task(component(f"{tmp_path}/whole_task.py:Whole", hidden=7, rate=0.5))
    assert isinstance(task, Task)
    assert (task.hidden, task.rate) == (7, 0.5)  # type: ignore[attr-defined]


def test_a_task_file_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_task.py").write_text(WHOLE)
    (tmp_path / "importing_task.py").write_text("from neighbour_of_task import Whole\nclass Mine(Whole): pass\n")
    assert create_task(component(f"{tmp_path}/importing_task.py:Mine")).hidden == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["collections:OrderedDict", "collections.OrderedDict", "os.path:join", "os.path.join"])
def test_an_object_is_imported_by_its_path(text: str) -> None:
    assert import_object(text, "optimizer").__name__ in ("OrderedDict", "join")


def test_a_file_is_loaded_once(tmp_path: Path) -> None:
    (tmp_path / "once_task.py").write_text(WHOLE)
    one, other = (import_object(f"{tmp_path}/once_task.py:Whole", "task") for _ in range(2))
    assert one is other


def test_a_module_next_to_the_config_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `load` accepted must be importable where the task is made."""
    (tmp_path / "beside_the_config.py").write_text(WHOLE)
    (tmp_path / "config.yaml").write_text("task: beside_the_config:Whole\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert isinstance(create_task(load(tmp_path / "config.yaml").task), Task)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no_such_package.module:Mine", "task: there is no module 'no_such_package'"),
        ("collections.no_such_part:Mine", "task: there is no module 'collections.no_such_part'"),
        ("collections:NoSuchName", "task: collections has no 'NoSuchName', got 'collections:NoSuchName'"),
        ("collections:OrderedDict", "task: collections:OrderedDict is not a class derived from lockstep.Task"),
        ("os.path:join", "task: os.path:join is not a class derived from lockstep.Task"),
    ],
)
def test_what_is_no_task_is_told(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        create_task(component(text))
    assert str(refused.value).startswith(message)


def test_a_file_that_is_gone_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task: there is no file .*gone\.py"):
        create_task(component(f"{tmp_path}/gone.py:Mine"))


def test_a_file_without_that_name_is_told(tmp_path: Path) -> None:
    (tmp_path / "other_task.py").write_text(WHOLE)
    with pytest.raises(ConfigError, match=r"other_task\.py has no 'Hole'"):
        create_task(component(f"{tmp_path}/other_task.py:Hole"))


def test_an_error_inside_of_a_task_file_is_the_users_to_see(tmp_path: Path) -> None:
    (tmp_path / "importing_nothing.py").write_text("import a_package_that_is_not_there\n")
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        create_task(component(f"{tmp_path}/importing_nothing.py:Mine"))


def test_an_error_inside_of_a_task_module_is_the_users_to_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_importing_nothing.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        create_task(component("module_importing_nothing:Mine"))


def test_a_method_that_is_missing_is_told_with_its_signature() -> None:
    with pytest.raises(ConfigError) as refused:
        create_task(component(f"{TASK_FILE}:NoLoss"))
    assert str(refused.value).startswith("task: NoLoss in ")
    assert "does not define loss(self, model" in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hiden": 3}, "got an unexpected keyword argument 'hiden'"),
        ({"hidden": 3, "depth": 2}, "got an unexpected keyword argument 'depth'"),
    ],
)
def test_an_argument_that_does_not_fit_is_told_with_those_that_do(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    (tmp_path / "fitting_task.py").write_text(WHOLE)
    with pytest.raises(ConfigError) as refused:
        create_task(component(f"{tmp_path}/fitting_task.py:Whole", **arguments))
    assert str(refused.value).startswith(f"task: Whole cannot be made from {arguments!r}: {message}")
    assert str(refused.value).endswith("Its arguments are hidden, rate")


class Takes:
    def __init__(self, parameters: Any, lr: float) -> None:
        self.parameters, self.lr = parameters, lr


@pytest.mark.requirement("D16")
def test_an_optimizer_is_made_with_its_parameters_first() -> None:
    made = construct(Takes, {"lr": 0.1}, "optimizer", ["p"])
    assert (made.parameters, made.lr) == (["p"], 0.1)


def test_an_argument_that_is_missing_is_told_by_its_yaml_path() -> None:
    with pytest.raises(
        ConfigError, match=r"^optimizer: Takes cannot be made from \{\}: missing a required argument: 'lr'"
    ):
        construct(Takes, {}, "optimizer", ["p"])


def test_an_error_inside_of_a_constructor_is_the_users_to_see() -> None:
    class Fussy:
        def __init__(self, hidden: int) -> None:
            raise TypeError("not that many")

    with pytest.raises(TypeError, match="not that many"):
        construct(Fussy, {"hidden": 3}, "task")
