"""The schema for editors says what the loader does, and a resolved config reads back as itself."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from conftest import ROOT
from lockstep.config.load import load, parse_yaml
from lockstep.config.schema import RunConfig
from lockstep.record import run_folder

EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
TEMPLATE = ROOT / "src" / "lockstep" / "templates" / "config.yaml"
TASK = {"type": "task.py:Mine"}


def schema_problems(config: Any) -> list[str]:
    schema = RunConfig.model_json_schema(by_alias=True)
    jsonschema.Draft202012Validator.check_schema(schema)
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(config)]


def written_and_read(config: RunConfig) -> RunConfig:
    """As the ranks get it from the launcher: through config.yaml in the run's folder."""
    with tempfile.TemporaryDirectory() as folder:
        run_folder.write_config(Path(folder), config)
        return run_folder.read_config(Path(folder))


@pytest.mark.parametrize("path", [*EXAMPLES, TEMPLATE], ids=lambda path: path.name)
def test_the_json_schema_accepts_what_we_ship(path: Path) -> None:
    assert schema_problems(parse_yaml(path.read_text())) == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_load(path: Path) -> None:
    assert load(path).task.type.startswith((str(ROOT / "examples"), "lockstep.adapters."))


@pytest.mark.requirement("D12")
def test_the_template_names_every_key_there_is() -> None:
    """examples/digits.yaml is the configuration template: a key that it lacks is one that nobody finds."""
    template = parse_yaml((ROOT / "examples" / "digits.yaml").read_text())
    every = RunConfig.model_validate(template).plain()

    def missing(have: Any, want: Any, at: str) -> list[str]:
        if not isinstance(want, dict):
            return []
        lacking = [f"{at}{key}" for key in want if key not in have]
        return lacking + [name for key in want if key in have for name in missing(have[key], want[key], f"{at}{key}.")]

    set_by_commands = ("after",)
    lacking = [name for name in missing(template, every, "") if name not in ("data.split.test", *set_by_commands)]
    assert lacking == []


@pytest.mark.parametrize(
    "config",
    [
        {"task": TASK, "trian": {}},
        {"task": TASK, "train": {"batchsize": 3}},
        {"task": TASK, "checkpoint": {"keep": {"first": 1}}},
        {"task": TASK, "train": {"batch_size": "many"}},
        {"task": TASK, "train": {"batch_size": 0}},
        {"task": TASK, "log": {"every": "soon"}},
        {"task": TASK, "train": {"compile": "block"}},
        {"task": TASK, "train": {"activation_checkpointing": True}},
        {"task": TASK, "validate": {"on": "rank1"}},
        {"task": TASK, "timeouts": {"collective": -5}},
        {"train": {}},
    ],
)
def test_the_json_schema_rejects_what_the_loader_rejects(config: dict[str, Any]) -> None:
    assert schema_problems(config)
    with pytest.raises(ValidationError):
        RunConfig.model_validate(config)


@pytest.mark.parametrize(
    "config",
    [
        {"task": "task.py:Mine"},
        {"task": TASK, "strategy": "ddp"},
        {"task": TASK, "launch": "local"},
        {"task": TASK, "optimizer": "torch.optim.SGD"},
        {"task": TASK, "scheduler": "pkg.schedulers:Mine"},
        {"task": TASK, "optimizer": {"type": "torch.optim.SGD", "lr": 0.1}},
        {"task": TASK, "timeouts": {"collective": "5 minutes"}},
        {"task": TASK, "timeouts": {"collective": 5}},
        {"task": TASK, "checkpoint": {"async": False, "every": None}},
        {"task": TASK, "processes": "auto"},
        {
            "task": TASK,
            "train": {"compile": "blocks", "activation_checkpointing": "layers.*"},
            "strategy": {"blocks": "layers.*"},
        },
    ],
)
def test_the_json_schema_accepts_what_the_loader_accepts(config: dict[str, Any]) -> None:
    RunConfig.model_validate(config)
    assert schema_problems(config) == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_reads_back_from_its_resolved_form(path: Path) -> None:
    config = load(path)
    assert written_and_read(config) == config


@pytest.mark.parametrize(
    "value",
    [".inf", "-.inf", "2024-01-01", "'2024-01-01'", "'1e3'", "'yes'", "yes", "'null'", "1:30", "'0x10'", "[]", "{}"],
)
def test_an_argument_reaches_the_task_as_it_was_read(tmp_path: Path, value: str) -> None:
    """The launcher reads the file and the ranks read the resolved config: both must see the same argument."""
    (tmp_path / "task.py").write_text("class Mine: pass\n")
    (tmp_path / "config.yaml").write_text(f"task: {{type: task.py:Mine, argument: {value}}}\n")
    config = load(tmp_path / "config.yaml")
    assert written_and_read(config).task.arguments == config.task.arguments


def optional(**values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=values)


counts = st.integers(1, 10**9)
intervals = st.builds(lambda n, unit: f"{n} {unit}", counts, st.sampled_from(["steps", "epochs", "minutes", "s"]))
fractions = st.integers(1, 99).map(lambda n: {"train": n / 100, "val": (100 - n) / 100})
modes = st.sampled_from(["min", "max"])
positive = st.floats(1e-6, 1e6)
# Text that YAML could take for something else once it is written without quotes.
tricky = st.sampled_from(
    ["1e-3", "1e5", "yes", "on", "null", "~", "0x10", "010", "1:30", "1_000", ".5", "2024-01-01", "", "#", "a: b"]
)
arguments = st.dictionaries(
    st.sampled_from(["hidden", "text", "rate", "layers"]),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | tricky
        | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=5,
    ),
)
configs = st.fixed_dictionaries(
    {"task": arguments.map(lambda values: {"type": "task.py:Mine", **values})},
    optional={
        "name": st.sampled_from(["run", "1e3", "2024", "a.b-c"]),
        "seed": st.integers(0, 2**63 - 1),
        "processes": st.just("auto") | st.integers(1, 64),
        "strategy": st.sampled_from(["auto", "single", "ddp"]) | optional(bucket_mb=counts, output_device=counts),
        "train": optional(
            batch_size=counts, accumulate=counts, clip_norm=positive, compile=st.sampled_from([False, True, "blocks"])
        ),
        "optimizer": st.just("torch.optim.SGD") | positive.map(lambda lr: {"type": "torch.optim.SGD", "lr": lr}),
        "scheduler": intervals.map(lambda every: {"type": "pkg.mod:Scheduler", "every": every, "gamma": 0.5}),
        "data": optional(workers=st.integers(0, 4), shuffle=st.booleans(), split=fractions),
        "validate": optional(every=intervals, on=st.sampled_from(["all", "rank0"]), batch_size=counts),
        "early_stop": optional(
            criteria=st.lists(optional(metric=st.just("val/x"), mode=modes, delta=positive), min_size=1, max_size=3),
            combine=st.sampled_from(["any", "all"]),
            patience=counts,
        ),
        "checkpoint": optional(every=st.none() | intervals, keep=optional(last=counts), **{"async": st.booleans()}),
        "log": optional(every=intervals, jsonl=st.booleans(), tensorboard=st.booleans()),
        "launch": optional(port=st.integers(1, 65535)),
        "timeouts": optional(collective=positive, stop=st.just("5 minutes")),
    },
)  # fmt: skip


@settings(deadline=None)
@given(raw=configs)
def test_any_config_reads_back_from_its_resolved_form(raw: dict[str, Any]) -> None:
    config = RunConfig.model_validate(raw)
    again = written_and_read(config)
    assert again == config
    assert again.plain() == config.plain()
