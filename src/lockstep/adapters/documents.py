"""Tokenizes texts and conversations, packs short ones together, and continues prompts."""

from __future__ import annotations

import bisect
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.errors import ConfigError
from lockstep.shown import brief

logger = logging.getLogger(__name__)

IGNORED = -100  # the label of a token that is not learned
_AT_ONCE = 1000  # texts that are tokenized together

Example = Mapping[str, Tensor]
Numbers = np.ndarray[Any, Any]
Document = tuple[Numbers, Numbers]  # tokens, and which of them are learned


def documents_of(rows: Sequence[Mapping[str, Any]], tokenizer: Any, text: str, prompt: str | None) -> list[Document]:
    """Returns the tokens of every text with the end of a text behind it; a prompt before it is not learned."""
    found, end = [], [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for first in range(0, len(rows), _AT_ONCE):
        some = rows[first : first + _AT_ONCE]
        texts = tokenizer([str(row[text]) for row in some], add_special_tokens=prompt is None)["input_ids"]
        before = tokenizer([str(row[prompt]) for row in some])["input_ids"] if prompt else [[] for _ in some]
        for asked, tokens in zip(before, texts, strict=True):
            tokens += [] if tokens[-1:] == end else end
            found.append((np.array(asked + tokens, np.int32), np.arange(len(asked) + len(tokens)) >= len(asked)))
    return found


def conversations_of(rows: Sequence[Mapping[str, Any]], tokenizer: Any, messages: str, at: str) -> list[Document]:
    """Returns the tokens of every conversation by the tokenizer's chat template; answers alone are learned."""
    if not tokenizer.chat_template:
        raise ConfigError(
            f"task.messages: {messages}: the tokenizer of {tokenizer.name_or_path} has no chat template: put one into "
            "its folder (chat_template.jinja), or name a column of texts (task.text)"
        )
    marked = re.search(r"\{%-?\s*generation\b", str(tokenizer.chat_template)) is not None
    found = []
    for number, row in enumerate(rows, 1):
        try:
            for each in row[messages]:
                if not isinstance(each, Mapping) or "role" not in each or _is_bare(each):
                    raise ValueError(f"a message must be an object with role and content, got {brief(repr(each), 60)}")
            found.append((_marked if marked else _rendered)(tokenizer, row[messages]))
        except Exception as error:  # of a template: a role that it does not know
            raise ConfigError(f"{at}, row {number}: {messages}: {error}") from None
    return found


def _is_bare(message: Mapping[str, Any]) -> bool:
    """Whether a message says nothing: a template would write `None` for it."""
    return all(value is None for name, value in message.items() if name != "role")


def _marked(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> Document:
    """Follows a template that marks what is generated."""
    found = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=False
    )
    return np.array(found["input_ids"], np.int32), np.array(found["assistant_masks"], bool)


def _rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> Document:
    """Finds an answer as what the template adds for it to the conversation before, in which it is asked for."""
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    found = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    begins, ends = np.array(found["offset_mapping"]).T
    learned = np.zeros(len(begins), bool)
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            if number == 0:
                raise ConfigError("the conversation begins with an answer: begin it with what the answer is to")
            before = tokenizer.apply_chat_template(messages[:number], tokenize=False, add_generation_prompt=True)
            after = tokenizer.apply_chat_template(messages[: number + 1], tokenize=False)
            if not (whole.startswith(after) and after.startswith(before)):
                raise ConfigError(
                    "the chat template writes what was said before in another way once there is an answer, so that "
                    "it cannot be told which tokens are the answer: mark them in the template by {% generation %}"
                )
            learned |= (begins >= len(before)) & (ends <= len(after)) & (begins < ends)
    return np.array(found["input_ids"], np.int32), learned


def within(documents: Sequence[Document], longest: int, divide: bool) -> list[Document]:
    """Divides documents that are longer than a row into documents, or cuts them off. Leaves out those of no label."""
    cut = sum(len(tokens) > longest for tokens, _ in documents)
    if cut and not divide:
        logger.warning("%d of %d examples are cut off at task.max_length: %d tokens", cut, len(documents), longest)
    found = [
        (tokens[begin : begin + longest], learned[begin : begin + longest])
        for tokens, learned in documents
        for begin in range(0, len(tokens) if divide else 1, longest)
    ]
    kept = [(tokens, learned) for tokens, learned in found if learned[1:].any()]
    if len(kept) < len(found):
        logger.warning(
            "%d of %d examples are left out: none of their tokens is learned", len(found) - len(kept), len(found)
        )
    return kept


def packed(lengths: Iterable[int], room: int) -> list[list[int]]:
    """Puts documents into rows, each into the fullest row that has room for it."""
    rows: list[list[int]] = []
    unfilled: list[tuple[int, int]] = []  # room left and row, sorted
    for number, length in enumerate(lengths):
        at = bisect.bisect_left(unfilled, (length, -1))
        left, row = unfilled.pop(at) if at < len(unfilled) else (room, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(number)
        if left > length:
            bisect.insort(unfilled, (left - length, row))
    return rows


class TokenRows(Dataset[Example]):
    """Rows of documents, each with positions of its own."""

    def __init__(self, documents: Sequence[Document], rows: Sequence[Sequence[int]]) -> None:
        self._documents, self._rows = documents, rows
        self.lengths = [sum(len(documents[number][0]) for number in row) for row in rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Example:
        there = [self._documents[number] for number in self._rows[index]]
        tokens = np.concatenate([tokens for tokens, _ in there]).astype(np.int64)
        learned = np.concatenate([learned for _, learned in there])
        positions = np.concatenate([np.arange(len(tokens)) for tokens, _ in there])
        labels = np.where(learned & (positions > 0), tokens, IGNORED)  # nothing of a document is before its first token
        found = {"input_ids": tokens, "labels": labels, "position_ids": positions}
        return {name: torch.from_numpy(each) for name, each in found.items()}


class RandomRows(Dataset[Example]):
    """Full rows of random tokens: for a plan, or to measure speed."""

    def __init__(self, vocabulary: int, length: int) -> None:
        tokens = torch.randint(vocabulary, (length + 1009,), generator=torch.Generator().manual_seed(0))
        self._rows, self._positions = tokens.unfold(0, length, 1), torch.arange(length)

    def __len__(self) -> int:
        return 2**16

    def __getitem__(self, index: int) -> Example:
        tokens = self._rows[index % len(self._rows)]
        return {"input_ids": tokens, "labels": tokens, "position_ids": self._positions}


def padded(examples: Sequence[Example], length: int | None = None) -> dict[str, Tensor]:
    """Joins rows, filled on the right up to a length, or up to the longest of them.

    Padding has no label. A position of zero each makes it a document by itself.
    """
    length = length or max(len(each["input_ids"]) for each in examples)
    found = {}
    for name in examples[0]:
        found[name] = torch.full((len(examples), length), IGNORED if name == "labels" else 0)
        for row, each in zip(found[name], examples, strict=True):
            row[: len(each[name])] = each[name]
    return found


@torch.no_grad()
def continued(model: nn.Module, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Returns the likeliest `count` tokens after each prompt.

    The forward passes are as many on every rank, and each computes all tokens again: some splits of a model know no
    cache.
    """
    device = next(model.parameters()).device
    lengths = torch.tensor([len(each) for each in prompts], device=device)
    tokens = torch.zeros(len(prompts), int(lengths.max()) + count, dtype=torch.long, device=device)
    for row, each in zip(tokens, prompts, strict=True):
        row[: len(each)] = torch.tensor(each)
    rows = torch.arange(len(prompts), device=device)
    for _ in range(count):
        logits = model(input_ids=tokens[:, : int(lengths.max())], use_cache=False).logits
        tokens[rows, lengths] = logits[rows, lengths - 1].argmax(-1)
        lengths = lengths + 1
    return [row[length - count : length].tolist() for row, length in zip(tokens, lengths.tolist(), strict=True)]
