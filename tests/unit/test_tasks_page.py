"""docs/tasks.md lists everything that a task, and a callback, may define, as it is called."""

from __future__ import annotations

import inspect
import re

import pytest

from conftest import ROOT
from lockstep.tasks.callbacks import STATE, Callback
from lockstep.tasks.create import WITHOUT_BASE
from lockstep.tasks.task import Task

PAGE = (ROOT / "docs" / "tasks.md").read_text()


def listed(section: str) -> dict[str, list[str]]:
    """Methods in the first column of the table of a section, with the names of their arguments."""
    cells = re.findall(r"^\| (`.+?`) \|", section, re.M)
    calls = [call for cell in cells for call in re.findall(r"`(\w+)\((.*?)\)`", cell)]
    return {name: [each.strip() for each in arguments.split(",") if each.strip()] for name, arguments in calls}


def defined(cls: type) -> dict[str, list[str]]:
    methods = {name: each for name, each in vars(cls).items() if not name.startswith("_") and inspect.isfunction(each)}
    return {name: list(inspect.signature(each).parameters)[1:] for name, each in methods.items()}


def test_every_method_of_a_task_is_listed_with_its_arguments() -> None:
    found = listed(PAGE.split("\n## ")[0])
    without_base = {name: found.pop(name) for name in WITHOUT_BASE if name not in vars(Task)}
    assert found == defined(Task)
    assert without_base == {"collate": ["examples"]}


def test_every_method_of_a_callback_is_listed_with_its_arguments() -> None:
    found = listed(PAGE.split("\n## Callbacks\n")[1])
    state = {name: found.pop(name) for name in STATE}
    assert found == defined(Callback)
    assert state == {"state_dict": [], "load_state_dict": ["state"]}


@pytest.mark.parametrize("cls", [Task, Callback])
def test_every_method_says_what_it_is_for(cls: type) -> None:
    methods = [each for name, each in vars(cls).items() if not name.startswith("_") and inspect.isfunction(each)]
    assert not [each.__name__ for each in methods if not each.__doc__]
