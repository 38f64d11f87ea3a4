"""Fine-tuning by YAML alone: the losses of transformers' Trainer and of a loop by hand, on one rank and on two."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import lockstep
from conftest import ROOT
from lockstep.cli import main

STEPS, BATCH, RATE = 5, 8, 1e-3
INPUT = torch.tensor([[52, 50, 58]])


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path, folder = list(sys.path), tmp_path_factory.mktemp("models") / "pretrained"
    sys.path.insert(0, str(ROOT / "examples"))
    import finetune_text

    finetune_text.make(folder)
    yield folder
    sys.path[:] = path


def trained(
    folder: Path, out: Path, processes: int = 1, strategy: str = "auto", steps: int = STEPS, **task: Any
) -> Any:
    kind, data = "lockstep.adapters.huggingface:CausalLM", str(folder / "pairs.jsonl")
    return lockstep.train(
        task={"type": kind, "folder": str(folder), "data": data, "prompt": "prompt", "text": "answer",
              "max_length": 64, **task},
        processes=processes, runtime="cpu", strategy=strategy, out=out, train={"steps": steps, "batch_size": BATCH},
        optimizer={"type": "torch.optim.AdamW", "lr": RATE, "weight_decay": 0.0}, data={"shuffle": False},
        checkpoint={"every": None}, log={"every": "1 step"},
    )["folder"]  # fmt: skip


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["train/loss"] for row in rows if "train/loss" in row]


def batches(folder: Path) -> list[list[dict[str, list[int]]]]:
    """What the first steps train on, tokenized here."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for line in (folder / "pairs.jsonl").read_text().splitlines()[: STEPS * BATCH]:
        row = json.loads(line)
        asked, answer = tokenizer(row["prompt"])["input_ids"], tokenizer(row["answer"])["input_ids"]
        answer.append(tokenizer.eos_token_id)
        found.append({"input_ids": asked + answer, "labels": [-100] * len(asked) + answer})
    return [found[step * BATCH : (step + 1) * BATCH] for step in range(STEPS)]


def collate(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    rows = {"input_ids": 0, "labels": -100}
    padded = {
        name: torch.nn.utils.rnn.pad_sequence([torch.tensor(each[name]) for each in examples], True, filler)
        for name, filler in rows.items()
    }
    lengths = torch.tensor([len(each["input_ids"]) for each in examples])
    return {**padded, "attention_mask": (torch.arange(padded["labels"].shape[1]) < lengths[:, None]).long()}


def by_hand(folder: Path, parts: int = 1) -> list[float]:
    """The loop that everybody writes; with parts, what it does on so many ranks: means of the ranks' means."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    found = []
    for batch in batches(folder):
        of_rank = [batch[part * BATCH // parts : (part + 1) * BATCH // parts] for part in range(parts)]
        loss = torch.stack([model(**collate(each)).loss for each in of_rank]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def by_trainer(folder: Path, out: Path) -> list[float]:
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(out), per_device_train_batch_size=BATCH, max_steps=STEPS, learning_rate=RATE,
        lr_scheduler_type="constant", optim="adamw_torch", max_grad_norm=0, logging_steps=1, save_strategy="no",
        use_cpu=True, report_to=[], remove_unused_columns=False, disable_tqdm=True,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    examples: Any = [each for batch in batches(folder) for each in batch]
    model = AutoModelForCausalLM.from_pretrained(folder)
    trainer = Trainer(model=model, args=arguments, train_dataset=examples, data_collator=collate)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_the_losses_of_trainer_and_of_a_loop_by_hand_on_any_number_of_ranks(pretrained: Path, tmp_path: Path) -> None:
    hand = by_hand(pretrained)
    pytest.importorskip("accelerate", reason="Trainer needs it")
    assert by_trainer(pretrained, tmp_path / "trainer") == pytest.approx(hand, abs=1e-6)
    assert losses(trained(pretrained, tmp_path / "alone")) == pytest.approx(hand, abs=2e-6)
    assert losses(trained(pretrained, tmp_path / "ddp", 2)) == pytest.approx(hand, abs=1e-5)
    averaged = by_hand(pretrained, parts=2)  # what `.loss` makes of two ranks
    assert max(abs(one - other) for one, other in zip(averaged, hand, strict=True)) > 1e-3


@pytest.mark.long
def test_packed_rows_split_over_ranks_are_resumed_exactly(pretrained: Path, tmp_path: Path) -> None:
    alone = losses(trained(pretrained, tmp_path / "alone", packing=True, steps=6))
    assert losses(trained(pretrained, tmp_path / "ddp", 2, packing=True, steps=6)) == pytest.approx(alone, abs=1e-5)
    run = trained(pretrained, tmp_path / "fsdp", 2, "fsdp", packing=True, steps=3)
    result = CliRunner().invoke(main, ["resume", str(run), "--set", "train.steps=6"])
    assert result.exit_code == 0, result.output
    assert losses(run) == pytest.approx(alone, abs=1e-5)


def export(run: Path, out: Path, *more: str) -> Path:
    result = CliRunner().invoke(main, ["export", str(run), "--to", "hf", "--out", str(out), *more])
    assert result.exit_code == 0, result.output
    return out


@pytest.mark.long
def test_an_adapter_is_trained_resumed_and_opened_with_its_model_and_in_it(pretrained: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lora = {"r": 4, "alpha": 8, "dropout": 0.0}
    whole = trained(pretrained, tmp_path / "whole", lora=lora)
    run = trained(pretrained, tmp_path / "parts", lora=lora, steps=2)
    result = CliRunner().invoke(main, ["resume", str(run), "--set", f"train.steps={STEPS}"])
    assert result.exit_code == 0, result.output
    assert losses(run) == losses(whole)
    weights = [load_file(max((each / "checkpoints").glob("step-*")) / "model.safetensors") for each in (run, whole)]
    assert weights[0] and all("lora_" in name for name in weights[0])
    assert all(torch.equal(each, weights[1][name]) for name, each in weights[0].items())

    adapter = AutoModelForCausalLM.from_pretrained(export(run, tmp_path / "adapter"))
    merged = AutoModelForCausalLM.from_pretrained(export(run, tmp_path / "merged", "--merge"))
    before = AutoModelForCausalLM.from_pretrained(pretrained)
    found = [each.eval()(INPUT).logits for each in (adapter, merged, before)]
    assert torch.allclose(found[0], found[1], atol=1e-5) and not torch.allclose(found[0], found[2], atol=1e-3)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").eos_token == "<end>"


@pytest.mark.long
def test_an_adapter_is_trained_in_parts_of_a_model(pretrained: Path, tmp_path: Path) -> None:
    lora = {"r": 4}
    alone = losses(trained(pretrained, tmp_path / "alone", lora=lora, packing=True))
    assert losses(trained(pretrained, tmp_path / "fsdp", 2, "fsdp", lora=lora, packing=True)) == pytest.approx(
        alone, abs=1e-5
    )


METRICS = """
def measured(evaluated):
    predicted, labels = evaluated.predictions, evaluated.label_ids
    if predicted.ndim == 2 and predicted.shape == labels.shape:  # of tokens, as Trainer has them
        predicted, labels = predicted[:, :-1], labels[:, 1:]
    else:
        predicted = predicted.argmax(-1)
    there = labels != -100
    return {"right": float((predicted == labels)[there].mean()), "rows": len(labels)}
"""


def test_metrics_of_trainer_and_samples(pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("measures.py").write_text(METRICS)
    Path("chats.jsonl").write_text(
        "".join(
            json.dumps({"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "a" * n}]})
            + "\n"
            for n in range(1, 11)
        )
    )
    Path("kinds.csv").write_text("text,label\n" + "".join(f"{'ab'[n % 2] * (n + 1)},{n % 2}\n" for n in range(10)))
    more = {"text": None, "compute_metrics": "measures.py:measured"}
    chats = {"type": "lockstep.adapters.huggingface:CausalLM", "data": "chats.jsonl", "validation": "chats.jsonl",
             "messages": "messages", "generate": {"prompts": ["3?"], "max_new_tokens": 3}}  # fmt: skip
    kinds = {"type": "lockstep.adapters.huggingface:SequenceClassification", "data": "kinds.csv",
             "validation": "kinds.csv", "labels": 2}  # fmt: skip
    for task, name in ((chats, "token_accuracy"), (kinds, "accuracy")):
        found = lockstep.train(
            task={"folder": str(pretrained), "max_length": 32, "compute_metrics": more["compute_metrics"], **task},
            processes=1, runtime="cpu", out=tmp_path / "runs", train={"steps": 2, "batch_size": 4},
        )  # fmt: skip
        assert found["metrics"]["val/rows"] == 10
        assert found["metrics"]["val/right"] == pytest.approx(found["metrics"][f"val/{name}"])
        samples = [each.read_text() for each in (found["folder"] / "samples").rglob("*.txt")]
        assert [each.split("\n")[0] for each in samples] == (["3?"] if task is chats else [])
