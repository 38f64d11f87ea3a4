"""Blocks that are compiled one by one: each kind once, and with the same results."""

from __future__ import annotations

import copy
import shutil
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
import torch.distributed as dist
from stacks import DATA, Runs, Stack, fresh, train
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from lockstep.config.training import Compile
from lockstep.runtime.cpu import CpuRuntime
from lockstep.strategy.activation_checkpointing import checkpoint_activations
from lockstep.strategy.blocks import find_blocks
from lockstep.strategy.compiled import compile_blocks
from tasks import Block

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")

Compiled = Callable[[], int]


@pytest.fixture
def compiled() -> Iterator[Compiled]:
    """How many programs torch has compiled since the test began; its settings are as before afterwards."""
    settings = torch._dynamo.config
    before = {name: getattr(settings, name) for name in ("recompile_limit", "optimize_ddp")}
    torch._dynamo.reset()
    counters.clear()
    with torch._inductor.config.patch(compile_threads=1):  # others would be left behind
        yield lambda: counters["aot_autograd"]["total"]
    for name, value in before.items():
        setattr(settings, name, value)
    torch._dynamo.reset()


class Alternating(Block):
    """Every other layer does something else, by an attribute: one class, two kinds of block."""

    def __init__(self, number: int) -> None:
        super().__init__(8, 0.0, False)
        self.odd = bool(number % 2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (0.5 if self.odd else 1.0)


def plain_stack(layers: int = 6) -> nn.Module:
    return in_sequence(*(Block(8, 0.0, False) for _ in range(layers)))


def alternating_stack(layers: int = 6) -> nn.Module:
    return in_sequence(*(Alternating(number) for number in range(layers)))


def in_sequence(*blocks: nn.Module) -> nn.Module:
    # With a layer before them: else the first alone has an input that needs no gradient, and is of a kind of its own.
    return nn.Sequential(nn.Linear(8, 8), *blocks)


class Broken(Block):
    """Cannot be traced as one program."""

    def __init__(self) -> None:
        super().__init__(8, 0.0, False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(x)
        torch._dynamo.graph_break()
        return super().forward(x)


def broken_stack() -> nn.Module:
    return in_sequence(*(Broken() for _ in range(3)))


@pytest.mark.parametrize("activation_checkpointing", [None, "blocks"])
@pytest.mark.parametrize(
    ("stack", "kinds"),
    [
        (plain_stack, 1),
        pytest.param(alternating_stack, 2, marks=pytest.mark.long),
        pytest.param(broken_stack, 2, marks=pytest.mark.long),
    ],
)
def test_blocks_that_are_alike_are_compiled_once(
    new_run: Runs, compiled: Compiled, stack: Callable[..., nn.Module], kinds: int, activation_checkpointing: str | None
) -> None:
    usual = fresh(stack)
    losses = train(new_run(), usual)
    model = fresh(stack)
    assert train(
        new_run(), model, compile="blocks", activation_checkpointing=activation_checkpointing
    ) == pytest.approx(losses, rel=1e-4)
    # The layer before the blocks is one more, unless it runs eagerly: beside recomputed blocks, or those with a break.
    assert compiled() == kinds + (activation_checkpointing is None and stack is not broken_stack)
    assert list(model.state_dict()) == list(usual.state_dict())
    for name, value in usual.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.long
def test_more_kinds_of_blocks_than_torch_compiles_of_one_function(new_run: Runs, compiled: Compiled) -> None:
    class Numbered(Block):
        def __init__(self, number: int) -> None:
            super().__init__(8, 0.0, False)
            self.number = number

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.01 * self.number

    torch._dynamo.config.recompile_limit, layers = 2, 4
    model = in_sequence(*(Numbered(number) for number in range(layers)))
    train(new_run(), model, steps=1, compile="blocks")
    assert compiled() == layers + 1, "and the layer before them"


@pytest.mark.long
def test_statistics_move_once_where_blocks_are_compiled_and_recomputed(new_run: Runs, compiled: Compiled) -> None:
    usual, model = fresh(dropout=0.0), fresh(dropout=0.0)
    losses = train(new_run(), usual)
    assert train(new_run(), model, compile="blocks", activation_checkpointing="blocks") == pytest.approx(
        losses, rel=1e-4
    )
    assert compiled() > 0
    for name, value in usual.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-3, atol=1e-4)


class Masked(nn.Module):
    """Half of the inputs are dropped, and each has a factor of its own: it has a gradient where its input was kept."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.factor = nn.Parameter(torch.ones(4096))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(torch.sin(x * self.factor), 0.5, training=True)


def test_dropout_that_is_compiled_and_recomputed_drops_the_same(new_run: Runs, compiled: Compiled) -> None:
    run, model = new_run(), nn.ModuleList([Masked(), Masked()])
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), compile="blocks", activation_checkpointing="blocks")
    outputs = [block(torch.ones(4096)) for block in model]
    sum(each.sum() for each in outputs).backward()
    for block, output in zip(model, outputs, strict=True):
        assert 1500 < int((output != 0).sum()) < 2600
        assert torch.equal(block.factor.grad != 0, output != 0)
    assert compiled() > 0


@pytest.mark.long
def test_a_deep_copy_of_compiled_blocks_computes_with_its_own_weights(new_run: Runs, compiled: Compiled) -> None:
    run, model = new_run(), fresh(plain_stack)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), compile="blocks")
    before = run.module(DATA.tensors[0])
    twin = copy.deepcopy(run.module)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not twin(DATA.tensors[0]).any()
    assert torch.equal(run.module(DATA.tensors[0]), before)


@pytest.fixture
def mesh_of_one() -> Iterator[DeviceMesh]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


@pytest.mark.parametrize("batch_norm", [False, pytest.param(True, marks=pytest.mark.long)])
def test_torchs_own_sharding_goes_around_them(mesh_of_one: DeviceMesh, compiled: Compiled, batch_norm: bool) -> None:
    """Its hooks gather a block's weights before the forward pass, and again before what is recomputed."""

    def losses(sharded: bool) -> list[float]:
        model = fresh(dropout=0.0, batch_norm=batch_norm, spectral=False)
        if sharded:
            checkpoint_activations(model, "blocks", None, CpuRuntime(), to_be_compiled=True)
            compile_blocks(model, None, Compile())
            for block in find_blocks(model, None).values():
                fully_shard(block, mesh=mesh_of_one)
            fully_shard(model, mesh=mesh_of_one)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(3):
            loss = model(DATA.tensors[0]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return [*found, *(float(each.sum()) for each in model.buffers())]

    assert losses(sharded=True) == pytest.approx(losses(sharded=False), rel=1e-4, abs=1e-5)
    assert compiled() == 2, "the first block has an input that needs no gradient"


def test_a_model_without_blocks_is_compiled_as_a_whole(new_run: Runs, compiled: Compiled) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

    losses = train(new_run(), fresh(make))
    assert train(new_run(), fresh(make), compile="blocks") == pytest.approx(losses, rel=1e-4)
    assert compiled() == 1


@pytest.mark.long
def test_the_whole_model_is_compiled_with_blocks_that_are_recomputed(new_run: Runs, compiled: Compiled) -> None:
    def make(**rest: Any) -> nn.Module:
        return Stack(dropout=0.0, batch_norm=False, spectral=False, **rest)

    losses = train(new_run(), fresh(make))
    assert train(new_run(), fresh(make), compile=True, activation_checkpointing="blocks") == pytest.approx(
        losses, rel=1e-4
    )
    assert compiled() == 1


def test_a_rank_is_given_time_while_a_block_is_compiled(new_run: Runs, compiled: Compiled) -> None:
    run, asked = new_run(), []
    patient = run._engine.group.activity.be_patient
    run._engine.group.activity.be_patient = lambda: (asked.append(run.progress.step), patient())  # type: ignore[method-assign]
    train(run, fresh(plain_stack), steps=3, compile="blocks")
    assert asked and set(asked) == {0}, "the first step compiles, and no other"
