"""Batches as people's collate functions make them: every tensor arrives, and everything keeps its type."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from lockstep.runtime.cpu import CpuRuntime
from lockstep.runtime.moving import map_tensors, moved, pinned, tensors_of
from lockstep.strategy.base import Strategy

META = torch.device("meta")  # a device that is not the CPU, on every machine


class Encoding(UserDict[str, Any]):
    """As Hugging Face's BatchEncoding: a mapping that is no dict, with something beside its items."""

    def __init__(self, data: dict[str, Any], note: str = "") -> None:
        super().__init__(data)
        self.note = note


class Special(OrderedDict[str, Any]):
    note = ""


@dataclass
class Example:
    inputs: Tensor
    names: list[str]
    length: int = field(init=False, default=3)


@dataclass(frozen=True)
class Frozen:
    inputs: Tensor


class Pair(NamedTuple):
    left: Tensor
    right: Any


class Graph:
    """As a batch of torch_geometric: it knows by itself how to get to a device."""

    def __init__(self, nodes: Tensor) -> None:
        self.nodes = nodes

    def to(self, device: torch.device) -> Graph:
        return Graph(self.nodes.to(device))


ONE = torch.ones(2)


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param([ONE, (ONE, "text")], id="lists"),
        pytest.param({"a": {"b": ONE}}, id="dict"),
        pytest.param(Encoding({"a": ONE}), id="UserDict"),
        pytest.param(Special(a=ONE), id="a dict of one's own"),
        pytest.param(defaultdict(list, a=ONE), id="defaultdict"),
        pytest.param(Example(ONE, ["x"]), id="dataclass"),
        pytest.param(Frozen(ONE), id="frozen dataclass"),
        pytest.param(Pair(ONE, [ONE]), id="named tuple"),
        pytest.param(pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]), id="packed sequence"),
    ],
)
def test_every_tensor_moves_and_the_types_stay(batch: Any) -> None:
    there = moved(batch, META)
    assert type(there) is type(batch)
    assert tensors_of(batch)
    assert [path for path, _ in tensors_of(there)] == [path for path, _ in tensors_of(batch)]
    assert all(each.device == META for _, each in tensors_of(there))
    assert all(each.device.type == "cpu" for _, each in tensors_of(batch)), "what was given is left alone"


def test_what_a_mapping_has_beside_its_items_stays() -> None:
    special = Special(a=ONE)
    special.note = "mine"
    assert moved(Encoding({"a": ONE}, "mine"), META).note == "mine"
    assert moved(special, META).note == "mine"
    assert moved(defaultdict(list, a=ONE), META)["new"] == []


def test_a_mapping_that_cannot_be_changed_becomes_a_dict() -> None:
    assert moved(MappingProxyType({"a": ONE}), META)["a"].device == META


def test_what_knows_how_to_move_is_asked_to() -> None:
    assert moved([Graph(ONE)], META)[0].nodes.device == META
    assert moved(["text", 3, None, Graph], META) == ["text", 3, None, Graph]


def test_only_what_is_on_the_host_is_pinned() -> None:
    there = moved([ONE, {"a": ONE}], META)
    assert pinned(there)[0] is there[0]


def test_a_packed_sequence_can_be_unpacked_afterwards() -> None:
    packed = pack_sequence([torch.ones(1, 2), torch.ones(3, 2)], enforce_sorted=False)
    there: PackedSequence = map_tensors(lambda tensor: tensor * 2 if tensor.is_floating_point() else tensor, packed)
    padded, lengths = pad_packed_sequence(there, batch_first=True)
    assert (padded.sum().item(), lengths.tolist()) == (16.0, [1, 3])


def test_state_that_an_optimizer_was_made_with_goes_where_its_parameters_went() -> None:
    """Adagrad makes its sums when it is made, which is before the model is placed."""
    parameter = torch.nn.Parameter(torch.empty(3, device=META))
    optimizer = torch.optim.Adagrad([parameter])
    optimizer.state[parameter]["sum"] = torch.zeros(3)  # as it was made, when the parameter was still on the host
    Strategy(CpuRuntime()).place_optimizer(optimizer)
    assert optimizer.state[parameter]["sum"].device == META
    assert optimizer.state[parameter]["step"].device.type == "cpu", "which torch reads on the host"
