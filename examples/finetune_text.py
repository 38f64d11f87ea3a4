"""Writes what finetune_text.yaml begins with: a tiny Llama with its tokenizer, and numbers with their words.

    python examples/finetune_text.py pretrained

So that nothing is downloaded, the model has random weights, and the tokenizer a token for every byte.
"""

import json
import sys
from pathlib import Path
from typing import Any

ONES = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
CHAT = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def in_words(number: int) -> str:
    if number < 20:
        return ONES[number]
    tens, rest = divmod(number, 10)
    return TENS[tens - 2] + (f"-{ONES[rest]}" if rest else "")


def tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {each: number for number, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = {"eos_token": "<end>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=CHAT, **special)


def make(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    made = tokenizer()
    config = LlamaConfig(
        vocab_size=len(made), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, eos_token_id=made.eos_token_id, bos_token_id=None,
        pad_token_id=made.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    made.save_pretrained(folder)
    rows = [{"prompt": f"{number}:", "answer": f" {in_words(number)}"} for number in range(100)]
    (folder / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows * 4), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python finetune_text.py FOLDER, a new one")
    make(Path(sys.argv[1]))
