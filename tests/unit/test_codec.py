"""State to tensors and JSON, and back, with nothing lost and nothing guessed."""

from __future__ import annotations

import json
import warnings
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # torch's first optimizer imports it, and it sets an environment variable
from comparison import same
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import lr_scheduler as schedulers

from lockstep.checkpoint.codec import from_bytes, pack, shared_names, to_bytes, unpack
from lockstep.checkpoint.registered import _digest
from lockstep.checkpoint.tensor_file import memory
from lockstep.errors import CheckpointError

Point = namedtuple("Point", "x y")


def there_and_back(state: Any) -> Any:
    tree, tensors = pack(state)
    return unpack(json.loads(json.dumps(tree)), {name: tensor.clone() for name, tensor in tensors.items()})


@pytest.mark.parametrize(
    "state",
    [
        None,
        True,
        -3,
        2**80,
        0.1,
        float("inf"),
        float("nan"),
        "text é \ud83d",
        b"\x00\xff bytes",
        [],
        (),
        {},
        [1, [2, [None]]],
        (1, (2, (3,))),
        [(1, 2), [3, 4]],
        {"a": {"b": {"c": 1}}},
        {0: "zero", 1: {2: "two"}},
        {(1, "a"): "tuple key", None: 1, 2.5: 2, b"k": 3, True: 4},
        {"$tensor": "a name of ours", "$": 1},
        {"$tuple": [1, 2]},
        {"plain": 1, "$map": 2},
        Counter({30: 1, 80: 2}),
        Counter(),
        {"milestones": Counter({"a": 3})},
        torch.arange(6).reshape(2, 3),
        torch.tensor(2.5),
        torch.zeros(0, 3),
        torch.tensor([0.5, -1.25, 3.0, 7.0]).to(torch.bfloat16),
        torch.tensor([True, False]),
        np.arange(6, dtype=np.uint32).reshape(2, 3),
        np.array(3.5),
        np.int64(3),
        [np.float32(0.1), np.float64(0.1), np.bool_(True), np.float16("inf")],
        {np.int64(1): 1, "__metadata__": torch.ones(1)},
        np.arange(6).reshape(2, 3).T,
        np.arange(6)[::-1],
        {"a": [torch.ones(2), {"b": (np.zeros(3), b"x")}], 1: torch.zeros(1)},
        {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}},
        {"0": torch.ones(1), 0: torch.zeros(1)},
        {"a": [torch.ones(1)], "a.0": torch.zeros(1)},
        {"": torch.ones(1), "a": torch.zeros(1)},
    ],
    ids=repr,
)
def test_state_comes_back_as_it_was(state: Any) -> None:
    assert same(there_and_back(state), state)
    assert same(from_bytes(to_bytes(state)), state), "so it comes to another rank"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1 + 2j, 3j]).conj(),
        torch.tensor([1 + 2j, 3j], dtype=torch.complex128).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.ones(2, dtype=torch.complex32),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.ones(3).to(torch.float8_e8m0fnu),
        torch.ones(1).expand(4),
        torch.zeros(3, dtype=torch.uint16),
    ],
    ids=repr,
)
def test_a_tensor_of_any_type_comes_to_another_rank_and_is_digested(tensor: torch.Tensor) -> None:
    found, expected = from_bytes(to_bytes(tensor)), tensor.resolve_conj().resolve_neg().clone()
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert bytes(memory(found)) == bytes(memory(expected))
    assert _digest("mine", tensor) == _digest("mine", found)


def test_the_digest_of_state_knows_the_place_of_every_number() -> None:
    first, second = (_digest("mine", {"order": torch.tensor(each)}) for each in ([0, 1, 2], [2, 1, 0]))
    assert first != second


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.eye(3).to_sparse(), "it is a torch.sparse_coo tensor; only dense"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested tensor; only dense"),
        (torch.ones(3, device="meta"), "meta tensor; only dense"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "torch.qint8, which the safetensors format"),
    ],
)
def test_a_tensor_that_no_file_can_hold_is_refused_by_name(tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"the state of 'mine': 'a.b' cannot be saved: .*{message}"):
        _digest("mine", {"a": {"b": tensor}})


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (np.str_("text"), "text"),
        (torch.Size([2, 3]), (2, 3)),
        (nn.Parameter(torch.ones(2)), torch.ones(2)),
    ],
)
def test_relatives_of_plain_types_come_back_plain(state: Any, expected: Any) -> None:
    assert same(there_and_back(state), expected)


words = st.sampled_from(["a", "b", "a.b", "0", "1", "", ".", "#key", "$tensor", "$map", "$tuple", "$"])
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3)
numbers = st.integers(0, 1000)
leaves = plain | numbers.map(torch.tensor) | numbers.map(np.array) | numbers.map(torch.tensor)
states = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(words, inner, max_size=4),
        st.dictionaries(st.integers(0, 2) | words, inner, max_size=4),
        st.dictionaries(st.tuples(st.integers(0, 2), words), inner, max_size=3),
    ),
    max_leaves=10,
)


@settings(deadline=None, max_examples=100)
@given(state=states)
def test_any_nesting_comes_back_as_it_was(state: Any) -> None:
    assert same(there_and_back(state), state)


@pytest.mark.parametrize(
    ("state", "path", "kind"),
    [
        ({"a": {"b": {1, 2}}}, "a.b", "set"),
        ({"a": [0, object()]}, "a.1", "object"),
        ({"f": lambda: None}, "f", "function"),
        ({"dtype": torch.float32}, "dtype", "dtype"),
        ({"z": 1j}, "z", "complex"),
        ({"z": np.complex64(1j)}, "z", "complex"),
        ({"when": np.datetime64("2024-01-01")}, "when", "date"),
        ({"names": np.array(["a", "b"])}, "names", "array"),
        ({"objects": np.array([object()])}, "objects", "array"),
        ({"wide": np.ones(2, np.longdouble)}, "wide", "array"),
        ({"wide": np.longdouble(1)}, "wide", "longdouble"),
        ({"a": defaultdict(int, b=1)}, "a", "defaultdict"),
        ({"a": [Point(1, 2)]}, "a.0", "Point"),
        (object(), "state", "object"),
    ],
)
def test_a_type_that_cannot_be_saved_is_refused_by_its_path(state: Any, path: str, kind: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^{path}: a value of type .*{kind}.* cannot be saved"):
        pack(state)


# What torch keeps


def trained(make: Callable[..., Optimizer], **settings: Any) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters(), **settings)
    train(model, optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: Optimizer) -> None:
    model(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (SGD, {"lr": 0.1}),
        (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (Adam, {"lr": 0.01, "amsgrad": True}),
        (AdamW, {"lr": 0.01, "betas": (0.8, 0.99)}),
        (AdamW, {"lr": torch.tensor(0.01)}),
    ],
)
def test_an_optimizer_goes_on_from_its_packed_state_bit_for_bit(make: Any, settings: dict[str, Any]) -> None:
    model, optimizer = trained(make, **settings)
    state = there_and_back(optimizer.state_dict())
    assert same(state, optimizer.state_dict())
    twin, other = trained(make, **settings)
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(state)
    train(model, optimizer)
    train(twin, other)
    assert same(dict(twin.state_dict()), dict(model.state_dict()))


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "StepLR": lambda optimizer: schedulers.StepLR(optimizer, 2),
    "MultiStepLR": lambda optimizer: schedulers.MultiStepLR(optimizer, [1, 3, 3]),
    "CosineAnnealingLR": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 10),
    "OneCycleLR": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.5, total_steps=20),
    "SequentialLR": lambda optimizer: schedulers.SequentialLR(
        optimizer,
        [schedulers.LinearLR(optimizer, 0.1, total_iters=2), schedulers.MultiStepLR(optimizer, [2, 4])],
        milestones=[3],
    ),
    "ReduceLROnPlateau": lambda optimizer: schedulers.ReduceLROnPlateau(optimizer, patience=1),
    "LambdaLR": lambda optimizer: schedulers.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "ChainedScheduler": lambda optimizer: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(optimizer, 0.5, 2), schedulers.ExponentialLR(optimizer, 0.9)]
    ),
    "CosineAnnealingWarmRestarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 3),
}


def rates(scheduler: Any, optimizer: Optimizer, steps: int) -> list[float]:
    """The learning rate after each of some more steps; a metric that grows worse where one is asked for."""
    found = []
    for step in range(steps):
        scheduler.step(*([float(step)] if isinstance(scheduler, schedulers.ReduceLROnPlateau) else []))
        found.append(float(optimizer.param_groups[0]["lr"]))
    return found


@pytest.mark.requirement("D16")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_from_its_packed_state(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about the order of calls and the epoch argument
        _, optimizer = trained(SGD, lr=0.1, momentum=0.9)
        scheduler = SCHEDULERS[name](optimizer)
        rates(scheduler, optimizer, 2)
        packed, packed_optimizer = there_and_back(scheduler.state_dict()), there_and_back(optimizer.state_dict())
        _, other = trained(SGD, lr=0.1, momentum=0.9)
        restored = SCHEDULERS[name](other)
        other.load_state_dict(packed_optimizer)
        restored.load_state_dict(packed)
        assert rates(restored, other, 6) == rates(scheduler, optimizer, 6)


# Tied weights


def test_names_of_the_very_same_tensor_are_found() -> None:
    weight, other = torch.randn(3, 3), torch.randn(3, 3)
    assert shared_names({"a": weight, "b": other, "c": weight, "d": weight}) == {"c": "a", "d": "a"}


def test_tensors_that_share_only_memory_are_not_the_same() -> None:
    whole = torch.arange(9.0).reshape(3, 3)
    assert shared_names({"whole": whole, "row": whole[0], "turned": whole.T}) == {}


def test_empty_tensors_are_not_the_same() -> None:
    assert shared_names({"a": torch.zeros(0), "b": torch.zeros(0)}) == {}
