"""What a run may begin with: every kind of source, what does not fit; and that a run that goes on asks no more."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.checkpoint.sources import open_source
from lockstep.config.load import load
from lockstep.config.schema import InitFrom
from lockstep.distributed.activity import Activity
from lockstep.engine.run import Run
from lockstep.engine.weights import match
from lockstep.errors import ConfigError


class Net(nn.Module):
    """A body and a head, whose last weight is also its first (tied)."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.body[0].weight
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tied(self.body(x)))


def net(seed: int = 0, classes: int = 4) -> Net:
    torch.manual_seed(seed)
    return Net(classes)


def own_weights(model: nn.Module) -> dict[str, Tensor]:
    """Each tensor once, as Hugging Face saves them."""
    return {name: each.clone() for name, each in model.state_dict().items() if not name.startswith("tied")}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(own_weights(net(1)), tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors"


def saved_run(new_run: Callable[..., Run], values: dict[int, float | None]) -> dict[int, dict[str, Tensor]]:
    """Steps with a checkpoint each, judged by a value; the weights of each."""
    run, saved = new_run(), {}
    model = net(2)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.restore()
    data = TensorDataset(torch.randn(32, 8))
    for (batch,) in run.batches(data, 4):
        run.backward(run.model(batch).square().mean())
        run.step()
        if run.progress.step in values:
            run.checkpoint(value=values[run.progress.step])
            saved[run.progress.step] = {name: each.clone() for name, each in run.module.state_dict().items()}
    return saved


def begun(new_run: Callable[..., Run], given: Any, model: nn.Module | None = None) -> dict[str, Tensor]:
    """The weights of a run that begins with something."""
    run, made = new_run(), model or net(0)
    run.setup(made, torch.optim.SGD(made.parameters(), lr=0.1), init_from=given)
    return {name: each.clone() for name, each in run.module.state_dict().items()}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, each in wanted.items():
        assert torch.equal(found[name], each), name


def test_a_safetensors_file(new_run: Callable[..., Run], file: Path) -> None:
    assert_same(begun(new_run, file), net(1).state_dict())


def test_a_run_gives_its_best_checkpoint_and_else_its_newest(new_run: Callable[..., Run], tmp_path: Path) -> None:
    saved = saved_run(new_run, {2: 0.5, 4: 0.9})
    shutil.move(tmp_path / "checkpoints", tmp_path / "before" / "checkpoints")
    assert_same(begun(new_run, tmp_path / "before"), saved[2])
    assert_same(begun(new_run, tmp_path / "before" / "checkpoints" / "step-00000004"), saved[4])


def test_a_run_without_values_gives_its_newest_whole_checkpoint(new_run: Callable[..., Run], tmp_path: Path) -> None:
    saved = saved_run(new_run, {2: None, 4: None})
    shutil.move(tmp_path / "checkpoints", tmp_path / "before" / "checkpoints")
    newest = tmp_path / "before" / "checkpoints" / "step-00000004"
    assert_same(begun(new_run, tmp_path / "before"), saved[4])
    data = bytearray((newest / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "model.safetensors").write_bytes(data)
    assert_same(begun(new_run, tmp_path / "before"), saved[2])
    with pytest.raises(ConfigError, match=r"step-00000004 is damaged: model\.safetensors does not match its digest"):
        begun(new_run, newest)


def test_a_hugging_face_folder_of_several_files(new_run: Callable[..., Run], tmp_path: Path) -> None:
    folder, weights = tmp_path / "hf", own_weights(net(1))
    folder.mkdir()
    files = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(weights)}
    for name in set(files.values()):
        save_file({key: each for key, each in weights.items() if files[key] == name}, folder / name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    assert_same(begun(new_run, folder), net(1).state_dict())
    index.write_text(json.dumps({"weight_map": {**files, "head.bias": "../outside.safetensors"}}))
    with pytest.raises(ConfigError, match=r"'\.\./outside\.safetensors' is not the name of a file beside it"):
        begun(new_run, folder)


def test_another_type_of_number_is_converted(new_run: Callable[..., Run], tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "lockstep")
    (tmp_path / "hf").mkdir()
    half = {name: each.bfloat16() if each.is_floating_point() else each for name, each in own_weights(net(1)).items()}
    save_file(half, tmp_path / "hf" / "model.safetensors")
    found = begun(new_run, str(tmp_path / "hf"))
    assert found["head.weight"].dtype == torch.float32
    assert torch.equal(found["head.weight"], half["head.weight"].float())
    assert "9 of the model's 9 weights loaded, 8 of them from another type of number" in caplog.text


def test_what_does_not_fit_is_refused_with_its_names(new_run: Callable[..., Run], tmp_path: Path) -> None:
    weights = own_weights(net(1, classes=5))
    weights["body.1.runing_mean"] = weights.pop("body.1.running_mean")
    save_file(weights, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError) as refused:
        begun(new_run, tmp_path / "other.safetensors")
    text = str(refused.value)
    assert text.startswith(f"init_from: {tmp_path}/other.safetensors (safetensors): 6 of the model's 9 weights")
    for line in (
        "missing              1  body.1.running_mean",
        "unexpected           1  body.1.runing_mean",
        "of another shape     2  head.bias [4], there [5]; head.weight [4, 8], there [5, 8]",
        "body.1.running_mean is missing; there is body.1.runing_mean",
        "init_from.strict: false",
    ):
        assert line in text


def test_without_strict_what_fits_is_loaded_and_the_rest_is_told(
    new_run: Callable[..., Run], tmp_path: Path, caplog: Any
) -> None:
    save_file(own_weights(net(1, classes=5)), tmp_path / "other.safetensors")
    found = begun(new_run, {"path": str(tmp_path / "other.safetensors"), "strict": False})
    assert torch.equal(found["body.0.weight"], net(1).body[0].weight)
    assert torch.equal(found["head.weight"], net(0).head.weight)
    assert "of another shape     2  head.bias [4], there [5]" in caplog.text


def test_another_model_is_refused_even_where_it_need_not_fit(new_run: Callable[..., Run], tmp_path: Path) -> None:
    save_file({"encoder.weight": torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match="These are the weights of another model"):
        begun(new_run, {"path": str(tmp_path / "other.safetensors"), "strict": False})


def test_names_are_mapped_by_what_they_begin_with(new_run: Callable[..., Run], tmp_path: Path) -> None:
    weights = {f"module.{name}": each for name, each in own_weights(net(1)).items()}
    save_file({**weights, "module.extra.weight": torch.zeros(1)}, tmp_path / "wrapped.safetensors")
    given = {"path": str(tmp_path / "wrapped.safetensors"), "map": {"module.": "", "module.extra.": None}}
    assert_same(begun(new_run, given), net(1).state_dict())
    with pytest.raises(ConfigError, match=r"init_from.map: no name in .* begins with 'modul_'; there are module\."):
        begun(new_run, {**given, "map": {"modul_": ""}})
    with pytest.raises(ConfigError, match=r"both 'module\.body.* would become"):
        begun(new_run, {**given, "map": dict.fromkeys(sorted(weights)[:2], "x")})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nowhere", None, "there is no such file or folder"),
        ("weights.pt", b"\x80\x02", r"a pickle, which can run any code .* weights_only=True"),
        ("text.safetensors", b"no weights at all", "cannot be read as a safetensors file"),
        ("s3://bucket/run", None, "copy them to one that the ranks see"),
    ],
)
def test_what_is_no_source(
    new_run: Callable[..., Run], tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        begun(new_run, name if "://" in name else tmp_path / name)


def test_folders_that_hold_no_weights(new_run: Callable[..., Run], tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"holds no weights: looked for manifest.json \(a checkpoint\)"):
        begun(new_run, folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin: a pickle"):
        begun(new_run, folder)


def test_a_run_that_goes_on_does_not_ask_for_it_again(new_run: Callable[..., Run], tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "lockstep")
    saved = saved_run(new_run, {2: None})
    run, model = new_run(), net(0)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), init_from=tmp_path / "gone")
    assert f"init_from: {tmp_path / 'gone'} is what this run began with" in caplog.text
    assert run.restore()
    assert_same(run.module.state_dict(), saved[2])


def test_in_a_config_paths_are_relative_to_it_and_on_the_command_line_to_where_we_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "task.py").write_text("class Mine: pass\n")
    config = project / "config.yaml"
    config.write_text("task: task.py:Mine\ninit_from: weights\n")
    monkeypatch.chdir(tmp_path)
    assert load(config).init_from == InitFrom(path=str(project / "weights"))
    assert load(config, ["init_from=other"]).init_from == InitFrom(path=str(tmp_path / "other"))
    loose = load(config, ["init_from.strict=false"]).init_from
    assert loose == InitFrom(path=str(project / "weights"), strict=False)


def test_weights_of_several_models_are_taken_by_the_models_names(file: Path) -> None:
    source = open_source(str(file), Activity())
    source.tensors = {f"one.{name}": each for name, each in source.tensors.items()}
    given = InitFrom(path=str(file), map={"": None, "one.": ""})
    table, chosen = match(net(0).state_dict(keep_vars=True), source, given)
    assert table.fits and len(chosen) == 9
    source.close()
