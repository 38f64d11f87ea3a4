"""A trained model measured, asked and exported: on any number of processes, and without a trace in its run."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

import lockstep
from conftest import Project, wait_until
from lockstep.cli import main
from lockstep.config.schema import After, RunConfig
from lockstep.tasks import predict

TASKS = Path(__file__).parents[1] / "after_tasks.py"
CONFIG: dict[str, Any] = {
    "name": "useful",
    "runtime": "cpu",
    "train": {"epochs": 2, "batch_size": 12},
    "optimizer": {"type": "torch.optim.SGD", "lr": 0.1},
    "data": {"split": {"train": 0.8, "val": 0.2}},
}


def trained(folder: Path, task: str, **train: Any) -> Path:
    config = {**CONFIG, "task": {"type": f"{TASKS}:{task}"}, "train": {**CONFIG["train"], **train}}
    found = lockstep.train(config, processes=1, out=folder)
    return Path(found["folder"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = list(sys.path)
    yield trained(tmp_path_factory.mktemp("trained"), "Useful")
    sys.path[:] = path


def command(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments])


def found(*arguments: object) -> dict[str, Any]:
    result = command(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def files_of(run: Path) -> dict[str, str]:
    """Every file of a run but the one that evaluations are noted in, with its digest."""
    return {
        str(each.relative_to(run)): hashlib.sha256(each.read_bytes()).hexdigest()
        for each in run.rglob("*")
        if each.is_file() and each.name != "evaluations.jsonl"
    }


def test_evaluate_finds_what_the_run_found_on_any_number_of_processes(run: Path) -> None:
    before, summary = files_of(run), json.loads((run / "summary.json").read_text())
    alone, two = found("evaluate", run), found("evaluate", run, "-n", "2", "--best")
    assert alone["metrics"].keys() == two["metrics"].keys() == {"test/loss", "test/accuracy"}
    for name, value in alone["metrics"].items():
        assert value == pytest.approx(summary["metrics"][name], rel=1e-6)
        assert two["metrics"][name] == pytest.approx(value, rel=1e-6)
    assert (alone["world_size"], two["world_size"], alone["examples"]) == (1, 2, {"test": 53})
    noted = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert noted == [alone, two]
    assert files_of(run) == before


def test_evaluate_other_data_as_a_table(run: Path) -> None:
    shown = command("evaluate", run, "--data", "spare", "--step", "14")
    assert shown.exit_code == 0, shown.output
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert rows[0] == ["metric", "step", "14"]
    assert [row[0] for row in rows[1:3]] == ["spare/loss", "spare/accuracy"]
    assert rows[3] == ["examples", "of", "spare", "5"]


def test_predict_writes_the_same_file_on_any_number_of_processes(run: Path, tmp_path: Path) -> None:
    before = files_of(run)
    sharded = "strategy=fsdp"
    ways: dict[str, list[str]] = {"one": ["-n", "1"], "two": ["-n", "2", "--set", "data.workers=1"],
                                  "parts": ["-n", "2", "--set", sharded]}  # fmt: skip
    for name, how in ways.items():
        told = found("predict", run, "--data", "test", "--out", tmp_path / f"{name}.parquet", "--chunk", "12", *how)
        assert told["rows"] == 53
    data = {name: (tmp_path / f"{name}.parquet").read_bytes() for name in ways}
    assert data["one"] == data["two"]
    one, parts = (pq.read_table(tmp_path / f"{name}.parquet").to_pydict() for name in ("one", "parts"))
    assert one["label"] == parts["label"] and one["name"] == parts["name"]
    assert torch.tensor(one["scores"]).shape == (53, 4)
    assert torch.allclose(torch.tensor(one["scores"]), torch.tensor(parts["scores"]), atol=1e-6)
    model, inputs = model_by_hand(run), inputs_by_hand()
    assert one["label"] == model(inputs).argmax(1).tolist()
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"{name}.parquet" for name in sorted(ways)]
    assert files_of(run) == before


def test_predict_from_a_file_to_json_lines(run: Path, tmp_path: Path) -> None:
    rows = inputs_by_hand()[:5]
    (tmp_path / "input.txt").write_text("\n".join(" ".join(map(str, each)) for each in rows.tolist()))
    found("predict", run, "--input", tmp_path / "input.txt", "--out", tmp_path / "out.jsonl")
    told = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [each["label"] for each in told] == model_by_hand(run)(rows).argmax(1).tolist()
    assert told[0].keys() == {"label", "scores", "name"}


def test_predict_that_was_killed_goes_on_after_its_parts(run: Path, project: Project) -> None:
    out = project.folder / "killed.parquet"
    arguments = ["predict", run, "--data", "train", "--chunk", "1", "--set", "task.pause=0.4", "-n"]
    killed = project.start(*arguments, "2", "--out", out)
    (parts,) = wait_until(lambda: list(project.folder.glob("killed.parquet.parts-*")), what="the folder of parts")
    wait_until(lambda: len(list(parts.glob("part-*"))) >= 2, what="two parts")
    for member in killed.members():
        member.send_signal(signal.SIGKILL)
    killed.process.wait(30)
    killed.end()
    there = {each.name: each.stat().st_ino for each in parts.glob("part-*")}
    assert 2 <= len(there) < 7 and not out.exists()
    other = command(*arguments, "2", "--step", "7", "--out", out, "--json")
    assert json.loads(other.stdout)["parts_before"] == 0, "parts of another checkpoint are not used"
    assert {each.name: each.stat().st_ino for each in parts.glob("part-*")} == there
    out.unlink()
    done = project.run(*arguments, "2", "--out", out, "--json")
    assert done.code == 0, done.text
    assert json.loads(done.out.splitlines()[-1])["parts_before"] == len(there)
    assert not parts.exists()
    found(*arguments, "1", "--out", project.folder / "whole.parquet")
    assert out.read_bytes() == (project.folder / "whole.parquet").read_bytes()


def test_parts_of_other_code_data_or_settings_are_not_used(tmp_path: Path) -> None:
    task, given = tmp_path / "mine.py", tmp_path / "given.txt"
    task.write_text("class Mine:\n    pass\n")
    given.write_text("1")
    base: dict[str, Any] = {"task": f"{task}:Mine", "train": {"batch_size": 4}}
    after = After(do="predict", run=str(tmp_path), step=1, input=str(given))

    def begun(**sections: Any) -> str:
        return predict._begin(tmp_path / "out.jsonl", RunConfig.model_validate({**base, **sections}), after, 8)

    first = begun()
    assert begun() == first
    others = [begun(seed=5), begun(data={"workers": 2})]
    given.write_text("22")
    others.append(begun())
    task.write_text("class Mine:\n    size = 1\n")
    others.append(begun())
    assert len({first, *others}) == 5


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_parts_that_lack_a_row_get_into_no_file(tmp_path: Path, form: str) -> None:
    out, folder = tmp_path / f"out.{form}", tmp_path / f"out.{form}.parts-0"
    folder.mkdir()
    write = predict._write_parquet if form == "parquet" else predict._write_jsonl
    for number in range(3):
        write(predict._file(folder, number), {"label": list(range(number * 10, number * 10 + 10))})
    with pytest.raises(predict.PredictionsFailed, match="30 rows for 31 examples"):
        predict._join(folder, 3, 31, out)
    assert not out.exists() and len(list(folder.glob("part-*"))) == 3
    predict._join(folder, 3, 30, out)
    rows = pq.read_table(out).to_pydict()["label"] if form == "parquet" else [
        json.loads(line)["label"] for line in out.read_text().splitlines()
    ]  # fmt: skip
    assert rows == list(range(30)) and not folder.exists()


def model_by_hand(run: Path) -> torch.nn.Module:
    sys.path.insert(0, str(TASKS.parent))
    from after_tasks import Useful

    model = Useful().model()
    newest = max((run / "checkpoints").glob("step-*"))
    model.load_state_dict(load_file(newest / "model.safetensors"))
    return model.eval()


def inputs_by_hand() -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(53, 8)


@pytest.mark.long
def test_ranks_that_torchrun_started(run: Path, tmp_path: Path) -> None:
    alone, out = found("evaluate", run), tmp_path / "torchrun.parquet"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "lockstep"]
    commands = [["evaluate", str(run), "--json"], ["predict", str(run), "--data", "test", "--out", str(out), "--json"]]
    told = []
    for each in commands:
        finished = subprocess.run([*torchrun, *each], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert finished.returncode == 0, finished.stderr
        told.append(json.loads(finished.stdout))
    assert [each["world_size"] for each in told] == [2, 2]
    for name, value in alone["metrics"].items():
        assert told[0]["metrics"][name] == pytest.approx(value, rel=1e-6)
    found("predict", run, "--data", "test", "--out", tmp_path / "alone.parquet", "-n", "1")
    assert out.read_bytes() == (tmp_path / "alone.parquet").read_bytes()


# Averages (train.ema)


def test_averages_predict_and_are_exported(run: Path, tmp_path: Path) -> None:
    averaged = trained(tmp_path, "Useful", ema={"decay": 0.9, "warmup": False})
    model, inputs = model_by_hand(averaged), inputs_by_hand()
    saved = load_file(max((averaged / "checkpoints").glob("step-*")) / "state.safetensors")
    ema = ["--weights", "ema"]
    found("export", averaged, *ema, "--to", "safetensors", "--out", tmp_path / "m.safetensors")
    weights = load_file(tmp_path / "m.safetensors")
    raw = {name: each.clone() for name, each in model.state_dict().items()}
    assert weights.keys() == raw.keys()
    assert all(any(torch.equal(each, other) for other in saved.values()) for each in weights.values())
    assert not any(torch.equal(weights[name], raw[name]) for name in raw)

    model.load_state_dict(weights)
    wanted = model(inputs)
    found("export", averaged, *ema, "--to", "torch-export", "--out", tmp_path / "m.pt2")
    assert torch.allclose(torch.export.load(tmp_path / "m.pt2").module()(inputs), wanted, atol=1e-6)
    for processes in (1, 2):
        out = tmp_path / f"{processes}.jsonl"
        found("predict", averaged, *ema, "--data", "test", "--out", out, "-n", processes)
        told = [json.loads(line) for line in out.read_text().splitlines()]
        assert torch.allclose(torch.tensor([each["scores"] for each in told]), wanted.softmax(1), atol=1e-6)
    for arguments in (
        ["export", run, "--to", "torch-export"],
        ["export", run, "--to", "safetensors"],
        ["predict", run],
    ):
        refused = command(*arguments, *ema, "--out", tmp_path / "none.jsonl")
        assert refused.exit_code == 2 and "has no averages: the run was not trained with train.ema" in refused.stderr


# Exporting


def test_export_weights_and_programs(run: Path, tmp_path: Path) -> None:
    before, model, inputs = files_of(run), model_by_hand(run), inputs_by_hand()
    with torch.no_grad():
        wanted = model(inputs)
    found("export", run, "--to", "safetensors", "--out", tmp_path / "m.safetensors")
    weights = load_file(tmp_path / "m.safetensors")
    assert all(torch.equal(weights[name], each) for name, each in model.state_dict().items())

    found("export", run, "--to", "torch-export", "--out", tmp_path / "program")  # whose name has no suffix
    assert torch.allclose(torch.export.load(tmp_path / "program").module()(inputs), wanted, atol=1e-6)

    found("export", run, "--to", "onnx", "--out", tmp_path / "m.onnx")
    from onnx.reference import ReferenceEvaluator

    session = ReferenceEvaluator(str(tmp_path / "m.onnx"))
    (said,) = session.run(None, {session.input_names[0]: inputs.numpy()})  # 53 examples, where it was made from two
    assert torch.allclose(torch.as_tensor(said), wanted, atol=1e-5)
    assert {each.name for each in tmp_path.iterdir()} == {"m.safetensors", "program", "m.onnx"}
    assert files_of(run) == before


def test_export_of_a_model_that_begin_prepares_and_a_config_freezes_a_part_of(tmp_path: Path) -> None:
    config = {**CONFIG, "task": {"type": f"{TASKS}:Prepared"}, "checkpoint": {"save": "trainable"}}
    config["train"] = {**CONFIG["train"], "freeze": ["0.*"]}
    run = Path(lockstep.train(config, processes=1, out=tmp_path)["folder"])
    found("export", run, "--to", "torch-export", "--out", tmp_path / "program")
    assert torch.export.load(tmp_path / "program").module()(inputs_by_hand()).shape == (53, 4)
    weights = command("export", run, "--to", "safetensors", "--out", tmp_path / "m.safetensors")
    assert weights.exit_code == 0 and "the checkpoint has no frozen weights" in weights.stderr
    assert load_file(tmp_path / "m.safetensors").keys() == {"2.weight", "2.bias"}


def test_a_model_that_no_program_can_be_made_of(tmp_path: Path) -> None:
    run = trained(tmp_path, "Branching")
    result = command("export", run, "--to", "onnx", "--out", tmp_path / "m.onnx")
    assert result.exit_code == 2 and "the model cannot be exported as one program" in result.stderr
    assert "Traceback" not in result.output and not (tmp_path / "m.onnx").exists()


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "nowhere"], "RUN nowhere: there is no such folder"),
        (["evaluate", "RUN", "--data", "tset"], "no such data, nor a method tset_data(), did you mean test?"),
        (["evaluate", "RUN", "--step", "999"], "--step 999: "),
        (["evaluate", "RUN", "--step", "7", "--best"], "--step 7 and --best: name one of them"),
        (["evaluate", "s3://bucket/run"], "copy the run's folder here first"),
        (["predict", "RUN", "--out", "x.csv"], "must end with .parquet or .jsonl"),
        (["predict", "RUN", "--out", "nowhere/x.jsonl"], "there is no folder"),
        (["predict", "RUN", "--out", "there.jsonl"], "is there already"),
        (["predict", "RUN", "--out", "x.jsonl", "--data", "val", "--input", "f"], "name one of them"),
        (["predict", "RUN", "--out", "x.jsonl", "--input", "none.txt"], "--input none.txt: there is no such file"),
        (
            ["predict", "RUN", "--out", "x.jsonl", "--input", "."],
            ": cannot be read by Useful.predict_data: [Errno 21] Is",
        ),
        (["predict", "RUN", "--out", "x.jsonl", "--set", "task.wrong=number"], "a single ndarray for 'label'"),
        (["predict", "RUN", "--out", "x.jsonl", "--set", "task.wrong=nothing"], "predict returned a NoneType"),
        (["predict", "RUN", "--out", "x.jsonl", "--set", "task.wrong=many"], "48 values for 'label' and a batch of 12"),
        (["export", "RUN", "--to", "hf", "--out", "hf"], "no model of transformers or peft: use --to safetensors"),
        (["export", "RUN", "--to", "onnx", "--out", "there.jsonl"], "is there already"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.jsonl").touch()
    before = files_of(run)
    result = command(*(str(run) if each == "RUN" else each for each in arguments))
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output and "rank" not in result.stderr
    assert files_of(run) == before


def test_a_damaged_checkpoint_is_named(run: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    file = max((copy / "checkpoints").glob("step-*")) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    result = command("evaluate", copy)
    assert result.exit_code == 5 and "is damaged: model.safetensors does not match its digest" in result.stderr
