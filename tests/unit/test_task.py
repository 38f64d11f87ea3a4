"""The user's code: found, made, and what is wrong with it said."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import TASK_FILE
from lockstep import import_path
from lockstep.config.load import load
from lockstep.config.objects import check_arguments, construct, import_object
from lockstep.config.schema import Component, RunConfig
from lockstep.errors import ConfigError
from lockstep.tasks.create import check_names, create_task
from lockstep.tasks.evaluate import data_named
from lockstep.tasks.task import Task

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


class _TestDataAlone(Task):
    def model(self) -> Any:
        raise NotImplementedError

    train_data = loss = model

    def val_data(self) -> Any:
        raise FileNotFoundError("on another machine")

    def test_data(self) -> list[int]:
        return [1, 2]


def test_test_data_that_was_asked_for_needs_no_validation_data() -> None:
    config = RunConfig.model_validate({"task": "a:B"})
    assert data_named(_TestDataAlone(), config, "test") == {"test": [1, 2]}
    with pytest.raises(FileNotFoundError):
        data_named(_TestDataAlone(), config, "val")


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


def test_a_package_of_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by `python -m`: the console script has its own folder on the path instead."""
    (tmp_path / "package_here").mkdir()
    (tmp_path / "package_here" / "module.py").write_text(WHOLE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", str(tmp_path))])
    assert isinstance(create_task(component("package_here.module:Whole")), Task)


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


# Methods that look like ours


def defining(*methods: str, bases: tuple[type, ...] = ()) -> type[Task]:
    """A class with these methods, beside all that a task has to have."""
    needed = ("model", "train_data", "loss")
    body = {name: lambda self, *args: None for name in (*needed, *methods)}
    return type("Mine", (*bases, Task), body)


@pytest.mark.parametrize(
    ("method", "right"),
    [
        ("collate_fn", "collate"),
        ("configure_optimizers", "optimizer"),
        ("validation_data", "val_data"),
        ("val_dataloader", "val_data"),
        ("val_loss", "metrics"),
        ("shard_rule", "shard_rules"),
        ("train_step", "training_step"),
    ],
)
def test_a_method_by_the_name_of_another_framework_is_refused_with_ours(method: str, right: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_names(defining(method), Task)
    assert str(refused.value) == (
        f"task: Mine defines {method}, which Lockstep does not call: its name here is {right}"
    )
    with pytest.raises(ConfigError, match=method):  # from another class that is not ours as well
        check_names(defining(bases=(type("Base", (), {method: lambda self: None}),)), Task)
    check_names(defining(method, right), Task)  # which may well call it


def test_a_method_that_is_missing_is_told_with_the_one_in_its_place() -> None:
    body = dict.fromkeys(("get_model", "training_data", "loss"), lambda self, *args: None)
    sys.modules[__name__].Mislabeled = type("Mislabeled", (Task,), body)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError) as refused:
        create_task(component(f"{__name__}:Mislabeled"))
    assert "does not define model(self)" in str(refused.value)
    assert str(refused.value).endswith(
        "; it has get_model, whose name here is model; it has training_data, whose name here is train_data"
    )


@pytest.mark.parametrize(
    "methods",
    [
        ("training_step", "criterion", "compute_loss"),
        ("loss_fn", "get_model", "train_dataset", "compute_loss"),  # of what there is: helpers
        ("collate", "val_data", "test_data", "optimizer", "scheduler", "metrics", "should_stop", "shard_rules"),
        ("tokenize", "encode", "prepare", "forward", "download", "augment", "_collate_fn", "predict", "generate"),
    ],
)
def test_helpers_of_ones_own_are_left_alone(methods: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    check_names(defining(*methods), Task)
    assert not caplog.records


def test_an_attribute_that_is_no_method_is_left_alone() -> None:
    cls = defining()
    cls.val_dataset = "a folder"  # type: ignore[attr-defined]
    check_names(cls, Task)


def test_a_method_that_is_missing_is_told_with_its_signature() -> None:
    with pytest.raises(ConfigError) as refused:
        create_task(component(f"{TASK_FILE}:NoLoss"))
    assert str(refused.value).startswith("task: NoLoss in ")
    assert "does not define loss(self, model" in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hiden": 3}, "task.hiden: Whole has no such argument, did you mean hidden? (value 3)"),
        ({"hidden": 3, "depth": 2}, "task.depth: Whole has no such argument, valid are hidden, rate (value 2)"),
        ({"self": 3}, "task.self: Whole has no such argument"),
    ],
)
def test_an_argument_that_does_not_fit_is_told_with_those_that_do(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    (tmp_path / "fitting_task.py").write_text(WHOLE)
    with pytest.raises(ConfigError) as refused:
        create_task(component(f"{tmp_path}/fitting_task.py:Whole", **arguments))
    assert str(refused.value).startswith(message)


def test_an_abbreviation_and_what_it_stands_for_are_near() -> None:
    with pytest.raises(ConfigError) as refused:
        check_arguments(torch.optim.AdamW, {"learning_rate": 0.1, "wd": 0.0, "lr": 1.0}, "optimizer", [])
    assert str(refused.value).splitlines() == [
        "optimizer.learning_rate: AdamW has no such argument, did you mean lr? (value 0.1)",
        "optimizer.wd: AdamW has no such argument, did you mean weight_decay? (value 0.0)",
    ]


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


# Where modules are found


@pytest.fixture
def path_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(import_path, "_task_folders", [])


@pytest.mark.usefixtures("path_as_before")
def test_the_folder_of_a_task_comes_behind_all_that_is_installed_and_the_newest_first(tmp_path: Path) -> None:
    before = list(sys.path)
    folders = [str(tmp_path / name) for name in ("first", "second")]
    for folder in (*folders, folders[0]):
        import_path.add_task_folder(folder)
    assert sys.path == [*before, *folders]
    import_path.add_task_folder(before[0])  # where somebody else put it
    assert sys.path == [*before, *folders]


@pytest.mark.usefixtures("path_as_before")
@pytest.mark.parametrize("name", ["random", "yaml"])
def test_a_task_in_a_file_with_the_name_of_another_module_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / f"{name}.py"
    file.write_text("raise AssertionError('executed')")
    known = importlib.import_module(name)
    with pytest.raises(ConfigError, match=f"{name}.py has the name of another module and would hide it: rename"):
        import_object(f"{file}:Mine", "task")
    assert sys.modules[name] is known


def test_only_ours_are_told_to_look_elsewhere_and_pass_it_on_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; print(bool(sys.flags.safe_path))"
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    with import_path.safe_interpreters():
        inside = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        import_path.forget_safe_interpreters()
        assert "PYTHONSAFEPATH" not in os.environ
    assert (inside.stdout.strip(), "PYTHONSAFEPATH" in os.environ) == ("True", False)
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    with import_path.safe_interpreters():
        import_path.forget_safe_interpreters()
    assert os.environ["PYTHONSAFEPATH"] == "1"


def test_what_torch_itself_refuses_is_told_by_its_place_in_the_config() -> None:
    """The traceback of a mistake in the config would lead into torch."""
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    for value, why in (("fast", "not supported"), (-1, "Invalid learning rate: -1")):
        with pytest.raises(
            ConfigError, match=rf"optimizer: AdamW cannot be made with optimizer.lr: {value!r}: .*{why}"
        ):
            construct(torch.optim.AdamW, {"lr": value}, "optimizer", parameters)
