"""`lockstep plan`: what it says of a step is what the step does, on this machine and without any device."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from conftest import ROOT, TASK_FILE, Finished, Project
from lockstep.planner.devices import target
from lockstep.planner.plan import Step, estimate, seconds, traced

LLAMA = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
STACKED = {"type": f"{TASK_FILE}:Stacked", "layers": 4, "width": 64}
ADAM = {"type": "torch.optim.AdamW", "lr": 0.001}
FSDP = {"type": "fsdp", "mesh": {"data": -1}}
GPT = Path(__file__).parents[2] / "examples" / "gpt.yaml"


def planned(project: Project, on: str, *overrides: str, **values: Any) -> Step:
    """Of the step alone: a whole plan traces some more, for the largest batch."""
    return traced(project.config(**values), overrides, target(on))


def test_weights_and_optimizer_state_are_those_of_a_checkpoint(project: Project) -> None:
    values: dict[str, Any] = {
        "task": STACKED,
        "optimizer": ADAM,
        "strategy": FSDP,
        "train": {"steps": 2, "batch_size": 12},
    }
    run = project.train(processes=2, **values)
    saved = project.run("export", run, "--to", "safetensors", "--out", project.folder / "weights.safetensors")
    assert saved.code == 0, saved.text
    weights = load_file(project.folder / "weights.safetensors")
    plan = planned(project, "t4x2", **values)
    assert plan.weights_bytes == sum(each.numel() * each.element_size() for each in weights.values())
    # AdamW has two numbers for each of a parameter's, and a count of steps for each parameter.
    assert plan.optimizer_bytes == 2 * 4 * plan.parameters + 4 * len(weights)
    # Rounded up, each of many small ones.
    assert plan.by_kind["weights"] == pytest.approx(plan.weights_bytes / 2, rel=0.2)
    assert plan.mesh == {"data": 2} and plan.host_bytes == 0
    begins = dict(reversed(plan.phases))
    # The optimizer is fused and makes nothing, so that nothing may be noted after it began.
    assert 0 == begins["forward"] < begins["backward"] < begins.get("optimizer", plan.events) <= plan.events


def test_what_is_offloaded_is_none_of_the_devices(project: Project) -> None:
    """But for the block that is computed: its part comes from the host, and is there until it is gathered."""
    values: dict[str, Any] = {
        "task": {**STACKED, "width": 256, "layers": 8},
        "optimizer": ADAM,
        "train": {"steps": 2, "batch_size": 12},
    }
    plan = planned(project, "t4x2", strategy={**FSDP, "offload": True}, **values)
    assert not {"weights", "gradients", "optimizer"} & set(plan.by_kind)
    kept = plan.weights_bytes * 4 / 2  # weights, gradients and two numbers of Adam's, on each of two
    assert plan.host_bytes == pytest.approx(kept, rel=0.02)
    assert 0 < plan.peak < kept / 2


@pytest.mark.parametrize(
    "strategy", [pytest.param({"type": "ddp"}, id="ddp"), pytest.param(FSDP, id="fsdp", marks=pytest.mark.long)]
)
def test_the_arithmetic_of_a_gpt(project: Project, strategy: dict[str, Any]) -> None:
    """Six operations for every number of a matrix and token, and attention's: on each of four devices a quarter."""
    layers, width, context, vocab, batch = 3, 64, 32, 256, 8
    task = {"type": f"{GPT.parent}/gpt.py:TextModel", "layers": layers, "heads": 4, "width": width, "context": context,
            "vocab": vocab, "max_bytes": 20000}  # fmt: skip
    plan = planned(
        project, "h200x4", "optimizer=null", task=task, strategy=strategy,
        train={"steps": 2, "batch_size": batch}, data={"drop_last": True},
    )  # fmt: skip
    tokens = batch * context // 4
    wanted = 6 * tokens * (12 * layers * width**2 + vocab * width) + 14 * layers * tokens * context * width
    assert plan.flops == pytest.approx(wanted, rel=0.01)


def test_ranks_of_a_split_sequence_compute_a_part_of_it_in_blocks(project: Project) -> None:
    """The last of them looks at all positions before its own; attention needs no mask in a GPU's memory."""
    layers, width, tokens, vocab = 3, 16, 2048, 256
    task = {"type": f"{GPT.parent}/gpt.py:TextModel", "layers": layers, "heads": 1, "width": width, "context": tokens,
            "vocab": vocab, "max_bytes": 20000}  # fmt: skip
    plan = planned(
        project, "h200x4", "optimizer=null", task=task, strategy={"type": "fsdp", "mesh": {"data": 1, "context": 4}},
        train={"steps": 2, "batch_size": 1}, data={"drop_last": True},
    )  # fmt: skip
    part, whole = tokens // 4, tokens * width * 4  # positions of a rank; bytes of a sequence between blocks
    wanted = 6 * (12 * layers * width**2 * part + vocab * width * tokens) + 14 * layers * part * tokens * width
    assert plan.flops == pytest.approx(wanted, rel=0.01)
    assert plan.by_kind["activations"] < layers * part * tokens * 4, "as large as masks"
    found = {(each.name, each.of_gradients): each for each in plan.collectives if each.axis == "context"}
    kept = {key: (each.count, each.bytes) for key, each in found.items()}
    assert kept[("allgather", False)] == (2 * layers + 2, (2 * layers + 2) * whole)
    assert kept[("allreduce", False)] == (2 * layers, 2 * layers * whole)  # gradients of keys and values
    assert kept[("allreduce", True)] == (layers + 1, 4 * plan.parameters)
    waited = [found["allgather", False], found["allreduce", False]]
    h200 = target("h200x4")
    assert estimate(plan, h200, "bf16").between == pytest.approx(sum(seconds(each, h200) for each in waited))


COUNTING = """
import collections, json, os
from pathlib import Path
from tasks import Stacked

class Counting(Stacked):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        if "COUNT_INTO" in os.environ and self.calls == 2:
            from lockstep.planner.ledger import Ledger
            self.ledger = Ledger()
            self.ledger.__enter__()
        elif "COUNT_INTO" in os.environ and self.calls == 3:
            self.ledger.__exit__(None, None, None)
            found = collections.Counter((each.name, each.bytes) for each in self.ledger.books.collectives)
            if os.environ["RANK"] == "0":
                Path(os.environ["COUNT_INTO"]).write_text(json.dumps([[*key, count] for key, count in found.items()]))
        return loss
"""


@pytest.mark.parametrize(
    "mesh",
    [pytest.param({"data": 2}, id="fsdp"), pytest.param({"data": 1, "model": 2}, id="tensor", marks=pytest.mark.long)],
)
def test_what_is_exchanged_is_what_ranks_of_this_machine_exchange(project: Project, mesh: dict[str, int]) -> None:
    (project.folder / "tasks.py").write_text(Path(TASK_FILE).read_text())
    (project.folder / "counting.py").write_text(COUNTING)
    rules = {"*.inner.weight": ["model", None], "*.out.weight": [None, "model"]} if "model" in mesh else {}
    strategy = {"type": "tensor" if rules else "fsdp", "mesh": mesh, "shard": rules}
    config = project.config(
        task={"type": "counting.py:Counting", "layers": 3, "width": 16}, strategy=strategy, processes=2,
        train={"steps": 4, "batch_size": 12}, checkpoint={"every": None}, log={"every": "100 steps"},
    )  # fmt: skip
    finished = project.run("train", config, env={"COUNT_INTO": str(project.folder / "counted.json")})
    assert finished.code == 0, finished.text
    counted = json.loads((project.folder / "counted.json").read_text())
    of_names: dict[str, list[int]] = {}
    for name, size, count in counted:
        if name == "c10d.allgather_":  # what ranks tell each other every half second: not of the step
            continue
        total = of_names.setdefault(name.rpartition(".")[2].strip("_"), [0, 0])
        total[0], total[1] = total[0] + count, total[1] + count * size
    found: dict[str, list[int]] = {}
    for each in traced(config, [], target("t4x2")).collectives:
        total = found.setdefault(each.name, [0, 0])
        total[0], total[1] = total[0] + each.count, total[1] + each.bytes
    assert found == of_names and found


@pytest.mark.parametrize("compile", ["false", "true"])
def test_keys_and_values_of_split_sequences_are_exchanged_compiled_or_not(compile: str) -> None:
    mesh = "strategy={type: fsdp, mesh: {data: 1, context: 2}}"
    step = traced(GPT, [mesh, f"train.compile={compile}"], target("h200x2"))
    found = {(each.name, each.of_gradients): each.count for each in step.collectives if each.axis == "context"}
    # Of two blocks keys and values, and the sequence where it is cut or joined; all gradients in three.
    assert found == {("allgather", False): 2 * 2 + 2, ("allreduce", False): 2 * 2, ("allreduce", True): 3}


def test_what_does_not_fit_is_told_with_the_lines_that_made_it(project: Project) -> None:
    small = project.folder / "small.yaml"
    small.write_text("watch: {memory: 0.821, peak: {float32: 1}, bandwidth: 10, link: 1, network: 1, per_host: 1}\n")
    config = project.config(task={**STACKED, "examples": 4096}, train={"steps": 2, "batch_size": 4096})
    finished: Finished = project.run("plan", config, "--on", "watch", "--on", "t4", "--devices", small,
                                     "--page", "plan.html")  # fmt: skip
    assert finished.code == 1, finished.text
    page = (project.folder / "plan.html").read_text()
    assert "watchx1: <span" in page and page.count("<svg") == 4 and "<script" not in page and "http" not in page
    assert "watchx1: DOES NOT FIT" in finished.out and "t4x1: fits" in finished.out
    assert "tasks.py:" in finished.out and "tracing a step ..." in finished.err


def test_a_step_is_that_of_a_whole_batch(project: Project) -> None:
    """Not the rest of an epoch, where that has less than two of them."""
    plan = planned(project, "t4", task={**STACKED, "examples": 100}, train={"batch_size": 64}, data={})
    products = 8 * 64 + 4 * 2 * 64 * 128 + 64 * 4  # each three times, but for the gradient of the inputs
    assert plan.flops == 2 * 64 * (3 * products - 8 * 64)


def test_ranks_have_equal_parts_and_validation_counts(project: Project) -> None:
    values: dict[str, Any] = {"task": {**STACKED, "examples": 4096}, "train": {"batch_size": 7}}
    plan = planned(project, "t4x2", "validate.batch_size=4000", data={"split": {"train": 0.5, "val": 0.5}}, **values)
    products = 8 * 64 + 4 * 2 * 64 * 128 + 64 * 4
    assert plan.flops == 2 * 4 * (3 * products - 8 * 64), "not of 3 examples, nor of validation"
    assert plan.phase == "validation" and plan.by_kind["batch"] == pytest.approx(1024 * 4 * 8, rel=0.3)


UNEQUAL = """
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from lockstep import Task

class Unequal(Task):
    def model(self):
        return nn.Linear(1, 4)

    def train_data(self):
        return [torch.ones(500 if index == 21 else 3 + index // 10 % 2, 1) for index in range(99)]

    def collate(self, examples):
        return pad_sequence(examples, batch_first=True)

    def loss(self, model, batch):
        return model(batch).square().mean()

class Known(Unequal):
    def lengths(self):
        return [len(each) for each in self.train_data()]
"""


@pytest.mark.parametrize(("task", "tokens", "note"), [("Unequal", 4, "lengths()"), ("Known", 500, "longest")])
def test_the_longest_example_is_planned(task: str, tokens: int, note: str, project: Project) -> None:
    (project.folder / "unequal.py").write_text(UNEQUAL)
    of_task = {"type": f"{project.folder}/unequal.py:{task}"}
    plan = planned(project, "t4", task=of_task, train={"batch_size": 10}, data={"shuffle": False})
    assert plan.flops == 2 * 2 * 10 * tokens * 4
    assert f"planned is 10 x {tokens} x 1" in plan.notes[0] and note in plan.notes[0]


def test_a_model_of_transformers_is_planned_from_its_config_alone(project: Project) -> None:
    (project.folder / "config.json").write_text(json.dumps(LLAMA))
    small = project.folder / "small.yaml"
    small.write_text("watch: {memory: 0.8205, peak: {float32: 1}, bandwidth: 10, link: 1, network: 1, per_host: 2}\n")
    sizes = ["--batch-size", "4", "--length", "128", "--set", "task.lora={r: 16}", "--set", "task.dtype=bf16"]
    told = project.run("plan", "--hf", "config.json", "--on", "watchx2", "--devices", small, *sizes)
    assert told.code == 1, told.text
    assert "planned with 4 x 128 tokens and precision bf16" in told.err
    assert "watchx2: DOES NOT FIT, " in told.out and "allreduce over data" in told.out
    adapter = 16 * 2 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))  # of q and o, k and v, and the three others
    assert re.search(rf"gradients +{4 * adapter / 1024:.1f} KiB", told.out), told.out
    assert re.search(r"weights +\d+\.\d KiB", told.out) and "0.00" not in told.out.split("at least")[0], told.out


def test_a_model_of_transformers_makes_no_mask_for_whole_sequences(project: Project) -> None:
    length = 2048
    shape = project.folder / "config.json"
    shape.write_text(json.dumps({**LLAMA, "max_position_embeddings": length}))
    task = {"type": "lockstep.adapters.huggingface:CausalLM", "folder": str(shape), "data": "synthetic",
            "init": "config", "max_length": length}  # fmt: skip
    train = {"steps": 2, "batch_size": 1}
    whole, packed = (
        planned(project, "h200", "optimizer=null", f"task.packing={packing}", task=task, train=train)
        for packing in ("false", "true")
    )
    assert not any(each.shape[-2:] == [length, length] for each in whole.largest)
    assert any(each.shape[-2:] == [length, length] for each in packed.largest), "which keeps documents apart"


def test_the_benchmark_of_plans_has_a_case_of_transformers_and_lora(tmp_path: Path) -> None:
    """The other cases import no transformers."""
    found, benchmark = tmp_path / "plans.json", ROOT / "benchmarks" / "plan.py"
    program = (
        f"import plan_task, runpy, sys; assert 'transformers' not in sys.modules; "
        f"runpy.run_path({str(benchmark)!r}, {{}}, '__main__')"
    )
    arguments = ["--quick", "--only", "LoRA", "--json", str(found)]
    subprocess.run([sys.executable, "-c", program, *arguments], cwd=benchmark.parent, check=True, timeout=300)
    ((_, case),) = json.loads(found.read_text())["cases"].items()
    assert 0 < case["by_kind"]["optimizer"] < 2 * 4 * 20_000 * 2, "of adapters alone"


@pytest.mark.long
def test_the_largest_batch_is_one_that_fits(project: Project) -> None:
    small = project.folder / "small.yaml"
    small.write_text("watch: {memory: 0.83, peak: {float32: 1}, bandwidth: 10, link: 1, network: 1, per_host: 1}\n")
    config = project.config(task={**STACKED, "examples": 50_000}, train={"steps": 2, "batch_size": 64})
    told = [project.run("plan", config, "--on", "watch", "--devices", small, "--json")]
    assert "the largest batch: trying" in told[0].err
    (plan,) = json.loads(told[0].out)
    assert plan["largest_batch_was_traced"] and plan["largest_batch"] > 64
    for batch, fits in ((plan["largest_batch"], True), (int(plan["largest_batch"] * 1.05), False)):
        peak = traced(config, [f"train.batch_size={batch}"], target("watch", small)).peak
        assert (peak <= plan["capacity"]) is fits


READS_VALUES = """
import torch
from torch import nn
from tasks import Tiny

class Reads(Tiny):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return loss if loss.item() > 0 else loss * 2
"""


LINE = "reads.py:9 return loss if loss.item() > 0 else loss * 2: reads the value of a tensor"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--on", "h20"], "no device 'h20' is known"),
        ([], "name a config and what to plan for"),
        (["--on", "h200", "--write", "best.yaml"], "--write best.yaml: is for --search with one target"),
        (["--on", "h200", "--set", "task=reads.py:Reads"], LINE),
    ],
)
def test_mistakes_are_told_in_a_sentence(project: Project, arguments: list[str], message: str) -> None:
    (project.folder / "reads.py").write_text(READS_VALUES)
    (project.folder / "tasks.py").write_text(Path(TASK_FILE).read_text())
    finished = project.run("plan", project.config(), *arguments)
    assert finished.code == 2, finished.text
    assert message in finished.text and "Traceback" not in finished.text


@pytest.mark.long
def test_a_search_ends_in_a_config_that_trains(project: Project) -> None:
    """Of a model that is too large for a device as a whole, and fits in two halves."""
    small = project.folder / "small.yaml"
    small.write_text("watch: {memory: 0.88, peak: {float32: 1}, bandwidth: 10, link: 1, network: 1, per_host: 2}\n")
    config = project.config(
        task={**STACKED, "width": 512}, optimizer=ADAM, train={"steps": 2, "batch_size": 4}, data={"drop_last": True}
    )
    best = project.folder / "best.yaml"
    finished = project.run("plan", config, "--on", "watchx2", "--devices", small, "--search", "--write", best,
                           "--page", "ways.html", limit=300)  # fmt: skip
    assert finished.code == 0, finished.text
    page = (project.folder / "ways.html").read_text()
    assert "the best</b>" in page and "does not fit</b>" in page
    ranked = [line.split("  ")[0] for line in finished.out.splitlines()[2:] if line]
    assert ranked[0].startswith("fsdp") and any(
        "ddp" in line and "does not fit" in line for line in finished.out.splitlines()
    )
    trained = project.run("train", best, "--out", "searched")
    assert trained.code == 0, trained.text
    assert "type: fsdp" in best.read_text()
