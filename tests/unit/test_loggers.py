"""Loggers of a run in a world of one: what they are sent, and what one that fails or hangs costs."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # torch's first optimizer imports it, and it sets an environment variable
from own_loggers import Memory
from torch import nn
from torch.utils.data import TensorDataset

from conftest import TASK_FILE, wait_until
from lockstep.config.load import validate
from lockstep.config.schema import Log, RunConfig, RunSettings
from lockstep.engine.run import Run
from lockstep.engine.stop_requests import Preempted, StopRequests
from lockstep.errors import ConfigError
from lockstep.record import loggers, services
from lockstep.tasks.config_checks import check_parts

Runs = Callable[..., Run]
DATA = TensorDataset(torch.randn(20, 3, generator=torch.Generator().manual_seed(0)))


@pytest.fixture(autouse=True)
def nothing_remembered() -> None:
    Memory.forget()


def train(run: Run, epochs: int = 1, lr: float = 0.1, stop_at: int | None = None) -> list[float]:
    """Five steps an epoch, saved after the third; the weights in the end."""
    model = nn.Linear(3, 1)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=lr))
    run.restore()
    for _ in run.epochs(epochs):
        for (batch,) in run.batches(DATA, 4):
            loss = run.model(batch).square().mean()
            run.log(loss=loss)
            run.backward(loss)
            run.step()
            if run.progress.step == 3:
                run.checkpoint()
            if run.progress.step == stop_at:
                return []
    run._engine.finish()
    return [each for parameter in model.parameters() for each in parameter.flatten().tolist()]


def with_loggers(timeout: float = 5.0, **named: Any) -> dict[str, Any]:
    return {"log": {"every": "1 step", "timeout": timeout, **named}}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


# What it is sent


def test_a_logger_gets_a_start_every_row_and_an_end(new_run: Runs, tmp_path: Path) -> None:
    train(new_run(**with_loggers(mine={"type": "own_loggers:Memory", "greeting": "good morning"})))
    assert Memory.calls[0] == ("start", 0, "good morning")
    assert Memory.calls[-1] == ("finish", "completed")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    sent = [{"step": call[1], **call[2]} for call in Memory.calls if call[0] == "log"]
    assert sent == [{name: value for name, value in row.items() if name != "epoch"} for row in rows]
    about = Memory.abouts[0]
    assert (about.name, about.folder) == (tmp_path.name, tmp_path)
    assert about.config["log"]["mine"]["greeting"] == "good morning"


def test_after_a_restart_it_goes_on_as_the_same_and_no_step_comes_twice(new_run: Runs) -> None:
    settings = with_loggers(mine={"type": "own_loggers:Memory"})
    killed = new_run(**settings)
    train(killed, stop_at=5)  # two steps after the checkpoint
    killed._engine.aggregator.close("as if killed")
    assert Memory.points("loss") == [1, 2, 3, 4]
    train(new_run(**settings), epochs=2)
    assert [call for call in Memory.calls if call[0] == "start"] == [("start", 0, "hello"), ("start", 3, "hello")]
    assert Memory.points("loss") == list(range(1, 11))
    first, second = Memory.abouts
    assert first.id == second.id and second.kept == {"remote": f"made for {first.id}"}


def test_what_a_killed_process_took_along_is_sent_after_the_restart(new_run: Runs, tmp_path: Path) -> None:
    """As if it had been killed while four rows waited: the record has those up to the checkpoint, the logger none."""
    train(new_run(**with_loggers()), stop_at=5)
    train(new_run(**with_loggers(mine={"type": "own_loggers:Memory"})))
    assert Memory.points("loss") == [1, 2, 3, 4, 5]


def test_what_may_not_have_arrived_when_it_was_killed_is_sent_once_more(new_run: Runs) -> None:
    settings = with_loggers(mine={"type": "own_loggers:Slow"})
    killed = new_run(**settings)
    train(killed, stop_at=5)
    wait_until(lambda: Memory.points("loss") == [1, 2, 3, 4], 5)
    train(new_run(**settings), epochs=2)
    assert Memory.points("loss") == [1, 2, 3, 4, *range(1, 11)]
    Memory.forget()
    train(new_run(**settings), epochs=3)  # after a good end, nothing is sent twice
    assert Memory.points("loss") == list(range(11, 16))


def test_tensorboard_hides_what_a_resumed_run_writes_again(new_run: Runs, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = with_loggers(timeout=60.0, tensorboard=True)
    killed = new_run(**settings)
    train(killed, stop_at=5)
    killed._engine.aggregator.close("as if killed")
    train(new_run(**settings), epochs=2)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [each.step for each in events.Scalars("loss")] == list(range(1, 11))
    assert b"checkpoint:" in events.Tensors("config/text_summary")[-1].tensor_proto.string_val[0]


@pytest.mark.parametrize("how", ["stop", "fail", "leave"])
def test_it_is_told_how_the_run_ended(new_run: Runs, how: str) -> None:
    asked = StopRequests()
    run = new_run(asked, **with_loggers(mine={"type": "own_loggers:Memory"}))
    train(run, stop_at=2)
    if how == "stop":
        run._engine.finish("stopped early")
    elif how == "fail":
        run._engine.give_up()
    else:
        asked.leave = "SIGTERM"
        with pytest.raises(Preempted):
            train_on(run)
    ended = {"stop": "stopped early", "fail": "failed", "leave": "preempted"}[how]
    assert [call for call in Memory.calls if call[0] == "finish"] == [("finish", ended)]


def train_on(run: Run) -> None:
    for (batch,) in run.batches(DATA, 4):
        run.backward(run.model(batch).square().mean())
        run.step()


# One that fails or hangs


@pytest.mark.parametrize("how", ["raise", "hang", "exit"])
@pytest.mark.parametrize("method", ["start", "log", "finish"])
def test_a_logger_that_fails_or_hangs_costs_a_warning_and_never_the_run(
    new_run: Runs, tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str, how: str
) -> None:
    expected = train(new_run(**with_loggers()))
    rows = (tmp_path / "metrics.jsonl").read_text()
    for file in ("metrics.jsonl", "checkpoints"):
        (tmp_path / file).rename(tmp_path / f"{file}-before")
    faulty = {"type": "own_loggers:Faulty", "method": method, "how": how}
    began = time.monotonic()
    assert train(new_run(**with_loggers(timeout=0.3, mine=faulty))) == expected
    assert time.monotonic() - began < 5.0
    assert losses(tmp_path / "metrics.jsonl") == losses_of(rows)
    told = warnings(caplog)
    assert all(each.startswith("log.mine: ") for each in told)
    if how == "hang":
        assert any(f"{method} has not returned for" in each for each in told), told
    else:
        reason = "ConnectionError: the service said no" if how == "raise" else "SystemExit: 3"
        assert [each for each in told if reason in each and f"{method} failed" in each] == told[:1], told
    if method == "log" and how != "hang":
        assert "5 calls failed" in told[1] and len(told) == 2


def losses(file: Path) -> list[float]:
    return losses_of(file.read_text())


def losses_of(text: str) -> list[float]:
    return [json.loads(line)["loss"] for line in text.splitlines()]


def test_a_logger_that_is_too_slow_holds_nobody_back_and_what_it_misses_is_counted(
    new_run: Runs, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers, "MOST_CALLS", 2)
    train(new_run(**with_loggers(timeout=0.3, mine={"type": "own_loggers:Faulty", "method": "log", "how": "hang"})))
    told = " ".join(warnings(caplog))
    assert "is too slow: 2 calls wait" in told
    assert "2 rows and samples were left out" in told and "2 were not sent any more" in told


def test_what_start_returns_must_be_plain_data(new_run: Runs, caplog: pytest.LogCaptureFixture) -> None:
    train(new_run(**with_loggers(mine={"type": "own_loggers:Unserializable"})))
    assert "what it returns is kept as JSON" in warnings(caplog)[0]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"id": 3}', '{"id": "x", "kept": 5, "sent": {}}'])
def test_a_damaged_note_of_a_logger_is_as_none(new_run: Runs, tmp_path: Path, text: str) -> None:
    (tmp_path / "loggers").mkdir()
    (tmp_path / "loggers" / "mine.json").write_text(text)
    train(new_run(**with_loggers(mine={"type": "own_loggers:Memory"})))
    assert Memory.points("loss") == [1, 2, 3, 4, 5]


# Refused before training


@pytest.mark.parametrize(
    ("type", "expected"),
    [
        ("own_loggers:Misspelt", r"does not define finish\(self, status\)"),
        ("own_loggers:Memry", "did you mean Memory"),
        ("no_such_module:Memory", "there is no module 'no_such_module'"),
        ("own_loggers:Unsaid", "its delay must be a number of seconds, got None"),
    ],
)
def test_a_logger_that_is_none_is_refused(new_run: Runs, type: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)log.mine: .*{expected}"):
        new_run(**with_loggers(mine={"type": type}))


def test_a_dry_run_names_what_is_wrong_with_it() -> None:
    config = RunConfig.model_validate({"task": f"{TASK_FILE}:Tiny", "log": {"mine": {"type": "own_loggers:Misspelt"}}})
    with pytest.raises(ConfigError, match=r"log\.mine: .*does not define finish"):
        check_parts(config)
    config = RunConfig.model_validate(
        {"task": f"{TASK_FILE}:Tiny", "log": {"mine": {"type": "own_loggers:Memory", "x": 1}}}
    )
    with pytest.raises(ConfigError, match=r"log\.mine\.x: Memory has no such argument"):
        check_parts(config)


def test_arguments_that_it_does_not_have_are_named(new_run: Runs) -> None:
    with pytest.raises(ConfigError, match=r"log\.mine\.greting: Memory has no such argument, did you mean greeting"):
        new_run(**with_loggers(mine={"type": "own_loggers:Memory", "greting": "x"}))


def log_of(given: dict[str, Any]) -> Log:
    return validate(RunSettings, {"log": given}, {}, "config").log


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"wanbd": {"project": "x"}}, r"log\.wanbd: unknown key, did you mean wandb\?"),
        ({"evry": "3 steps"}, r"log\.evry: unknown key, did you mean every\?"),
        ({"wandb": {"mode": "ofline"}}, "did you mean offline"),
        ({"mlflow": {"experimnt": "x"}}, r"log\.mlflow\.experimnt: unknown key, did you mean experiment\?"),
        ({"mine": {"type": "no path"}}, r"log\.mine\.type: not an import path"),
        ({"my-logger": {"type": "a:B"}}, "letters, digits and _; got 'my-logger'"),
        ({"wandb": 3}, r"log\.wandb: "),
    ],
)
def test_a_wrong_log_section_is_refused(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        log_of(given)


def test_a_logger_is_switched_on_and_off() -> None:
    assert log_of({"wandb": True, "mlflow": False}).wandb is not None
    assert log_of({"wandb": True, "mlflow": False}).mlflow is None
    assert not log_of({}).has_loggers


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_package_that_is_not_installed_is_named_with_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=rf"log\.{name}: needs {name}: pip install 'lockstep-train\[{name}\]'"):
        loggers.check(log_of({name: True}))


def test_wandb_needs_a_key_unless_it_is_offline(tmp_path: Path) -> None:
    there = {"NETRC": str(tmp_path / "netrc")}
    with pytest.raises(ConfigError, match=r"there is no key: set WANDB_API_KEY .*mode: offline"):
        loggers.check(log_of({"wandb": {"project": "x"}}), there)
    loggers.check(log_of({"wandb": {"mode": "offline"}}), there)
    loggers.check(log_of({"wandb": True}), {**there, "WANDB_MODE": "offline"})
    loggers.check(log_of({"wandb": True}), {**there, "WANDB_API_KEY": "x" * 40})
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password " + "x" * 40)
    loggers.check(log_of({"wandb": True}), there)


def test_mlflow_needs_a_place() -> None:
    with pytest.raises(ConfigError, match=r"log\.mlflow\.tracking_uri: missing.*MLFLOW_TRACKING_URI"):
        loggers.check(log_of({"mlflow": True}), {})
    loggers.check(log_of({"mlflow": True}), {"MLFLOW_TRACKING_URI": "http://localhost:5000"})


@pytest.mark.parametrize("given", [{"resume": "never"}, {"entitty": "x"}, {"config": {}}])
def test_an_argument_that_wandb_does_not_have_or_that_is_ours_is_refused(new_run: Runs, given: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"log\.wandb\.(resume|config): Lockstep sets it|entitty: .*did you mean entity"
    ):
        new_run(**with_loggers(wandb={"mode": "offline", **given}))


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("val/loss", "val/loss"),
        ("val/[cls] @5", "val/_cls_ _5"),
        ("a//b", "a/_/b"),
        ("../x", "_/x"),
        ("x" * 300, "x" * 250),
    ],
)
def test_names_are_made_such_that_mlflow_takes_them(given: str, taken: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    assert services._name(given) == taken
    _validate_metric_name(taken)
