"""Sweeps as data: the points of a space, and which values of --set are several."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.config.load import validate
from lockstep.config.schema import RunConfig
from lockstep.config.sweep import Sweep, grids_in, load_sweep
from lockstep.errors import ConfigError
from lockstep.launchers import sweep as sweeps
from lockstep.launchers.sweep import _rooms
from lockstep.record.trials import Trial, table, trial_folder, values_of


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("optimizer.lr=1e-3,1e-2", [1e-3, 1e-2]),
        ("task.kind=relu,gelu", ["relu", "gelu"]),
        ("optimizer.betas=[0.9,0.99],[0.8,0.9]", [[0.9, 0.99], [0.8, 0.9]]),
        ("train.compile=true,false", [True, False]),
        ("optimizer.betas=[0.9,0.99]", None),
        ("data.split={train: 0.8, val: 0.2}", None),
        ("data.split={train: 0.8,val: 0.2},null", [{"train": 0.8, "val": 0.2}, None]),
        ("validate.every=1 epoch,20 steps", ["1 epoch", "20 steps"]),
        ("optimizer.betas=[0.9, 0.99],[0.8, 0.9]", [[0.9, 0.99], [0.8, 0.9]]),
        ("task.text='a, b',\"c,d\"", ["a, b", "c,d"]),
        ("task.file=a/b,../c", ["a/b", "../c"]),
        ("task.text=it's,so", ["it's", "so"]),
        ("task.text=Hello, world", None),
        ("task.text=Hello, dear,world", None),
        ("optimizer.lr=1e-3, 1e-2", [1e-3, 1e-2]),
        ("task.text=a ,2", None),
        ("task.text=a\\nb,c", ["a\\nb", "c"]),
        ("task.text=a,,b", None),
        ("task.text=a,", None),
        ("task.text='a,b'", None),
        ('task.text="a,b"', None),
        ("task.text=a", None),
    ],
)
def test_values_between_commas_are_several(text: str, values: list[object] | None) -> None:
    plain, grids = grids_in([text, "seed=1"])
    assert grids == ({} if values is None else {text.partition("=")[0]: values})
    assert plain == ("seed=1",) if values is not None else (text, "seed=1")


def test_a_table_has_a_line_per_trial_whatever_its_values_are() -> None:
    sweep = Sweep.model_validate({"space": {"task.text": ["x" * 5000, "a\nb"]}})
    ended = [Trial(number, values, "completed", 1, 0.5) for number, values in enumerate(sweep.points())]
    lines = table(ended, sweep)
    assert len(lines) == 3 and all(len(each) < 140 for each in lines)
    assert "x... (5000 characters)" in lines[1] and "a\\nb" in lines[2] and values_of(ended[1]) == "task.text=a\\nb"


def test_the_points_of_a_space() -> None:
    sweep = Sweep.model_validate({
        "samples": 2, "seed": 3,
        "space": {"a": [1, 2], "b": {"loguniform": [1e-4, 1e-1]}, "c": {"randint": [5, 7]}, "d": {"choice": ["x", "y"]},
                  "e": {"uniform": [0, 1]}},
    })  # fmt: skip
    points = sweep.points()
    assert points == sweep.points(), "the same every time: a continued sweep has the same trials"
    assert [list(each) for each in points] == [["a", "b", "c", "d", "e"]] * 4
    assert [each["a"] for each in points] == [1, 2, 1, 2] and len({each["b"] for each in points}) == 4
    assert all(1e-4 <= each["b"] <= 1e-1 and each["c"] in (5, 6) and 0 <= each["e"] <= 1 for each in points)


def test_grids_of_the_command_line_are_added_to_a_file(tmp_path: Path) -> None:
    config = validate(
        RunConfig, {"task": "a.b:C", "checkpoint": {"keep": {"metric": "val/f1", "mode": "max"}}}, {}, "c"
    )
    alone = load_sweep(None, config, {"seed": [1, 2]})
    assert (alone.metric, alone.mode, alone.concurrency, len(alone.points())) == ("val/f1", "max", None, 2)
    (tmp_path / "sweep.yaml").write_text("space: {train.batch_size: [8, 16]}")
    both = load_sweep(tmp_path / "sweep.yaml", config, {"seed": [1, 2, 3]})
    assert both.metric == "val/loss" and len(both.points()) == 6
    with pytest.raises(ConfigError, match=r"--set seed: space\.seed: .*seed"):
        load_sweep(None, config, {"seed": [1, "x"]})


@pytest.mark.parametrize("kind", ["grid", "choice", "uniform", "loguniform", "randint"])
def test_an_axis_without_values_is_refused(kind: str) -> None:
    with pytest.raises(
        ConfigError, match=r"space\.seed: give one of grid, choice, uniform, loguniform, randint, got none"
    ):
        validate(Sweep, {"space": {"seed": {kind: None}}}, {}, "sweep.yaml")


@pytest.mark.parametrize(
    ("visible", "processes", "at_once", "rooms"),
    [
        ("0,1,2,3", 1, None, ["0", "1", "2"]),  # as many as there are trials
        ("4,5,6,7,8", 2, None, ["4,5", "6,7"]),
        ("GPU-a,GPU-b", 2, 1, ["GPU-a,GPU-b"]),
        ("0,1", 1, 3, "3 trials at once with 1 GPUs each need 3, but 2 are visible"),
    ],
)
def test_each_trial_has_its_gpus(
    monkeypatch: pytest.MonkeyPatch, visible: str, processes: int, at_once: int | None, rooms: list[str] | str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = validate(RunConfig, {"task": "a.b:C", "runtime": "cuda", "processes": processes}, {}, "c")
    sweep = Sweep.model_validate({"concurrency": at_once, "space": {"seed": [1, 2, 3]}})
    if isinstance(rooms, str):
        with pytest.raises(ConfigError, match=rooms):
            _rooms(config, sweep)
    else:
        assert _rooms(config, sweep) == rooms


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (b"\xff\nlockstep: the cause \xe9\n", "the cause \ufffd"),
        (b"x\n" * 9_000_000 + b"the last line", "the last line"),
        (b"", "exit code 9"),
        (None, "exit code 9"),
    ],
)
def test_whatever_a_trial_has_printed_it_has_failed_with_the_last_line(
    tmp_path: Path, said: bytes | None, cause: str
) -> None:
    place = tmp_path / trial_folder(0)
    place.mkdir()
    if said is not None:
        (place / "output.log").write_bytes(said)
    sweep = Sweep.model_validate({"metric": "val/loss", "space": {"seed": [1]}})
    ended = sweeps._ended(Trial(0, {"seed": 1}, "queued", None, None), tmp_path, 9, sweep)
    assert (ended.status, ended.cause) == ("failed", cause)
