"""A language model of transformers goes on learning from prompts and answers; with `lora`, by an adapter of peft's.

    python examples/finetune_text.py pretrained            # makes a small model, as somebody else would have
    lockstep train examples/finetune_text.yaml --set task.folder=pretrained --set init_from=pretrained
    lockstep export runs/finetune-* --to hf --out tuned    # AutoModelForCausalLM.from_pretrained("tuned") opens it

Without a folder the model is a tiny one of random weights, so that nothing has to be downloaded.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import lockstep

ONES = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
IGNORED = -100  # the label of a token that is not learned: of the prompt, or of the padding


def in_words(number: int) -> str:
    if number < 20:
        return ONES[number]
    tens, rest = divmod(number, 10)
    return TENS[tens - 2] + (f"-{ONES[rest]}" if rest else "")


class Bytes:
    """Text as its bytes, for a model that comes without a tokenizer."""

    pad_token_id, eos_token_id, size = 256, 257, 258

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(each for each in tokens if each < 256).decode(errors="replace")


class Pairs(Dataset[tuple[list[int], list[int]]]):
    """A prompt and its answer, as tokens."""

    def __init__(self, pairs: list[tuple[str, str]], tokenizer: Any) -> None:
        self.pairs, self.tokenizer = pairs, tokenizer

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[list[int], list[int]]:
        prompt, answer = self.pairs[index]
        end = [self.tokenizer.eos_token_id] if answer else []
        return self.tokenizer.encode(prompt), self.tokenizer.encode(answer) + end


class FinetuneText(lockstep.Task):
    def __init__(
        self,
        folder: str | None = None,
        text: str | None = None,
        lora: int = 0,
        lr: float = 3e-3,
        sample_every: int = 50,
    ) -> None:
        """`folder` is a model as save_pretrained writes it; `text` a file of JSON lines with `prompt` and `answer`."""
        self.folder, self.text, self.lora, self.lr, self.sample_every = folder, text, lora, lr, sample_every
        self.tokenizer = tokenizer_of(folder)

    def model(self) -> nn.Module:
        """Its shape alone: `init_from` brings the weights, to each rank what it needs of them."""
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(self.folder) if self.folder else tiny_config()
        model: nn.Module = AutoModelForCausalLM.from_config(config)
        if not self.lora:
            return model
        from peft import LoraConfig, get_peft_model

        settings = LoraConfig(r=self.lora, target_modules="all-linear", task_type="CAUSAL_LM")
        return get_peft_model(model, settings)  # type: ignore[arg-type]

    def train_data(self) -> Dataset[Any]:
        if self.text is None:
            return Pairs([(f"{number}:", f" {in_words(number)}") for number in range(100)] * 4, self.tokenizer)
        rows = [json.loads(line) for line in Path(self.text).read_text(encoding="utf-8").splitlines() if line.strip()]
        return Pairs([(row["prompt"], row["answer"]) for row in rows], self.tokenizer)

    def collate(self, examples: list[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
        """Padded on the right to the longest of the batch; what is not to be learned has no label."""
        longest = max(len(prompt) + len(answer) for prompt, answer in examples)
        shape = (len(examples), longest)
        tokens, labels = torch.full(shape, self.tokenizer.pad_token_id), torch.full(shape, IGNORED)
        mask = torch.zeros(shape, dtype=torch.long)
        for row, (prompt, answer) in enumerate(examples):
            length = len(prompt) + len(answer)
            tokens[row, :length] = torch.tensor(prompt + answer)
            labels[row, len(prompt) : length] = torch.tensor(answer, dtype=torch.long)
            mask[row, :length] = 1
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> lockstep.Mean:
        """The mean over the answers' tokens of the whole batch, however they are spread over ranks."""
        losses, counted, _ = self.judged(model, batch)
        return lockstep.Mean(losses.sum(), counted.sum())

    def evaluate_step(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
        losses, counted, right = self.judged(model, batch)
        return {
            "loss": lockstep.Mean(losses.sum(), counted.sum()),
            "token_accuracy": lockstep.Mean((right & counted).sum(), counted.sum()),
        }

    def judged(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """For every token but the first: its loss, whether it counts, whether it would have been guessed."""
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1].float()
        wanted = batch["labels"][:, 1:]
        losses = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none", ignore_index=IGNORED)
        return losses, wanted != IGNORED, logits.argmax(-1) == wanted

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=self.lr)

    def training_step(self, run: lockstep.Run, batch: dict[str, Tensor]) -> dict[str, Any]:
        """The usual step, and now and then what the model says by now."""
        with run.autocast():
            loss = self.loss(run.model, batch)
        run.backward(loss)
        if run.step() and self.sample_every and run.progress.step % self.sample_every == 0:
            self.log_samples(run)
        return {"loss": loss}

    def log_samples(self, run: lockstep.Run) -> None:
        """By all ranks, since a sharded model takes all of them; the most likely token each time, without any luck."""
        prompts = [Pairs([(f"{number}:", "")], self.tokenizer)[0][0] for number in (7, 42)]
        said = [self.completed(run.module, torch.tensor([each], device=run.device)) for each in prompts]
        text = "\n".join(self.tokenizer.decode(one + other) for one, (other,) in zip(prompts, said, strict=True))
        run.log_text("samples", text)

    def completed(self, model: nn.Module, tokens: Tensor, longest: int = 16) -> list[list[int]]:
        """What follows a batch of prompts of one length, up to the end of each."""
        was_training, begin = model.training, tokens.shape[1]
        model.eval()
        with torch.no_grad():
            for _ in range(longest):
                following = model(input_ids=tokens).logits[:, -1].argmax(-1, keepdim=True)
                tokens = torch.cat([tokens, following], dim=1)
        model.train(was_training)
        ended = [[*each, self.tokenizer.eos_token_id] for each in tokens[:, begin:].tolist()]
        return [each[: each.index(self.tokenizer.eos_token_id)] for each in ended]

    def predict(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, list[str]]:
        """The answer to every prompt."""
        rows = zip(batch["input_ids"], batch["attention_mask"].bool(), batch["labels"] == IGNORED, strict=True)
        prompts = [tokens[real & prompt] for tokens, real, prompt in rows]
        answers = [self.completed(model, each[None])[0] for each in prompts]
        decode = self.tokenizer.decode
        return {"prompt": [decode(each.tolist()) for each in prompts], "answer": [decode(each) for each in answers]}

    def predict_data(self, input: str) -> Dataset[Any]:
        """A file with a prompt in every line."""
        lines = Path(input).read_text(encoding="utf-8").splitlines()
        return Pairs([(line, "") for line in lines if line], self.tokenizer)


def tokenizer_of(folder: str | None) -> Any:
    if folder is None or not (Path(folder) / "tokenizer_config.json").exists():
        return Bytes()
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(folder)
    if found.pad_token is None:
        found.pad_token = found.eos_token
    return found


def tiny_config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=Bytes.size, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=Bytes.pad_token_id,
        eos_token_id=Bytes.eos_token_id, bos_token_id=None, use_cache=False,
    )  # fmt: skip


def make(folder: str) -> None:
    """A model in a folder, to begin with where there is no other at hand."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(tiny_config()).save_pretrained(folder)
    print(f"a tiny Llama of random weights is in {folder}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python finetune_text.py FOLDER, where a tiny model is made")
    make(sys.argv[1])
