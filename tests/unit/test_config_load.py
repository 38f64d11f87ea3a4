"""Every mistake in a config is told with its place, its value and what to do, before any process starts."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config.load import check_strategy, from_plain, load, uneven_shares, with_values
from lockstep.config.schema import After, RunConfig, Train
from lockstep.config.strategy import Strategy
from lockstep.config.values import Interval
from lockstep.errors import ConfigError

Load = Callable[..., RunConfig]
TASK = "class Mine:\n    pass\n"


@pytest.fixture
def loaded(tmp_path: Path) -> Load:
    """Load a config from its text, in a folder with a task.py."""
    (tmp_path / "task.py").write_text(TASK)

    def read(text: str, *overrides: str) -> RunConfig:
        (tmp_path / "config.yaml").write_text(text)
        return load(tmp_path / "config.yaml", overrides)

    return read


@pytest.fixture
def problems(loaded: Load, tmp_path: Path) -> Callable[..., list[str]]:
    """The lines of the error that a config gives, with the path of the config shortened to its name."""

    def lines(text: str, *overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as refused:
            loaded(text, *overrides)
        return str(refused.value).replace(f"{tmp_path}/", "").splitlines()

    return lines


Problems = Callable[..., list[str]]


# What is read


def test_a_config_needs_no_more_than_a_task(loaded: Load) -> None:
    config = loaded("task: task.py:Mine\n")
    assert config.train == Train()
    assert config.train.epoch_limit == 1


def test_the_file_of_a_task_is_found_next_to_the_config(loaded: Load, tmp_path: Path) -> None:
    assert loaded("task: task.py:Mine\n").task.type == f"{tmp_path}/task.py:Mine"


def test_further_keys_of_a_component_are_its_arguments(loaded: Load) -> None:
    config = loaded("task: {type: task.py:Mine, hidden: 3}\noptimizer: {type: torch.optim.SGD, lr: 0.1}\n")
    assert config.task.arguments == {"hidden": 3}
    assert config.optimizer is not None
    assert config.optimizer.arguments == {"lr": 0.1}


def test_a_name_alone_stands_for_a_component(loaded: Load) -> None:
    config = loaded("task: task.py:Mine\nstrategy: ddp\noptimizer: torch.optim.SGD\nlaunch: local\n")
    assert config.strategy.type == "ddp"
    assert config.optimizer is not None
    assert config.optimizer.type == "torch.optim.SGD"


def test_words_and_numbers_of_yaml_mean_what_they_look_like(loaded: Load) -> None:
    config = loaded("task: {type: task.py:Mine, answer: no, lr: 1e-3, flag: true}\nvalidate: {on: rank0}\n")
    assert config.validation.on == "rank0"
    assert config.task.arguments == {"answer": "no", "lr": 0.001, "flag": True}


# What is refused, and how

TASKED = "task: task.py:Mine\n"


def test_an_unknown_key_is_told_with_its_place_its_value_and_the_nearest_name(problems: Problems) -> None:
    assert problems(TASKED + "train:\n  batchsize: 64\n") == [
        "config.yaml:3: train.batchsize: unknown key, did you mean batch_size? (value 64)"
    ]


@pytest.mark.parametrize(
    ("text", "name", "nearest"),
    [
        ("trian: {}", "trian", "train"),
        ("Train: {epochs: 1}", "Train", "train"),
        ("strategy: {find_unused: true}", "strategy.find_unused", "find_unused_parameters"),
        ("data: {worker: 1}", "data.worker", "workers"),
        ("data: {split: {train: 0.5, valid: 0.5}}", "data.split.valid", "val"),
        ("validate: {evry: 1 epoch}", "validate.evry", "every"),
        ("early_stop: {patiense: 1}", "early_stop.patiense", "patience"),
        ("early_stop: {criteria: [{metrics: val/loss}]}", "early_stop.criteria[0].metrics", "metric"),
        ("checkpoint: {asynch: false}", "checkpoint.asynch", "async"),
        ("checkpoint: {keep: {lasst: 1}}", "checkpoint.keep.lasst", "last"),
        ("log: {tensor_board: true}", "log.tensor_board", "tensorboard"),
        ("launch: {max_restart: 1}", "launch.max_restart", "max_restarts"),
    ],
)
def test_the_nearest_name_is_offered_in_every_section(problems: Problems, text: str, name: str, nearest: str) -> None:
    assert f"config.yaml:2: {name}: unknown key, did you mean {nearest}?" in "\n".join(problems(TASKED + text))


def test_where_no_name_is_near_all_valid_ones_are_listed(problems: Problems) -> None:
    (line,) = problems(TASKED + "train: {qqq: 1}")
    assert "unknown key, valid are deterministic, exact, epochs, steps, tokens, limit, overfit, batch_size" in line


@pytest.mark.requirement("D17")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {batch_size: many}", "train.batch_size: input should be a valid integer, got 'many'"),
        ("train: {batch_size: 32.5}", "train.batch_size: input should be a valid integer, got 32.5"),
        ("train: {batch_size: '32'}", "train.batch_size: input should be a valid integer, got '32'"),
        ("train: {batch_size: 0}", "train.batch_size: input should be greater than 0, got 0"),
        ("train: {epochs: -1}", "train.epochs: input should be greater than 0, got -1"),
        ("train: {clip_norm: .nan}", "train.clip_norm: input should be greater than 0, got nan"),
        (
            "train: {precision: bf6}",
            "train.precision: must be one of float32, tf32, bf16, fp16 or fp8; did you mean bf16?, got 'bf6'",
        ),
        (
            "train: {compile: 1}",
            "train.compile: must be true, false, blocks, or a mapping with mode, dynamic, blocks and cache",
        ),
        ("train: {compile: block}", "train.compile: must be true, false, blocks, or a mapping"),
        ("train: {compile: {mod: x}}", "train.compile.mod: unknown key, did you mean mode?"),
        ('"(": 1 step', "(: unknown key, valid are"),
        (
            "optimizer: {type: AdamW, groups: [{match: a, map: {1.5: x}}]}",
            "optimizer.groups[0]: map: the keys of a mapping are text, got 1.5: quote it",
        ),
        (
            "log: {mine: {type: a:B, since: !!timestamp 2026-01-01}}",
            "log.mine: since: must be plain data (text, numbers, lists, mappings), got a date",
        ),
        ("init_from: ~nobody-here/x", "init_from: there is no home folder of that user on this machine, got"),
        ("after: {do: evaluate, run: a, step: 1}", "after: unknown key"),
        ("train: {compile: {mode: fast}}", "train.compile.mode: must be one of default, reduce-overhead, max-autotune"),
        ("train: {ema: 1.5}", "train.ema: input should be less than 1, got 1.5"),
        ("train: {ema: {decay: 0.9, every: 1 epoch}}", "train.ema.every: averages are taken every so many steps"),
        ("train: {freeze: []}", "train.freeze: give at least one pattern of parameter names"),
        (
            "scheduler: cosin",
            "scheduler: must be one of constant, linear, cosine or polynomial; did you mean cosine?",
        ),
        (
            "scheduler: {type: cosine, warmup: soon}",
            'scheduler.warmup: must be a number of steps, 500, of tokens, "1e8 tokens", or a',
        ),
        ("scheduler: {type: cosine, warm: 3}", "scheduler.warm: unknown key, did you mean warmup?"),
        (
            "scheduler: {type: constant, final: 0.1}",
            "scheduler: a constant schedule stays where it is, so it has no final: 0.1",
        ),
        ("scheduler: {type: linear, power: 2}", "scheduler: power: 2 is for type: polynomial, but the type is linear"),
        ("optimizer: {type: AdamW, groups: [{lr: 1}]}", "optimizer.groups[0].match: missing"),
        (
            "strategy: {type: fsdp, static_graph: true}",
            "strategy: static_graph is for strategy: ddp, but the strategy is fsdp",
        ),
        (
            "strategy: {comm_hook: bf16}",
            "strategy.comm_hook: must be bf16_compress, fp16_compress, powerSGD, or an import path",
        ),
        ("strategy: {comm_hook: {type: bf16_compress, rank: 2}}", "strategy.comm_hook: rank is for type: powerSGD"),
        (
            "train: {activation_checkpointing: true}",
            "train.activation_checkpointing: must be blocks, or a pattern over the names of modules, or null",
        ),
        ("strategy: {blocks: ''}", "strategy.blocks: string should have at least 1 character, got ''"),
        ("train: {epochs: 1, steps: 2}", "train: give epochs or steps, not both (epochs: 1, steps: 2)"),
        ("seed: -1", "seed: input should be greater than or equal to 0, got -1"),
        ("seed: true", "seed: input should be a valid integer, got True"),
        ("runtime: tpu", "runtime: must be one of auto, cpu, cuda or xla"),
        (
            "strategy: ddpp",
            "strategy: must be one of auto, single, ddp, fsdp, hsdp, tensor, threads or spmd; did you mean ddp?",
        ),
        ("data: {workers: -1}", "data.workers: input should be greater than or equal to 0, got -1"),
        ("data: {prefetch: 2}", "data: prefetch: 2 needs workers to do it; set data.workers to 1 or more"),
        ("data: {shuffle: 'yes'}", "data.shuffle: input should be a valid boolean, got 'yes'"),
        ("validate: {on: rank1}", "validate.on: must be one of all or rank0; did you mean rank0?, got 'rank1'"),
        ("validate: {every: 5}", 'validate.every: not an interval; write for example "50 steps"'),
        ("checkpoint: {every: 1.5 epochs}", "checkpoint.every: epochs come in whole numbers"),
        ("checkpoint: {keep: {last: 0}}", "checkpoint.keep.last: input should be greater than 0, got 0"),
        ("early_stop: {patience: 0}", "early_stop.patience: input should be greater than 0, got 0"),
        ("early_stop: {combine: some}", "early_stop.combine: must be one of any or all"),
        ("launch: {port: 65536}", "launch.port: input should be less than 65536, got 65536"),
        ("timeouts: {collective: 5 parsecs}", "timeouts.collective: not a duration; write seconds as a number"),
        ("launch: {type: shh}", "launch.type: must be one of local, "),
        ("launch: {hosts: [a]}", "launch: hosts is for launch: ssh, but launch.type is local"),
        ("launch: {type: ssh, hosts: ['-oProxyCommand=id']}", "launch.hosts[0]: not the name of a host"),
        ("launch: {type: ssh, hosts: ['a b']}", "launch.hosts[0]: not the name of a host"),
        ("launch: {type: ssh, hosts: [a], network: lan}", "launch.network: not a network"),
        ("name: a/b", "name: string should match pattern"),
        ("optimizer: sgd", 'optimizer: not an import path; write "package.module:Name" or "file.py:Name", got \'sgd\''),
        ("train: []", "train: "),
        ("train:", "train: "),
        ("early_stop: true", "early_stop: "),
    ],
)
def test_a_value_that_cannot_be_is_told_with_its_place(problems: Problems, text: str, message: str) -> None:
    lines = problems(TASKED + text)
    assert any(line.startswith(f"config.yaml:2: {message}") for line in lines), lines


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "runtime: cpu\ntrain: {precision: fp16}",
            "train.precision: fp16 is for CUDA GPUs, but the runtime is cpu: use bf16",
        ),
        ("strategy: {static_graph: true}\ntrain: {accumulate: 2}", "but with train.accumulate: 2 it does not"),
    ],
)
def test_values_that_do_not_go_together_are_told_with_both(problems: Problems, text: str, message: str) -> None:
    (line,) = problems(TASKED + text)
    assert message in line


@pytest.mark.parametrize(
    "text",
    [
        "processes: two",
        "processes: 0",
        "early_stop: {criteria: [{mode: up}]}",
        "early_stop: {criteria: []}",
        "train: {batch_size: 0}",
        "data: {split: {train: 0.5, val: 0.6}}",
    ],
)
def test_one_mistake_is_told_in_one_line(problems: Problems, text: str) -> None:
    assert len(problems(TASKED + text)) == 1


@pytest.mark.parametrize(
    "text", ["timeouts: {collective: .inf}", "timeouts: {rendezvous: .inf}", "timeouts: {stop: .inf}"]
)
def test_a_wait_without_end_is_refused(problems: Problems, text: str) -> None:
    assert "config.yaml:2: timeouts." in problems(TASKED + text)[0]


@pytest.mark.requirement("D17")
@pytest.mark.parametrize(
    ("split", "shown"),
    [
        ("{train: 0.8, val: 0.3}", "train 0.8 + val 0.3 + test 0 = 1.1"),
        ("{train: 0.5, val: 0.2, test: 0.2}", "train 0.5 + val 0.2 + test 0.2 = 0.9"),
        ("{train: 0.8}", "train 0.8 + val 0 + test 0 = 0.8"),
    ],
)
def test_fractions_of_a_split_must_sum_to_one(problems: Problems, split: str, shown: str) -> None:
    assert problems(f"{TASKED}data: {{split: {split}}}") == [
        f"config.yaml:2: data.split: the fractions must sum to one, but {shown}"
    ]


@pytest.mark.parametrize("split", ["{train: 0.8, val: 0.2}", "{train: 0.7, val: 0.2, test: 0.1}", "{train: 1}"])
def test_fractions_that_sum_to_one_are_accepted(loaded: Load, split: str) -> None:
    assert loaded(f"{TASKED}data: {{split: {split}}}").data.split is not None


def test_all_mistakes_are_told_at_once(problems: Problems) -> None:
    lines = problems("train: {batchsize: 3, epochs: 0}\nlog:\n  every: soon\n")
    assert sorted(line.split(": ")[1] for line in lines) == ["log.every", "task", "train.batchsize", "train.epochs"]


def test_a_missing_task_is_told(problems: Problems) -> None:
    assert problems("seed: 1\n") == ["config.yaml: task: missing"]


def test_a_missing_config_is_told_with_the_way_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: there is no such file. `lockstep init` writes a config"):
        load(tmp_path / "nowhere.yaml")


def test_a_folder_is_not_a_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)


def test_bytes_that_are_no_text_are_not_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe\x00task")
    with pytest.raises(ConfigError, match=r"config\.yaml: cannot be read"):
        load(tmp_path / "config.yaml")


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing but a comment\n", "---\n", "null\n"])
def test_an_empty_config_is_told_with_what_it_needs(problems: Problems, text: str) -> None:
    assert problems(text) == [
        "config.yaml: the file is empty. It needs at least a task, for example",
        "  task: file.py:MyTask",
    ]


@pytest.mark.parametrize(("text", "kind"), [("- a\n- b\n", "list"), ("words\n", "str"), ("3\n", "int")])
def test_a_config_is_a_mapping(problems: Problems, text: str, kind: str) -> None:
    assert problems(text) == [f"config.yaml:1: the config must be a mapping of keys to values, not {kind}"]


def test_a_tab_is_told_with_its_line(problems: Problems) -> None:
    assert problems(TASKED + "train:\n\tepochs: 3\n") == [
        "config.yaml:3: not valid YAML: a tab is used for indentation; YAML allows only spaces there"
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [("train: [1, 2\nseed: 3\n", 2), ("train: {epochs: 1\n", 2), ("a: b: c\n", 1), ("a: 1\n---\nb: 2\n", 2)],
)
def test_what_is_not_yaml_is_told_with_its_line(problems: Problems, text: str, line: int) -> None:
    assert problems(text)[0].startswith(f"config.yaml:{line}: not valid YAML: ")


def test_a_tag_that_would_make_an_object_is_refused(problems: Problems) -> None:
    assert "not valid YAML" in problems("task: !!python/object/apply:os.system ['true']\n")[0]


def test_an_alias_to_what_it_is_in_is_refused(problems: Problems) -> None:
    assert "config.yaml" in problems("task: &task {type: task.py:Mine, again: *task}\n")[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\ntask: task.py:Mine\nseed: 2\n", "config.yaml:3: seed: given twice (first in line 1)"),
        (TASKED + "train:\n  epochs: 1\n  epochs: 2\n", "config.yaml:4: train.epochs: given twice (first in line 3)"),
        (TASKED + "train: {epochs: 1}\ntrain: {steps: 2}\n", "config.yaml:3: train: given twice (first in line 2)"),
        (
            TASKED + "early_stop:\n  criteria:\n    - {metric: a, metric: b}\n",
            "config.yaml:4: early_stop.criteria[0].metric: given twice (first in line 4)",
        ),
    ],
)
def test_a_key_that_is_given_twice_is_refused(problems: Problems, text: str, message: str) -> None:
    assert problems(text) == [message]


# The task


def test_an_unknown_task_module_is_told_before_any_process_starts(problems: Problems, tmp_path: Path) -> None:
    assert problems("task: no_such_package.module:Mine\n") == [
        f"config.yaml:1: task: there is no module 'no_such_package.module' (looked in {tmp_path}, in the current "
        "folder and on Python's path), got 'no_such_package.module:Mine'"
    ]


def test_an_unknown_task_file_is_told_with_where_it_was_looked_for(problems: Problems) -> None:
    assert problems("seed: 1\ntask: other.py:Mine\n") == [
        "config.yaml:2: task: there is no file other.py, got 'other.py:Mine'"
    ]


def test_a_task_file_without_that_class_is_told_with_the_nearest(problems: Problems) -> None:
    assert problems("task: task.py:Mime\n") == ["config.yaml:1: task: task.py defines no 'Mime', did you mean Mine?"]


def test_a_task_file_that_is_not_python_is_told_with_its_line(problems: Problems, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import os\nclass Mine\n")
    (line,) = problems("task: broken.py:Mine\n")
    assert line.startswith("config.yaml:1: task: broken.py:2: not valid Python: ")


@pytest.mark.parametrize(
    "source",
    [
        "from elsewhere import Mine\nclass Other: pass\n",
        "import elsewhere as Mine\nclass Other: pass\n",
        "class Other: pass\nMine = Other\n",
        "class Other: pass\nMine: type = Other\n",
        "def Mine(): pass\nclass Other: pass\n",
        "# -*- coding: latin-1 -*-\nclass Other: pass\n'\xe9'; Mine = Other\n",
        "class Other: pass\ntry:\n    import fast\n    class Mine: pass\nexcept ImportError:\n    class Mine: pass\n",
        "class Other: pass\nif True:\n    class Mine: pass\n",
        "class Other: pass\nfrom elsewhere import *\n",
        "exec('class Mine: pass')\n",
    ],
)
def test_a_class_may_come_into_its_file_in_any_way_that_python_knows(loaded: Load, tmp_path: Path, source: str) -> None:
    (tmp_path / "ways.py").write_text(source, encoding="latin-1")
    assert loaded("task: ways.py:Mine\n").task.type == f"{tmp_path}/ways.py:Mine"


def test_a_class_may_have_a_name_of_other_letters_and_its_file_may_be_in_the_home_folder(
    loaded: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "ways.py").write_text("class Other: pass\nModel\xe9 = Other\n")
    assert loaded("task: ~/ways.py:Model\xe9\n").task.type == f"{tmp_path}/home/ways.py:Model\xe9"


def test_loading_does_not_import_the_task(loaded: Load, tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text("raise SystemExit('imported')\nclass Mine: pass\n")
    assert loaded("task: loud.py:Mine\n").task.type.endswith("loud.py:Mine")


# Overrides


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("train.batch_size=64", "train.batch_size", 64),
        (" train.batch_size = 64", "train.batch_size", 64),
        ("train={batch_size: 12, epochs: 4}", "train", Train(batch_size=12, epochs=4)),
        ("train.clip_norm=1e-3", "train.clip_norm", 0.001),
        ("train.clip_norm=null", "train.clip_norm", None),
        ("name=other", "name", "other"),
        ("data.split={train: 0.5, val: 0.5}", "data.split.val", 0.5),
        ("log.every=5 steps", "log.every", Interval(5, "step")),
        ("early_stop.patience=7", "early_stop.patience", 7),
        ("strategy.bucket_mb=5", "strategy.bucket_mb", 5),
        ("task.hidden=[1, 2]", "task.hidden", [1, 2]),
        ("validate.on=rank0", "validation.on", "rank0"),
        ("task.text=a=b", "task.text", "a=b"),
    ],
)
def test_an_override_is_a_path_and_a_yaml_value(loaded: Load, override: str, path: str, value: object) -> None:
    node: object = loaded("task: task.py:Mine\nstrategy: ddp\ntrain:\n  batch_size: 8\n  clip_norm: 2.0\n", override)
    for name in path.split("."):
        node = getattr(node, name)
    assert node == value


def test_an_override_of_one_value_leaves_its_neighbours(loaded: Load) -> None:
    config = loaded(TASKED + "train: {epochs: 3, batch_size: 8}\n", "train.batch_size=16")
    assert (config.train.epochs, config.train.batch_size) == (3, 16)


def test_of_two_overrides_the_later_wins(loaded: Load) -> None:
    assert loaded(TASKED, "seed=1", "seed=2").seed == 2


def test_an_argument_joins_a_component_that_was_given_by_its_name(loaded: Load) -> None:
    config = loaded(TASKED + "optimizer: torch.optim.SGD\n", "optimizer.lr=0.5", "task.hidden=3")
    assert config.optimizer is not None
    assert (config.optimizer.type, config.optimizer.arguments) == ("torch.optim.SGD", {"lr": 0.5})
    assert config.task.arguments == {"hidden": 3}


FULL = "task:\n  type: task.py:Mine\ntrain:\n  batch_size: 8\n"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.batch_size=many", "train.batch_size: input should be a valid integer, got 'many'"),
        ("train.batchsize=3", "train.batchsize: unknown key, did you mean batch_size? (value 3)"),
        ("train={batchsize: 3}", "train.batchsize: unknown key, did you mean batch_size? (value 3)"),
        ("train={batch_size: many}", "train.batch_size: input should be a valid integer, got 'many'"),
        ("train=3", "train: "),
        ("trian.epochs=3", "trian: unknown key, did you mean train?"),
        ("data.split={train: 0.5}", "data.split: the fractions must sum to one"),
        ("log.every=soon", "log.every: not an interval"),
        ("task=other.py:Mine", "task: there is no file "),
        ("task.type=other.py:Mine", "task: there is no file "),
        ("task.type=task.py:Mime", "task: "),
        ("task.type=no_such_package:Mine", "task: there is no module 'no_such_package'"),
        ("train.batch_size.more=3", "train.batch_size is 8, which has no keys below"),
        ("train.batch_size", "write key.path=value, for example --set train.batch_size=64"),
        ("train.batch_size=", "there is no value: write null for none, or '' for an empty text"),
        ("=3", "write key.path=value"),
        ("train..epochs=3", "write key.path=value"),
        ("train.epochs={", "not valid YAML"),
        ("optimizer.lr=0.1", "optimizer.type: missing: the config has no optimizer section. Set optimizer.type, too"),
    ],
)
def test_a_wrong_override_is_told_by_the_override_and_not_by_the_file(
    problems: Problems, override: str, message: str
) -> None:
    assert problems(FULL, override)[0].startswith(f"--set {override}: {message}")


@pytest.mark.parametrize(
    ("text", "override"),
    [
        ("train: {epochs: 3}", "train.steps=5"),
        ("data: {split: {train: 0.8, val: 0.2}}", "data.split.val=0.3"),
        ("data: {workers: 2, prefetch: 4}", "data.workers=0"),
    ],
)
def test_an_override_that_contradicts_the_file_is_told(problems: Problems, text: str, override: str) -> None:
    (line,) = problems(TASKED + text, override)
    assert f"--set {override}" in line


def test_an_override_does_not_hide_mistakes_of_the_file(problems: Problems) -> None:
    assert problems(TASKED + "train:\n  batchsize: 3\n", "train.epochs=2")[0].startswith(
        "config.yaml:3: train.batchsize"
    )


# The batch size and the number of processes


@pytest.mark.parametrize(
    ("batch_size", "world_size", "said"),
    [
        (32, 4, None),
        (7, 1, None),
        (10, 4, "train.batch_size 10 on 4 processes: ranks get 2 or 3 examples of every batch"),
        (11, 2, "train.batch_size 11 on 2 processes: ranks get 5 or 6 examples of every batch"),
        (
            3,
            4,
            "train.batch_size 3 on 4 processes: 1 of them get no example of a batch, and compute one that counts for "
            "nothing",
        ),
    ],
)
def test_uneven_shares_are_allowed_and_said(batch_size: int, world_size: int, said: str | None) -> None:
    expected = None if said is None else f"{said}; the mean is still over all {batch_size}"
    assert uneven_shares(batch_size, world_size) == expected


@settings(deadline=None)
@given(batch_size=st.integers(1, 500), world_size=st.integers(1, 64))
def test_what_is_said_of_shares_is_what_ranks_get(batch_size: int, world_size: int) -> None:
    ends = [batch_size * rank // world_size for rank in range(world_size + 1)]
    sizes = {last - first for first, last in pairwise(ends)}
    said = uneven_shares(batch_size, world_size) or ""
    shown = re.search(r"ranks get (\d+) or (\d+)", said)
    none = "get no example" in said
    assert sizes == ({int(shown[1]), int(shown[2])} if shown else {0, 1} if none else {batch_size // world_size})


@pytest.mark.parametrize(("strategy", "world_size"), [("auto", 1), ("auto", 4), ("single", 1), ("ddp", 2), ("ddp", 1)])
def test_a_strategy_that_suits_the_number_of_processes_is_accepted(strategy: str, world_size: int) -> None:
    check_strategy(Strategy(type=strategy), "cpu", world_size)


def test_several_processes_that_would_each_train_alone_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"strategy: single trains on one process, but there are 2.*strategy: ddp"):
        check_strategy(Strategy(type="single"), "cpu", 2)


def test_work_on_a_trained_model_travels_with_the_config_and_cannot_be_overridden() -> None:
    after = After(do="predict", run="runs/a", step=3, out="x.jsonl")
    config = RunConfig.model_validate({"task": "pkg.mod:Task"}).with_after(after)
    assert from_plain(config.plain(), "config").after == after
    assert with_values(config, {}, ["seed=1"]).after == after
    with pytest.raises(ConfigError, match="after: unknown key"):
        with_values(config, {}, ["after.step=4"])
