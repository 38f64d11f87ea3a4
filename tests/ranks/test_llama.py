"""A model of Hugging Face's, without a change to its code: sharded, and split by rules."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import llama_bodies
import pytest

import lockstep

COLUMNS = {"spec": ["model", None], "activations": "split"}
ROWS = {"spec": [None, "model"], "activations": "split"}
RULES = {
    **{f"*.{name}_proj.weight": COLUMNS for name in ("q", "k", "v", "gate", "up")},
    **{f"*.{name}_proj.weight": ROWS for name in ("o", "down")},
    "*embed_tokens.weight": ["model", None],
    "lm_head.weight": ["model", None],
}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp-2": (2, {"type": "fsdp"}),
    "tensor-2": (2, {"type": "tensor", "mesh": {"model": 2}, "shard": RULES}),
    "fsdp-tensor-2x2": (4, {"type": "fsdp", "mesh": {"data": 2, "model": 2}, "shard": RULES}),
}


# Most of a test is to import transformers on every rank.
@pytest.mark.parametrize("mesh", ["fsdp-2", *(pytest.param(each, marks=pytest.mark.long) for each in list(MESHES)[1:])])
def test_llama_is_trained_as_on_one_process(mesh: str, tmp_path: Path) -> None:
    launch = partial(lockstep.launch, runtime="cpu", out=tmp_path)
    (alone,) = launch(llama_bodies.trained, processes=1)
    processes, strategy = MESHES[mesh]
    body = partial(llama_bodies.trained, activation_checkpointing="blocks" if "fsdp" in mesh else None)
    first, *_ = launch(body, processes=processes, strategy=strategy)
    assert first.keys() == alone.keys()
    for name, weights in first.items():
        assert weights == pytest.approx(alone[name], rel=1e-4, abs=1e-5), name


def test_transformers_opens_what_several_ranks_have_written(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    fsdp = "fsdp"
    first, _ = lockstep.launch(llama_bodies.trained, processes=2, runtime="cpu", folder=tmp_path / "run", strategy=fsdp)
    opened = tmp_path / "opened"
    llama_bodies.config().save_pretrained(opened)
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    for file in saved.glob("model*"):
        (opened / file.name).symlink_to(file)
    model = LlamaForCausalLM.from_pretrained(opened)
    found = {name: each.detach().flatten().tolist() for name, each in model.named_parameters()}
    assert found == first
