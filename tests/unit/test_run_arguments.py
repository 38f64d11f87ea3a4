"""Wrong arguments of the Run: each is named with its value, and none passes silently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.engine.run import Run
from lockstep.errors import ConfigError

Runs = Callable[..., Run]
DATA = TensorDataset(torch.randn(10, 3))
MODEL = nn.Linear(3, 1)
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1)


def of_model(run: Run) -> torch.Tensor:
    return run.model(DATA.tensors[0]).mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, None), "run.setup: the model must be a torch.nn.Module, got None"),
        ((SGD, MODEL), r"must be a torch.nn.Module, got a SGD. Call run.setup\(model, optimizer\)"),
        ((nn.Linear, None), "got the class Linear, not an object of it"),
        (([MODEL, nn.Linear], None), "got a list. Call it for each model, with a name"),
        ((MODEL, None, {"name": "net.head"}), "run.setup: name='net.head' has a dot"),
        ((MODEL, torch.optim.SGD), "the optimizer must be a torch.optim.Optimizer, got the class SGD, not an object"),
        ((MODEL, "AdamW"), "the optimizer must be a torch.optim.Optimizer, got 'AdamW'"),
        ((MODEL, SGD, "cosine"), r"scheduler: must have state_dict\(\) and load_state_dict\(\), got a str"),
        ((MODEL, SGD, {"on_nan": "skp"}), "run.setup: on_nan must be stop or skip, got 'skp'"),
        ((MODEL, SGD, {"clip_norm": -1.0}), "run.setup: clip_norm must be a number above 0, got -1.0"),
        ((MODEL, SGD, {"activation_checkpointing": True}), "must be blocks or a pattern, got True"),
    ],
)
def test_setup_names_what_it_cannot_use(new_run: Runs, arguments: tuple[Any, ...], message: str) -> None:
    *given, last = arguments
    settings = last if isinstance(last, dict) else {}
    with pytest.raises(ConfigError, match=message):
        new_run().setup(*(given if settings else arguments), **settings)


Use = Callable[[Run], Any]
WRONG: list[tuple[Use, str]] = [
    (
        lambda run: [run.backward(of_model(run).detach()) for _ in run.steps(1)],
        "run.backward: the loss has no gradient",
    ),
    (lambda run: [run.backward(lockstep.Mean(torch.tensor(1.0), 2)) for _ in run.steps(1)], "the loss has no gradient"),
    (lambda run: next(run.steps(-1)), "run.steps: must be a whole number of 0 or more, got -1"),
    (lambda run: run.backward(of_model(run).item()), r"got a float: a number has no gradient, leave out .item\(\)"),
    (lambda run: run.backward(of_model(run), count="4"), "the count of a loss must be a single number, got '4'"),
    (lambda run: run.epochs("3"), "run.epochs: must be a whole number of 0 or more, got '3'"),
    (lambda run: run.epochs(2.5), "run.epochs: must be a whole number of 0 or more, got 2.5"),
    (lambda run: run.epochs(-1), "run.epochs: must be a whole number of 0 or more, got -1"),
    (lambda run: run.batches(DATA, batch_size=0), "batch_size: must be a whole number of 1 or more, got 0"),
    (lambda run: run.batches(DATA, "4"), "batch_size: must be a whole number of 1 or more, got '4'"),
    (lambda run: next(run.batches(DATA, 4, accumulate=0)), "accumulate: must be a whole number of 1 or more, got 0"),
    (lambda run: next(run.batches(5, 4)), "^the dataset must be a map-style dataset .* got int"),
    (lambda run: next(run.batches(TensorDataset, 4)), "^the dataset must be a map-style dataset .* got type"),
    (lambda run: next(run.batches(DATA, 4, order=5)), "order must be a name, a mapping or a function, got 5"),
    (lambda run: run.autocast("generator"), "run.autocast: there is no model 'generator', only model"),
    (lambda run: run.evaluate(lambda batch: None, DATA, 4), r"measure\(batch\) returned a NoneType: return metrics by"),
    (lambda run: run.evaluate(lambda batch: batch[0], DATA, 4), r"measure\(batch\) returned a Tensor: return metrics"),
    (lambda run: run.evaluate(dict, DATA, 4, on="rank1"), "run.evaluate: on must be all or rank0, got 'rank1'"),
    (lambda run: run.log(loss="high"), r"run.log\(loss=...\): needs a single number, got 'high'"),
    (lambda run: run.log(loss="3"), r"run.log\(loss=...\): needs a single number, got '3'"),
    (lambda run: run.log(loss=None), r"run.log\(loss=...\): needs a single number, got None"),
    (lambda run: run.checkpoint({"loss": 1.0}), "run.checkpoint: needs a single number, got {'loss': 1.0}"),
    (lambda run: run.load_weights("none", 1), "none/checkpoints: there is no checkpoint of step 1"),
    (lambda run: run.register_state("mine", 5), r"mine: must have state_dict\(\) and load_state_dict\(\), got a int"),
]


@pytest.mark.parametrize(("use", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_wrong_argument_is_named(new_run: Runs, use: Use, message: str) -> None:
    run, model = new_run(), nn.Linear(3, 1)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(lockstep.LockstepError, match=message):
        use(run)


def test_a_value_to_keep_the_best_by_may_be_a_tensor(new_run: Runs) -> None:
    run = new_run()
    run.setup(nn.Linear(3, 1))
    run.checkpoint(value=torch.tensor(0.5))
    last = run._engine.checkpointer.last
    assert last is not None and type(last.value) is float and last.value == 0.5


def test_a_step_without_gradients_changes_nothing_and_warns_once(
    new_run: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    run, model = new_run(), nn.Linear(3, 1)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.weight.detach().clone()
    for _ in run.batches(DATA, 4):
        run.step()
    assert torch.equal(model.weight, before)
    said = [each.getMessage() for each in caplog.records if "no gradients" in each.getMessage()]
    assert said == ["run.step: no gradients at step 1, so no weight changes: call run.backward(loss) before"]


def test_launch_names_what_is_no_function() -> None:
    with pytest.raises(ConfigError, match=r"lockstep.launch: main must be a function, got None: do not call it"):
        lockstep.launch(None, processes=1)  # type: ignore[arg-type]
