"""Which modules of a model are its blocks: found by themselves, or named by a pattern."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from conftest import ROOT
from lockstep.config.load import load
from lockstep.errors import ConfigError
from lockstep.strategy.blocks import find_blocks


@pytest.fixture(scope="module")
def examples() -> Iterator[dict[str, Any]]:
    """The programs as modules, gone again afterwards: other tests load them from their files."""
    names = ("gpt", "program", "resnet50")
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        yield {name: __import__(name) for name in names}
    finally:
        sys.path.remove(str(ROOT / "examples"))
        for name in names:
            sys.modules.pop(name, None)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))
        self.norm = nn.LayerNorm(4)


class Other(Layer):
    pass


def nested(path: str, inner: nn.Module) -> nn.Module:
    """A model in which `inner` has a dotted name, beside layers of other kinds."""
    for name in reversed(path.split(".")):
        model = nn.Module()
        model.embedding = nn.Embedding(3, 4)
        model.add_module(name, inner)
        model.head = nn.Linear(4, 3)
        inner = model
    return inner


def stack(count: int = 3) -> nn.ModuleList:
    return nn.ModuleList(Layer() for _ in range(count))


@pytest.mark.parametrize("path", ["layers", "model.layers", "transformer.h", "bert.encoder.layer"])
def test_the_layers_of_a_transformer_are_found_whatever_they_are_called(path: str) -> None:
    model = nested(path, stack())
    blocks = find_blocks(model, None)
    assert list(blocks) == [f"{path}.{number}" for number in range(3)]
    assert all(model.get_submodule(name) is block for name, block in blocks.items())


def test_encoder_and_decoder_are_stacks_both() -> None:
    model = nn.Transformer(4, 2, num_encoder_layers=2, num_decoder_layers=3, dim_feedforward=8)
    assert list(find_blocks(model, None)) == [
        "encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1", "decoder.layers.2",
    ]  # fmt: skip


def test_the_examples(examples: dict[str, Any]) -> None:
    gpt = examples["gpt"].GPT(vocab=256, context=8, layers=4, heads=2, width=8)
    assert list(find_blocks(gpt, None)) == ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]
    blocks = find_blocks(examples["resnet50"].ResNet50(), None)
    assert len(blocks) == 16
    assert len({type(block) for block in blocks.values()}) == 1


def test_the_large_example_has_the_shape_of_gpt3_xl(examples: dict[str, Any]) -> None:
    arguments = load(ROOT / "examples" / "gpt-1.3b.yaml").task.arguments
    with torch.device("meta"):
        model = examples["gpt"].TextModel(**arguments).model()
    assert 1.30e9 < sum(each.numel() for each in model.parameters()) < 1.33e9
    assert len(find_blocks(model, None)) == 24


def stages() -> nn.Module:
    return nn.Sequential(nn.Embedding(3, 4), Layer(), Layer(), nn.LayerNorm(4), nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: nn.ModuleDict({"first": Layer(), "second": Layer()}), ["first", "second"]),
        (stages, ["1", "2"]),
        (lambda: nn.ModuleList([Layer(), Other(), Layer(), Other()]), ["0", "1", "2", "3"]),
        # One of its kind is none of them, but there may be a stack inside.
        (lambda: nn.ModuleList([Layer(), Layer(), nested("layers", stack(2))]), ["0", "1", "2.layers.0", "2.layers.1"]),
        (lambda: nested("layers", nn.ModuleList([Layer()])), ["layers.0.experts.0", "layers.0.experts.1"]),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), []),
        (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(4, 2)), []),
        (lambda: nn.ModuleList(nn.Sequential(nn.ReLU()) for _ in range(3)), []),  # no parameters
        (lambda: nn.ModuleList(nn.LayerNorm(4) for _ in range(3)), []),
        (lambda: nn.Linear(4, 4), []),
    ],
)  # fmt: skip
def test_what_repeats_in_a_stack_and_has_layers_of_its_own_is_a_block(
    make: Callable[[], nn.Module], names: list[str]
) -> None:
    assert list(find_blocks(make(), None)) == names


def test_a_layer_that_is_used_again_and_again_is_one_block() -> None:
    shared = Layer()
    model = nested("layers", nn.ModuleList([shared] * 12))
    assert find_blocks(model, None) == {"layers.0": shared}
    assert find_blocks(model, "layers.*") == {"layers.0": shared}
    assert find_blocks(model, "layers.7") == {"layers.7": shared}


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("model.layers.*", ["model.layers.0", "model.layers.1", "model.layers.2"]),
        ("*.layers.[02]", ["model.layers.0", "model.layers.2"]),
        ("*.attention", [f"model.layers.{number}.attention" for number in range(3)]),
        ("*experts*", [f"model.layers.{number}.experts.{each}" for number in range(3) for each in range(2)]),
        ("model", ["model"]),
        ("*", ["embedding", "model", "head"]),
    ],
)
def test_a_pattern_names_modules_and_of_nested_ones_the_outermost(pattern: str, names: list[str]) -> None:
    assert list(find_blocks(nested("model.layers", stack()), pattern)) == names


def test_what_is_also_part_of_another_match_is_none() -> None:
    model = nn.Module()
    model.alone = nn.Linear(4, 4)
    model.whole = nn.Sequential(nn.Linear(4, 4), model.alone)
    assert find_blocks(model, "*") == {"whole": model.whole}


@pytest.mark.parametrize("pattern", ["layers.*", "model.layrs.*", "model.layers", "Model.layers.0"])
def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_names(pattern: str) -> None:
    """A list of modules is nobody's block: it is never called."""
    with pytest.raises(ConfigError) as refused:
        find_blocks(nested("model.layers", stack()), pattern)
    assert f"strategy.blocks: {pattern}: no module of the model has a name like that" in str(refused.value)
    assert "the nearest are model.layers." in str(refused.value)


def test_the_setting_that_the_pattern_came_from_is_named() -> None:
    with pytest.raises(ConfigError, match=r"train\.activation_checkpointing: x: no module .* it has no modules inside"):
        find_blocks(nn.Linear(1, 1), "x", "train.activation_checkpointing")


def test_a_model_on_the_meta_device_has_the_same_blocks() -> None:
    with torch.device("meta"):
        model = nested("layers", stack())
    assert len(find_blocks(model, None)) == 3
