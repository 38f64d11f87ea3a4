"""Models of transformers as tasks: what is learned of texts and conversations, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from conftest import ROOT
from lockstep.adapters.documents import IGNORED, conversations_of, documents_of, packed, within
from lockstep.adapters.huggingface import CausalLM, SequenceClassification, length_to_plan
from lockstep.adapters.text_files import read_rows
from lockstep.cli.plan import _config_for
from lockstep.config.load import load
from lockstep.config.objects import construct
from lockstep.errors import ConfigError
from lockstep.tasks.create import create_task
from pages import blocks

sys.path.insert(0, str(ROOT / "examples"))
import finetune_text

sys.path.remove(str(ROOT / "examples"))


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "pretrained"
    finetune_text.make(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return finetune_text.tokenizer()


def task(folder: Path, **arguments: Any) -> CausalLM:
    given = {
        "folder": str(folder),
        "data": str(Path(folder) / "pairs.jsonl"),
        "text": "answer",
        "max_length": 64,
        **arguments,
    }
    made: CausalLM = construct(CausalLM, given, "task")
    return made


def test_files_of_all_kinds_have_the_same_rows(tmp_path: Path) -> None:
    import datasets
    import pyarrow
    from pyarrow import parquet

    rows = [{"text": f"some, {number}\nlines", "more": str(number)} for number in range(3)]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "a.csv").write_text("text,more\n" + "".join(f'"{each["text"]}",{each["more"]}\n' for each in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(str(tmp_path / "a"))
    for name in ("a.jsonl", "a.json", "a.csv", "a.parquet", "a/train"):
        assert read_rows(str(tmp_path / name), ["text", "more"], "task.data") == rows, name
    with pytest.raises(ConfigError, match=r"has several parts: name one of them, such as .*/a/train"):
        read_rows(str(tmp_path / "a"), ["text"], "task.data")
    with pytest.raises(ConfigError, match=r"line 3: there is no column 'test', did you mean text"):
        read_rows(str(tmp_path / "a.csv"), ["test"], "task.data")
    for name, message in (("none.csv", "no such file"), ("a.xls", "must end with"), ("b.json", "broken JSON")):
        (tmp_path / "b.json").write_text("{")
        with pytest.raises(ConfigError, match=message):
            read_rows(str(tmp_path / name), ["text"], "task.data")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"text": "a"}\n\n[1, 2]\n',
            "a.jsonl, line 3: must be an object such as {'text': ...}, got [1, 2]",
        ),
        ("a.jsonl", b'{"text": "a"}\n{"text": null}\n', "a.jsonl, line 2: 'text' has no value (null)"),
        ("a.jsonl", b'{"text": ["a"]}\n', "a.jsonl, line 1: 'text' must be a text or a number, got ['a']"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": "\n',
            "a.jsonl, line 2: broken JSON: Unterminated string starting at (col",
        ),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": "\xff"}',
            "a.jsonl, line 2: byte 0xff is no UTF-8: save the file as UTF-8",
        ),
        ("a.jsonl", b'{"text": "\\ud800"}', "a.jsonl, line 1: 'text' has half of a character (a lone surrogate such"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl, line 1: JSON that is nested too deep"),
        ("a.json", b'{"text": "a"}', "a.json: must be a list of objects, got {'text': 'a'}"),
        ("a.json", b'{"text": "a"}\n{"text": "b"}', "(line 2, column 1). Name a file with an object per line .jsonl"),
        ("a.json", b'[{"text": "a"}, 3]', "a.json, row 2: must be an object such as {'text': ...}, got 3"),
        ("a.csv", b"more,text\na,b\nc\n", "a.csv, line 3: 'text' has no value (null)"),
        ("a.csv", b"text,more\na,b\nc, d,e\n", "a.csv, line 3: 3 values for 2 columns: put a text with commas between"),
        ("a.csv", b'text\n"' + b"x" * 200_000, "a.csv, after line 1: field larger than field limit"),
        ("folder", None, "folder: is no folder that save_to_disk of datasets wrote"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    file = tmp_path / name
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        read_rows(str(file), ["text"], "task.data")
    assert str(raised.value).startswith(f"task.data: {file}")


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.jsonl", '{"text": "a"}'), ("a.json", '[{"text": "a"}]'), ("a.csv", "text\na"), ("a.txt", "a")],
)
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(f"{text}\r\n", encoding="utf-8-sig", newline="")
    assert read_rows(str(tmp_path / name), ["text"], "task.data") == [{"text": "a"}]


def test_a_conversation_that_is_none_is_named(pretrained: Path, tmp_path: Path) -> None:
    file = tmp_path / "talks.jsonl"
    nameless = "row 1: talk: a message must be an object with role and content, got"
    for talk, message in (("a", "line 1: 'talk' must be a list of messages, got 'a'"), ([{"content": "a"}], nameless)):
        file.write_text(json.dumps({"talk": talk}))
        with pytest.raises(ConfigError, match=rf"task.data: .*talks.jsonl, {message}"):
            task(pretrained, data=str(file), messages="talk").train_data()


def test_answers_alone_are_learned_and_what_is_too_long_is_divided_or_cut(tokenizer: Any) -> None:
    row = {"q": "two:", "a": " 2"}
    ((tokens, learned),) = documents_of([row], tokenizer, "a", "q")
    assert tokenizer.decode(tokens) == "two: 2<end>" and tokenizer.decode(tokens[learned]) == " 2<end>"
    ((tokens, learned),) = documents_of([row], tokenizer, "a", None)
    assert tokenizer.decode(tokens[learned]) == " 2<end>"
    long = documents_of([{"a": "abcdefgh"}], tokenizer, "a", None)
    assert [tokenizer.decode(each) for each, _ in within(long, 4, divide=True)] == [
        "abcd",
        "efgh",
    ]  # nothing learns <end>
    assert [tokenizer.decode(each) for each, _ in within(long, 4, divide=False)] == ["abcd"]


TALK = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "2"},
]
MARKED = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}!"
    "{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)
REWRITES = "{% for message in messages %}{{ message['content'] if loop.last else '-' }}{% endfor %}"


def test_of_conversations_the_answers_are_learned(tokenizer: Any) -> None:
    ((tokens, learned),) = conversations_of([{"talk": TALK}], tokenizer, "talk", "task.data: a")
    assert tokenizer.decode(tokens) == "<|user|>one?<end><|assistant|>1<end><|user|>two?<end><|assistant|>2<end>"
    assert tokenizer.decode(tokens[learned]) == "1<end>2<end>"
    other = finetune_text.tokenizer()
    other.chat_template = MARKED
    ((tokens, learned),) = conversations_of([{"talk": TALK}], other, "talk", "task.data: a")
    assert other.decode(tokens) == "one?1!two?2!" and other.decode(tokens[learned]) == "1!2!"
    other.chat_template = REWRITES
    with pytest.raises(ConfigError, match=r"task.data: a, row 1: talk: the chat template writes what was said before"):
        conversations_of([{"talk": TALK}], other, "talk", "task.data: a")
    other.chat_template = None
    with pytest.raises(ConfigError, match="has no chat template"):
        conversations_of([{"talk": TALK}], other, "talk", "task.data: a")


def test_documents_are_put_where_they_fit_best() -> None:
    assert packed([6, 7, 3, 4, 10], 10) == [[0, 3], [1, 2], [4]]
    assert packed([], 10) == []


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_packed_row_is_its_documents_one_by_one(pretrained: Path, attention: str) -> None:
    made = task(pretrained, prompt="prompt", packing=True, attention=attention)
    rows: Any = made.train_data()
    batch = made.collate([rows[0], rows[1]])
    assert batch["input_ids"].shape == (2, 64) and (batch["position_ids"][0] == 0).sum() > 2
    torch.manual_seed(0)
    model = made.model().eval()
    together = made.loss(model, batch)
    alone = task(pretrained, prompt="prompt", attention=attention)
    documents: Any = alone.train_data()
    total = count = 0.0
    for row in (0, 1):
        for number in rows._rows[row]:
            each = alone.loss(model, alone.collate([documents[number]]))
            total, count = total + each.total.item(), count + float(each.count)
    assert float(together.count) == count
    assert together.total.item() / count == pytest.approx(total / count, abs=1e-6)


def saved(folder: Path, config: Any) -> Path:
    config.save_pretrained(folder)
    finetune_text.tokenizer().save_pretrained(folder)
    (folder / "pairs.jsonl").write_text('{"answer": "some text"}\n')
    return folder


def test_what_cannot_be_kept_is_refused_by_name(pretrained: Path, tmp_path: Path) -> None:
    from transformers import FalconMambaConfig, MixtralConfig

    mamba = FalconMambaConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1, state_size=4, expand=2)
    leaks = saved(tmp_path / "mamba", mamba)
    with pytest.raises(ConfigError, match="FalconMambaForCausalLM looks from one document of a row into another"):
        task(leaks, init="config", packing=True).model()
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    routed = MixtralConfig(vocab_size=300, num_key_value_heads=2, output_router_logits=True, **small)
    with pytest.raises(ConfigError, match="sets output_router_logits"):
        task(saved(tmp_path / "moe", routed), init="config").model()
    with pytest.raises(
        ConfigError, match=r"task.packing: with attention 'flex_attention' documents .* set task.attention"
    ):
        task(pretrained, packing=True, attention="flex_attention").model()
    half = tmp_path / "half"
    made = task(pretrained).model()
    del made.lm_head
    made.save_pretrained(half)
    (half / "config.json").write_text((pretrained / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"has no lm_head.weight \(1 weights are missing\)"):
        task(half, tokenizer=str(pretrained), data=str(pretrained / "pairs.jsonl")).model()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"folder": "gpt2"}, r"task.folder: there is no folder .*/gpt2. Nothing is downloaded"),
        ({"max_length": 1000}, "task.max_length: 1000: this model has positions for 2 to 128 tokens"),
        ({"init": "random"}, "task.init: must be weights or config, got 'random'"),
        ({"dtype": "int8"}, "task.dtype: must be one of float32, bf16, fp16, got 'int8'"),
        ({"lora": {"rank": 8}}, "task.lora.rank: LoraConfig has no such argument"),
        ({"lora": {"r": 8, "targets": ["none"]}}, "task.lora: .*none"),
        ({"generate": {"prompt": []}}, "task.generate.prompt: Generation has no such argument, did you mean prompts"),
        ({"messages": "talk", "prompt": "q"}, "task.prompt: a conversation"),
        ({"data": None}, "task.data: input should be a valid string, got None"),
        ({"tokenizer": 5}, r"task.tokenizer: there is no folder .*/5\. "),
        ({"text": ["a", "b"]}, r"task.text: input should be a valid string, got \['a', 'b'\]"),
        ({"max_length": "64"}, "task.max_length: input should be a valid integer, got '64'"),
        ({"packing": "yes"}, "task.packing: input should be a valid boolean, got 'yes'"),
        ({"lora": 8}, "task.lora: input should be a valid dictionary, got 8"),
        ({"lora": {"r": 8, "bias": "some"}}, r"task.lora: .*: NotImplementedError: Requested bias: some"),
        ({"generate": ["a"]}, r"task.generate: input should be a valid dictionary, got \['a'\]"),
        ({"generate": {"prompts": "hi"}}, "task.generate.prompts: 'str' instances are not allowed .*, got 'hi'"),
        ({"generate": {"max_new_tokens": 0}}, "task.generate.max_new_tokens: input should be greater than 0, got 0"),
        ({"compute_metrics": "math:pi"}, "task.compute_metrics: must be the import path of a function, got 'math:pi'"),
        ({"packng": True}, "task.packng: CausalLM has no such argument, did you mean packing"),
    ],
)
def test_mistakes_are_named(pretrained: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        task(**{"folder": pretrained, "data": str(pretrained / "pairs.jsonl"), **arguments}).model()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "has no config.json: save it by save_pretrained, or name another"),
        (
            "config.json",
            b'{"model_type": "llama", "num_attention_heads": 3}',
            "AutoConfig: .*\n.* is not a multiple of",
        ),
        ("config.json", b'{"model_type": "t5"}', "by AutoModelForCausalLM: Unrecognized configuration class"),
        ("model.safetensors", None, r"task.folder: .* has no \*.safetensors: save it by save_pretrained"),
        ("model.safetensors", b"no weights", "by AutoModelForCausalLM: SafetensorError: "),
        ("tokenizer.json", None, "Set task.tokenizer to a folder with a tokenizer.json"),
    ],
)
def test_a_folder_that_cannot_be_opened_is_named(
    pretrained: Path, tmp_path: Path, file: str, content: bytes | None, message: str
) -> None:
    shutil.copytree(pretrained, tmp_path / "model")
    (tmp_path / "model" / file).unlink()
    if content is not None:
        (tmp_path / "model" / file).write_bytes(content)
    init = "config" if content is not None and b"t5" in content else "weights"
    with pytest.raises(ConfigError, match=message):
        task(tmp_path / "model", init=init).model()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"answer": ""}], "no row has a token to learn: look at its texts, and task.max_length"),
        ([{"talk": [{"role": "user", "content": "a"}]}], "no row has a token to learn"),
        ([{"talk": [{"role": "assistant", "content": "a"}]}], "row 1: talk: the conversation begins with an answer"),
        ([{"talk": [{"role": "user", "content": None}]}], "row 1: talk: a message must be an object with role and con"),
    ],
)
def test_rows_of_which_nothing_can_be_learned_are_refused(
    pretrained: Path, tmp_path: Path, rows: list[dict[str, Any]], message: str
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    made = task(pretrained, data=str(file), messages="talk" if "talk" in rows[0] else None)
    if made.messages:
        made.tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    with pytest.raises(ConfigError, match=rf"task.data: {file}.*{message}"):
        made.train_data()


def test_the_tokenizer_of_another_model_and_a_prompt_of_nothing_are_named(pretrained: Path) -> None:
    made = task(pretrained)
    with pytest.raises(ConfigError, match="the prompt '' has no tokens"):
        made.answers(nn.Linear(1, 1), ["a", ""])
    made.config.vocab_size = 20
    with pytest.raises(ConfigError, match=r"pretrained makes token \d+, but the model has tokens 0 to 19: take the"):
        made.train_data()


def test_a_continuation_is_that_of_generate(pretrained: Path) -> None:
    """Of prompts of several lengths together, and without a cache."""
    made = task(pretrained, generate={"max_new_tokens": 6})
    torch.manual_seed(0)
    model: Any = made.model().eval()
    prompts = ["7:", "forty-two:"]
    wanted = []
    for each in prompts:
        tokens = made.tokenizer(each, return_tensors="pt")["input_ids"]
        found = model.generate(tokens, do_sample=False, max_new_tokens=6, pad_token_id=0)[0, tokens.shape[1] :]
        wanted.append(made.tokenizer.decode(found, skip_special_tokens=True))
    assert made.predict(model, made.collate(list(made.predict_data(str(write(pretrained, prompts)))))) == {
        "prompt": prompts, "answer": wanted,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="max_new_tokens: 9999 after a prompt of 2 tokens"):
        task(pretrained, generate={"prompts": ["7:"], "max_new_tokens": 9999}).callbacks()


def test_a_plan_of_a_model_has_no_more_tokens_than_the_model(
    pretrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import GPT2Config

    GPT2Config(n_positions=96, n_embd=16, n_layer=1, n_head=2).save_pretrained(tmp_path)
    for given, asked, length, said in (
        (pretrained, None, 128, "8 x 128 tokens (all that the model has positions for) and"),
        (tmp_path / "config.json", None, 96, "8 x 96 tokens (all that the model has positions for) and"),
        (tmp_path, 64, 64, "8 x 64 tokens and"),
    ):
        with _config_for(given, 8, asked) as file:
            assert load(file, ()).task.arguments["max_length"] == length
        assert said in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--length 1024: this model has positions for 2 to 96 tokens"):
        length_to_plan(tmp_path, 1024)


def test_prompts_that_cannot_be_read_are_named(pretrained: Path, tmp_path: Path) -> None:
    for content, message in (
        (b"a\n\xff\n", "line 2: byte 0xff is no UTF-8"),
        (b"\n", "has no prompts: write one per line"),
    ):
        file = tmp_path / "prompts.txt"
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"--input: {file}.* {message}"):
            task(pretrained).predict_data(str(file))


def write(folder: Path, lines: list[str]) -> Path:
    file = folder / "prompts.txt"
    file.write_text("\n".join(lines))
    return file


def test_classes_have_names_and_texts_may_come_in_pairs(pretrained: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("a,b,kind\nx,y,good\nlonger,,bad\n")

    def classes(**arguments: Any) -> SequenceClassification:
        given = {"folder": str(pretrained), "data": str(file), "text": "a", "label": "kind", "max_length": 8}
        made: SequenceClassification = construct(SequenceClassification, {**given, **arguments}, "task")
        return made

    made = classes(labels=["bad", "good"], pair="b")
    rows: Any = made.train_data()
    batch = made.collate([rows[0], rows[1]])
    assert batch["labels"].tolist() == [1, 0] and batch["attention_mask"].sum(1).tolist() == [2, 6]
    model: Any = made.model()
    assert model.config.id2label == {0: "bad", 1: "good"} and model.score.out_features == 2
    measured = made.evaluate_step(model, batch)
    assert made.loss(model, batch).item() == pytest.approx(measured["loss"].mean().item())
    with pytest.raises(ConfigError, match=r"has a kind 'bad', but task.labels are"):
        classes(labels=["good", "great"]).train_data()
    with pytest.raises(ConfigError, match=r"task.labels: 1: there must be two classes"):
        classes(labels=1)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (None, "input should be .* valid integer, got None"),
        (2.0, "input should be .* valid integer, got 2.0"),
        ("ab", "'str' instances are not allowed .*, got 'ab'"),
        (["a", "a"], r"\['a', 'a'\]: there must be two classes at least, each once"),
    ],
)
def test_labels_that_are_none_are_named(pretrained: Path, labels: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"task.labels: {message}"):
        SequenceClassification(folder=str(pretrained), data="rows.csv", labels=labels)


def test_a_token_for_padding_may_be_in_either_config(pretrained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(pretrained, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    pad = settings.pop("pad_token")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    made = SequenceClassification(folder=str(folder), data="rows.csv", labels=2)
    assert made.tokenizer.pad_token == pad and made.tokenizer.pad_token_id == made.config.pad_token_id
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "pad_token_id": None}))
    with pytest.raises(ConfigError, match=f"task.tokenizer: {folder} has no token for padding: set pad_token"):
        SequenceClassification(folder=str(folder), data="rows.csv", labels=2)


def test_a_shorter_row_has_a_mask(pretrained: Path) -> None:
    made = task(pretrained)
    rows: Any = made.train_data()
    short, long = sorted((rows[7], rows[77]), key=lambda each: len(each["input_ids"]))
    assert made.collate([short, short]).keys() == {"input_ids", "labels"}
    mask = made.collate([long, short])["attention_mask"]
    assert mask.sum(1).tolist() == [len(long["input_ids"]), len(short["input_ids"])] and mask[1, -1] == 0


def test_labels_of_padding_and_of_first_tokens_are_ignored(pretrained: Path) -> None:
    made = task(pretrained, packing=True)
    rows: Any = made.train_data()
    (labels,), (positions,) = (made.collate([rows[0]])[name] for name in ("labels", "position_ids"))
    assert (labels[positions == 0] == IGNORED).all() and (labels != IGNORED).sum() > 30


def test_the_configs_of_the_page_make_tasks(pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(pretrained.parent)
    whole, classes = (text for _, text in blocks(ROOT / "docs" / "huggingface.md", "yaml"))
    for name, text in (("whole.yaml", whole), ("classes.yaml", classes.replace("path/to/model", "pretrained"))):
        (tmp_path / name).write_text(text)
        made: Any = create_task(load(tmp_path / name).task)
        assert made.model().num_parameters() > 0
    example: Any = create_task(load(ROOT / "examples" / "finetune_text.yaml").task)
    assert len(example.train_data()) > 10 and example.callbacks()
