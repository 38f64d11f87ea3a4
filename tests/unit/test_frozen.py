"""Frozen weights that are not saved again with every checkpoint: what peft trains, and what is frozen by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.engine.run import Run
from lockstep.errors import ConfigError

DATA = TensorDataset(torch.randn(32, 8, generator=torch.Generator().manual_seed(1)))


def base(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def by_hand(seed: int = 0) -> nn.Module:
    model = base(seed)
    model[0].requires_grad_(False)  # type: ignore[operator]
    return model


def adapted(seed: int = 0) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model = base(seed)
    torch.manual_seed(5)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["0", "3"]))  # type: ignore[arg-type]


def trained(run: Run, model: nn.Module, steps: int, **how: Any) -> dict[str, torch.Tensor]:
    run.setup(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01), **how)
    run.restore()
    for _ in run.epochs(None):
        for (batch,) in run.batches(DATA, 4):
            run.backward(run.model(batch).square().mean())
            run.step()
            if run.progress.step == steps:
                run.checkpoint()
                return {name: each.clone() for name, each in run.module.state_dict().items()}
    raise AssertionError


def saved_names(folder: Path, step: int) -> set[str]:
    return set(load_file(folder / "checkpoints" / f"step-{step:08d}" / "model.safetensors"))


@pytest.fixture(params=["by hand", "peft"])
def kind(request: Any) -> Iterator[tuple[Callable[[int], nn.Module], dict[str, Any]]]:
    yield {"by hand": (by_hand, {"save": "trainable"}), "peft": (adapted, {})}[request.param]


def test_checkpoints_hold_what_is_trained_and_a_run_goes_on_from_them_bit_for_bit(
    new_run: Callable[..., Run], tmp_path: Path, kind: Any
) -> None:
    make, saving = kind
    settings = {"async": False, **saving}
    trained(new_run(checkpoint=settings), make(0), 3)
    names = saved_names(tmp_path, 3)
    frozen = {name for name, each in make(0).named_parameters() if not each.requires_grad}
    assert frozen and not names & frozen
    assert names == set(make(0).state_dict()) - frozen  # buffers move in training, and are saved
    resumed = trained(new_run(checkpoint=settings), make(0), 6)
    (tmp_path / "checkpoints").rename(tmp_path / "interrupted")
    whole = trained(new_run(checkpoint=settings), make(0), 6)
    assert all(torch.equal(resumed[name], each) for name, each in whole.items())


def test_other_frozen_weights_are_refused(new_run: Callable[..., Run], kind: Any) -> None:
    make, saving = kind
    settings = {"async": False, **saving}
    trained(new_run(checkpoint=settings), make(0), 2)
    with pytest.raises(ConfigError, match=r"trained beside other frozen weights than the model has now \(digest"):
        trained(new_run(checkpoint=settings), make(1), 4)
    with pytest.raises(ConfigError, match=r"does not set frozen ones apart: set checkpoint.save: trainable"):
        trained(new_run(checkpoint={"async": False, "save": "all"}), make(0), 4)


def test_another_choice_of_what_is_trained_is_refused(new_run: Callable[..., Run]) -> None:
    settings = {"async": False, "save": "trainable"}
    trained(new_run(checkpoint=settings), by_hand(), 2)
    model = by_hand()
    model[3].bias.requires_grad_(False)  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="other frozen weights"):
        trained(new_run(checkpoint=settings), model, 4)


def test_the_base_of_an_adapter_comes_from_init_from_also_when_the_run_goes_on(
    new_run: Callable[..., Run], tmp_path: Path
) -> None:
    save_file(base(7).state_dict(), tmp_path / "base.safetensors")
    first = trained(new_run(), adapted(0), 2, init_from=tmp_path / "base.safetensors")
    assert torch.equal(first["base_model.model.0.base_layer.weight"], base(7)[0].weight)  # type: ignore[index]
    again = trained(new_run(), adapted(3), 4, init_from=tmp_path / "base.safetensors")
    assert torch.equal(again["base_model.model.0.base_layer.weight"], base(7)[0].weight)  # type: ignore[index]
    with pytest.raises(ConfigError, match="other frozen weights"):
        trained(new_run(), adapted(3), 6)


def test_all_weights_are_saved_where_that_is_asked_for(new_run: Callable[..., Run], tmp_path: Path) -> None:
    trained(new_run(checkpoint={"async": False, "save": "all"}), adapted(0), 2)
    assert saved_names(tmp_path, 2) == set(adapted(0).state_dict())


def test_a_model_without_memory_has_no_frozen_weights_to_be_known_again_by(new_run: Callable[..., Run]) -> None:
    from lockstep.distributed.activity import Activity
    from lockstep.engine.weights import digest_of

    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"set checkpoint.save: all"):
        digest_of(model, ["weight"], Activity())


def test_a_teacher_that_nobody_trains_is_placed_and_known_by_its_digest(
    new_run: Callable[..., Run], tmp_path: Path
) -> None:
    def distilled(run: Run, steps: int, seed: int = 1) -> Run:
        model = base()
        run.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        teacher = run.setup(base(seed).requires_grad_(False).eval(), name="teacher")
        run.restore()
        for (batch,) in run.batches(DATA, 4):
            run.backward((run.model(batch) - teacher(batch)).square().mean())
            run.step()
            if run.progress.step == steps:
                break
        run.checkpoint()
        return run

    distilled(new_run(), 2)
    assert {name for name in saved_names(tmp_path, 2) if name.startswith("teacher.")} == {
        "teacher.1.running_mean", "teacher.1.running_var", "teacher.1.num_batches_tracked"
    }  # fmt: skip
    assert distilled(new_run(), 4).progress.step == 4
    with pytest.raises(ConfigError, match=r"'teacher' .* other frozen weights than the model has now"):
        distilled(new_run(), 6, seed=2)
