"""Tasks over models of Hugging Face's transformers: a model folder, a file of texts and YAML. docs/huggingface.md"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import Dataset

from lockstep.adapters.documents import (
    IGNORED,
    Document,
    Example,
    RandomRows,
    TokenRows,
    continued,
    conversations_of,
    documents_of,
    packed,
    padded,
    within,
)
from lockstep.adapters.text_files import lines_of, read_rows
from lockstep.config.objects import check_arguments, check_types, construct, import_object
from lockstep.engine.run import Run
from lockstep.errors import ConfigError
from lockstep.evaluation.means import Mean, evaluating
from lockstep.shown import brief
from lockstep.tasks.callbacks import Callback
from lockstep.tasks.task import Task

SYNTHETIC = "synthetic"  # in place of a file: rows of random tokens
_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_PACKS = ("sdpa", "eager")  # how attention is computed, where documents in one row were seen to stay apart
_LORA = {"alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "target_modules"}  # -> peft's names
_NEEDED = {"AutoConfig": "config.json", "AutoTokenizer": "*.json"}  # in a folder; for models, weights
_RATE = 5e-5  # of transformers' Trainer


@dataclass(kw_only=True, eq=False)
class _Pretrained(Task):
    """What tasks over a model folder have in common; the fields are arguments in the YAML."""

    folder: str  # of a model, as save_pretrained writes it
    data: str  # .jsonl, .json, .csv, .parquet, .txt, or a folder that datasets saved
    validation: str | None = None  # the same, to validate on
    tokenizer: Any = None  # its folder, where it is another
    text: str = "text"  # the column of texts
    max_length: int = 0  # by default 1024, or what the model and the tokenizer are made for
    init: str = "weights"  # config: the model's shape alone
    dtype: str = "float32"
    attention: str | None = None
    lora: Mapping[str, Any] | None = None
    compute_metrics: Any = None

    _auto: ClassVar[str]
    _peft_task: ClassVar[str]

    def __post_init__(self) -> None:
        self.text, self.max_length = self.text or "text", self.max_length or 0
        ours = next(each for each in type(self).__mro__ if each.__module__ == __name__)  # not what a user adds
        check_types(self, ours, "task")
        if self.init not in ("weights", "config"):
            raise ConfigError(f"task.init: must be weights or config, got {self.init!r}")
        if self.dtype not in _DTYPES:
            raise ConfigError(f"task.dtype: must be one of {', '.join(_DTYPES)}, got {self.dtype!r}")
        self.config = self._opened("AutoConfig", self.folder, "task.folder", **self._config_settings())
        if self.data != SYNTHETIC:
            self.tokenizer = self._opened("AutoTokenizer", self.tokenizer or self.folder, "task.tokenizer")
            if not self.tokenizer.is_fast:
                raise ConfigError(
                    f"task.tokenizer: {self.tokenizer.name_or_path} has no tokenizer.json: save it as fast"
                )
        longest = _longest(self.config)
        self.max_length = self.max_length or min(1024, longest, getattr(self.tokenizer, "model_max_length", longest))
        if not 1 < self.max_length <= longest:
            raise ConfigError(f"task.max_length: {self.max_length}: this model has positions for 2 to {longest} tokens")
        if self.compute_metrics is not None:
            given = self.compute_metrics
            self.compute_metrics = import_object(given, "task.compute_metrics") if isinstance(given, str) else None
            if not callable(self.compute_metrics):
                raise ConfigError(f"task.compute_metrics: must be the import path of a function, got {given!r}")
            self.epoch_metrics = self._computed_metrics  # type: ignore[method-assign]

    def _config_settings(self) -> dict[str, Any]:
        return {}

    @staticmethod
    def _opened(kind: str, folder: Any, at: str, **settings: Any) -> Any:
        """Opens a local folder (or config.json) by a class of transformers', without anybody's code."""
        try:
            import transformers
        except ImportError:
            raise ConfigError("task: needs transformers: pip install 'lockstep-train[text]'") from None
        transformers.utils.logging.disable_progress_bar()
        path, needed = Path(str(folder)), _NEEDED.get(kind, "*.safetensors")
        if not path.exists():
            raise ConfigError(
                f"{at}: there is no folder {path.absolute()}. Nothing is downloaded: `hf download NAME "
                "--local-dir FOLDER` does that before"
            )
        if path.is_dir() and not any(path.glob(needed)):
            raise ConfigError(f"{at}: {folder} has no {needed}: save it by save_pretrained, or name another folder")
        remedy = ". Set task.tokenizer to a folder with a tokenizer.json" if kind == "AutoTokenizer" else ""
        with _explained(f"{at}: {folder} cannot be opened by {kind}", remedy):
            return getattr(transformers, kind).from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, **settings
            )

    def model(self) -> nn.Module:
        settings = {"dtype": _DTYPES[self.dtype], "attn_implementation": self.attention}
        # Where a strategy splits the model, rank 0 has the weights, and the others make it without memory.
        if self.init == "config" or torch.get_default_device().type == "meta":
            import transformers

            with _explained(f"task.folder: {self.folder} cannot be opened by {self._auto}"):
                found = getattr(transformers, self._auto).from_config(self.config, **settings)
        else:
            found, loaded = self._opened(
                self._auto, self.folder, "task.folder", config=self.config, output_loading_info=True,
                use_safetensors=True, **settings,
            )  # fmt: skip
            self._check_loaded(sorted(loaded["missing_keys"]))
        found.train()  # from_pretrained turns dropout off
        self._check(found)
        return found if self.lora is None else self._with_lora(found, self.lora)

    def _check_loaded(self, missing: Sequence[str]) -> None:
        """Looks at the weights that the folder does not have."""

    def _check(self, model: Any) -> None:
        """Refuses a model that cannot be trained as it would be by itself."""

    def _with_lora(self, model: Any, settings: Mapping[str, Any]) -> nn.Module:
        try:
            import peft
        except ImportError:
            raise ConfigError("task.lora: needs peft: pip install 'lockstep-train[text]'") from None
        given = {"target_modules": "all-linear"} | {_LORA.get(name, name): each for name, each in settings.items()}
        check_arguments(peft.LoraConfig, given, "task.lora")
        with _explained(f"task.lora: {dict(settings)}"):
            adapted: nn.Module = peft.get_peft_model(model, peft.LoraConfig(task_type=self._peft_task, **given))
        return adapted

    def train_data(self) -> Dataset[Example]:
        return self._dataset(self.data, "task.data")

    def val_data(self) -> Dataset[Example] | None:
        return None if self.validation is None else self._dataset(self.validation, "task.validation")

    def _dataset(self, path: str, at: str) -> Dataset[Example]:
        raise NotImplementedError

    def _require_known(self, token: int) -> None:
        known = getattr(self.config.get_text_config(), "vocab_size", 2**31)
        if token >= known:
            raise ConfigError(
                f"task.tokenizer: {self.tokenizer.name_or_path} makes token {token}, but the model has tokens 0 to "
                f"{known - 1}: take the tokenizer of this model"
            )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [each for each in model.parameters() if each.requires_grad]
        return torch.optim.AdamW(trained, lr=_RATE, weight_decay=0.0)

    def _computed_metrics(self, outputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Calls compute_metrics as Trainer does, with all examples; rows are filled up to the longest by -100."""
        from transformers import EvalPrediction

        rows = {name: each if isinstance(each, Tensor) else _stacked(each) for name, each in outputs.items()}
        found: Mapping[str, Any] = self.compute_metrics(EvalPrediction(**{k: v.numpy() for k, v in rows.items()}))
        return found


@contextmanager
def _explained(what: str, remedy: str = "") -> Iterator[None]:
    """Names what transformers or peft refuses, by errors of many kinds."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, (OSError, ValueError, ImportError)) else f"{type(error).__name__}: "
        raise ConfigError(f"{what}: {kind}{brief(str(error).strip(), 600).rstrip('.')}{remedy}") from None


def _longest(config: Any) -> int:
    return getattr(config.get_text_config(), "max_position_embeddings", None) or 2**31


def length_to_plan(path: Path, length: int | None) -> int:
    """Returns the tokens of a row for a model's config.json or folder: those asked for, or 1024, or the model's."""
    longest = _longest(_Pretrained._opened("AutoConfig", str(path), "--hf"))
    if length is not None and length > longest:
        raise ConfigError(f"--length {length}: this model has positions for 2 to {longest} tokens")
    return length or min(1024, longest)


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence([each.cpu() for each in rows], batch_first=True, padding_value=IGNORED)


@dataclass(kw_only=True, eq=False)
class CausalLM(_Pretrained):
    """A language model that learns texts, answers to prompts, or the answers of conversations."""

    prompt: str | None = None  # the column of what comes before a text and is not learned
    messages: str | None = None  # the column of conversations, in place of texts
    packing: bool = False
    generate: Mapping[str, Any] | None = None  # prompts and max_new_tokens

    _auto = "AutoModelForCausalLM"
    _peft_task = "CAUSAL_LM"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.messages is not None and self.prompt is not None:
            raise ConfigError("task.prompt: a conversation (task.messages) has its prompts in it: leave one out")
        self._generation: Generation = construct(Generation, dict(self.generate or {}), "task.generate")
        check_types(self._generation, Generation, "task.generate")

    def _check_loaded(self, missing: Sequence[str]) -> None:
        if missing:
            raise ConfigError(
                f"task.folder: {self.folder} has no {missing[0]} ({len(missing)} weights are missing): it is no whole "
                "language model. init: config begins with random weights"
            )

    def _check(self, model: Any) -> None:
        if getattr(model.config, "output_router_logits", False):
            raise ConfigError(
                f"task.folder: {self.folder}/config.json sets output_router_logits: the router's loss is no mean over "
                "tokens, so that it depends on the number of ranks. Set it to false"
            )
        if self.packing:
            _require_separate_documents(model)

    def _dataset(self, path: str, at: str) -> Dataset[Example]:
        if path == SYNTHETIC:
            return RandomRows(self.config.get_text_config().vocab_size, self.max_length)
        columns = [each for each in (self.prompt, self.text) if each] if self.messages is None else [self.messages]
        rows = read_rows(path, columns, at, lists=self.messages is not None)
        documents: list[Document]
        if self.messages is not None:
            documents = conversations_of(rows, self.tokenizer, self.messages, f"{at}: {path}")
        else:
            documents = documents_of(rows, self.tokenizer, self.text, self.prompt)
        documents = within(documents, self.max_length, divide=len(columns) == 1 and self.messages is None)
        if not documents:
            raise ConfigError(f"{at}: {path}: no row has a token to learn: look at its texts, and task.max_length")
        self._require_known(max(int(tokens.max()) for tokens, _ in documents))
        lengths = [len(tokens) for tokens, _ in documents]
        alone = [[number] for number in range(len(documents))]
        return TokenRows(documents, packed(lengths, self.max_length) if self.packing else alone)

    def collate(self, examples: Sequence[Any]) -> dict[str, Any]:
        if "prompt" in examples[0]:
            return {"prompt": [each["prompt"] for each in examples]}
        found = padded(examples, self.max_length if self.packing else None)
        if not self.packing:
            positions = found.pop("position_ids")
            real = positions == torch.arange(positions.shape[1])
            if not real.all():
                found["attention_mask"] = real.long()
        return found

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Mean:
        return self._losses(model, batch)[0]

    def _losses(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Mean, Tensor, Tensor]:
        """Returns the mean over the tokens with a label, the logits, and the labels of what follows each token."""
        inputs = {name: each for name, each in batch.items() if name != "labels"}
        logits = model(**inputs, use_cache=False).logits
        following = F.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
        flat = logits.float().flatten(0, 1), following.flatten()
        total = F.cross_entropy(*flat, ignore_index=IGNORED, reduction="sum")
        return Mean(total, (following != IGNORED).sum()), logits, following

    def evaluate_step(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        loss, logits, following = self._losses(model, batch)
        likeliest = logits.argmax(-1)
        right = (likeliest == following) & (following != IGNORED)
        metrics = {"loss": loss, "token_accuracy": Mean(right.sum(), loss.count)}
        if self.compute_metrics is None:
            return metrics
        return metrics, {"predictions": list(likeliest), "label_ids": list(batch["labels"])}

    def callbacks(self) -> Sequence[Callback]:
        return [_Samples(self, self._generation.prompts)] if self._generation.prompts else []

    def predict(self, model: nn.Module, batch: dict[str, Any]) -> dict[str, list[str]]:
        """For `lockstep predict --input FILE`, with a prompt in every line."""
        return {"prompt": batch["prompt"], "answer": self.answers(model, batch["prompt"])}

    def predict_data(self, input: str) -> Dataset[Any]:
        lines = [line.rstrip("\r\n") for _, line in lines_of(Path(input), "--input")]
        found = [{"prompt": line} for line in lines if line]
        if not found:
            raise ConfigError(f"--input: {input} has no prompts: write one per line")
        return cast("Dataset[Any]", found)

    def answers(self, model: nn.Module, prompts: Sequence[str]) -> list[str]:
        """Returns the likeliest continuation of every prompt; of a chat model, the answer to it."""
        asked, ends = self._tokens_of(prompts), self.tokenizer.eos_token_id
        found = continued(model, asked, self._generation.max_new_tokens)
        found = [each[: each.index(ends)] if ends in each else each for each in found]
        return [str(self.tokenizer.decode(each, skip_special_tokens=True)) for each in found]

    def _tokens_of(self, prompts: Sequence[str]) -> list[list[int]]:
        if self.messages is not None:
            chats = [[{"role": "user", "content": each}] for each in prompts]
            prompts = self.tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        asked: list[list[int]] = self.tokenizer(prompts, add_special_tokens=self.messages is None)["input_ids"]
        if [] in asked:
            raise ConfigError(f"the prompt {prompts[asked.index([])]!r} has no tokens: write a word, or leave it out")
        most, limit, longest = max(map(len, asked)), self._generation.max_new_tokens, _longest(self.config)
        if most + limit > longest:
            raise ConfigError(
                f"task.generate.max_new_tokens: {limit} after a prompt of {most} tokens, but this model has positions "
                f"for {longest}: set it to {longest - most} or less, or shorten the prompt"
            )
        return asked


@dataclass(frozen=True)
class Generation:
    prompts: Sequence[str] = ()
    max_new_tokens: Annotated[int, Field(gt=0)] = 64


class _Samples(Callback):
    """Logs what the model answers, after every validation. All ranks compute it, since they may have a part each."""

    def __init__(self, task: CausalLM, prompts: Sequence[str]) -> None:
        self._task, self._prompts = task, prompts
        task._tokens_of(prompts)  # refuses them before the first step

    def after_validation(self, run: Run, metrics: dict[str, Any]) -> None:
        with evaluating([run.module]), run.autocast():
            answers = self._task.answers(run.module, self._prompts)
        pairs = zip(self._prompts, answers, strict=True)
        run.log_text("samples", "\n\n".join(f"{prompt}\n{answer}" for prompt, answer in pairs))


@torch.no_grad()
def _require_separate_documents(model: Any) -> None:
    """Refuses a model in which a document of a row has an effect on the next one."""
    implementation = model.config._attn_implementation
    if implementation not in _PACKS:
        raise ConfigError(
            f"task.packing: with attention {implementation!r} documents of one row were not seen to stay apart: set "
            f"task.attention to {' or '.join(_PACKS)}, or packing: false"
        )
    weight = next(model.parameters())
    if weight.is_meta or isinstance(weight, FakeTensor):
        return  # rank 0 has looked
    length = 4
    tokens = torch.arange(2 * length).repeat(2, 1)
    tokens[1, :length] += 2  # another first document
    positions = torch.arange(length).repeat(2, 2)
    with evaluating([model]):
        logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits[:, length:].float()
    if not torch.allclose(logits[0], logits[1], rtol=1e-3, atol=1e-3 * float(logits.abs().max())):
        raise ConfigError(
            f"task.packing: {type(model).__name__} looks from one document of a row into another, whatever the "
            "positions: set packing: false"
        )


@dataclass(kw_only=True, eq=False)
class SequenceClassification(_Pretrained):
    """A model that tells the class of a text, or of a pair of texts."""

    labels: Sequence[str | float | bool] | int  # the names of the classes in the column; or how many, of 0, 1 ...
    label: str = "label"  # the column of classes
    pair: str | None = None  # the column of second texts

    _auto = "AutoModelForSequenceClassification"
    _peft_task = "SEQ_CLS"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenizer.pad_token_id is None and self.config.pad_token_id is not None:
            self.tokenizer.pad_token = self.tokenizer.convert_ids_to_tokens(self.config.pad_token_id)
        if self.config.pad_token_id is None:
            self.config.pad_token_id = self.tokenizer.pad_token_id
        if self.tokenizer.pad_token_id is None:
            raise ConfigError(f"task.tokenizer: {self.tokenizer.name_or_path} has no token for padding: set pad_token")

    def _config_settings(self) -> dict[str, Any]:
        self._names = list(range(self.labels)) if isinstance(self.labels, int) else list(self.labels)
        if len({*map(str, self._names)}) < max(2, len(self._names)) or self.data == SYNTHETIC:
            raise ConfigError(
                f"task.labels: {self.labels!r}: there must be two classes at least, each once, and data with them"
            )
        names = [str(each) if isinstance(each, str) else f"LABEL_{each}" for each in self._names]
        return {"num_labels": len(names), "id2label": dict(enumerate(names)),
                "label2id": {name: number for number, name in enumerate(names)}}  # fmt: skip

    def _dataset(self, path: str, at: str) -> Dataset[Example]:
        columns = [self.text, *([self.pair] if self.pair else []), self.label]
        rows = read_rows(path, columns, at)
        numbers = {str(name): number for number, name in enumerate(self._names)}
        found = [str(each[self.label]) for each in rows]
        if wrong := set(found) - set(numbers):
            raise ConfigError(f"{at}: {path} has a {self.label} {min(wrong)!r}, but task.labels are {self._names}")
        texts = [[str(row[name]) for row in rows] for name in columns[:-1]]
        encoded = self.tokenizer(*texts, truncation=True, max_length=self.max_length)
        self._require_known(max(max(each, default=0) for each in [*encoded["input_ids"], [self.config.pad_token_id]]))
        examples = [
            {**{name: each[row] for name, each in encoded.items()}, "labels": numbers[label]}
            for row, label in enumerate(found)
        ]
        return cast("Dataset[Example]", examples)

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        inputs = [{name: each for name, each in example.items() if name != "labels"} for example in examples]
        found = dict(self.tokenizer.pad(inputs, return_tensors="pt"))
        return {**found, "labels": torch.tensor([each["labels"] for each in examples])}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self._logits(model, batch), batch["labels"])

    def evaluate_step(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        logits, labels = self._logits(model, batch), batch["labels"]
        metrics = {
            "loss": F.cross_entropy(logits, labels, reduction="none"),
            "accuracy": (logits.argmax(-1) == labels).float(),
        }
        return metrics if self.compute_metrics is None else (metrics, {"predictions": logits, "label_ids": labels})

    @staticmethod
    def _logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found: Tensor = model(**{name: each for name, each in batch.items() if name != "labels"}).logits
        return found.float()
