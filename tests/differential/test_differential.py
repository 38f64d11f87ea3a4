"""Random loops: what plain PyTorch computes on one process, Lockstep computes on any number of ranks, resumed anywhere.

`make fuzz` tries 20,000 others.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import plain
import pytest
from hypothesis import HealthCheck, example, given, settings
from pool import Pool
from programs import Loss, Program, Source, Walk, Way, programs, ways

EXAMPLES = int(os.environ.get("LOCKSTEP_LOOPS", "200"))
# One for every worker of pytest-xdist. The 200 of `make test` stay together, and the same.
PARTS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) if "LOCKSTEP_LOOPS" in os.environ else 1
CLOSE = 1e-7

# What may be refused: nothing but zero_grad(), a name or a step could say what is meant.
REFUSED = re.compile(
    r"still hold gradients of a backward pass|can no longer be separated|losses of several batches were given as a "
    r"sum|cannot be distinguished from source|"
    r"count differently|was left between two steps|one ended while gradients waited|are "
    r"added up over several batches|may be source|train\.exact: 2|comes after run\.gradients"
)


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, Pool]]:
    made = {ranks: Pool(ranks) for ranks in (1, 2, 3)}
    yield made
    for each in made.values():
        each.close()


def pool_of(ranks: int, pools: dict[int, Pool]) -> Pool:
    """The ranks that are there, or others where a program has ended them."""
    if pools[ranks].has_ended:
        pools[ranks] = Pool(ranks)
    return pools[ranks]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """In memory, where that is a folder: programs wait for the disk otherwise."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as made:
        yield Path(made)


def trained(program: Program, chain: tuple[Way, ...], pools: dict[int, Pool], folder: Path) -> dict[str, Any] | None:
    """What came of it over all starts; None where the program is refused."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    seen: list[Any] = []
    for way in chain:
        job = {"program": program.to_dict(), "folder": str(folder), **asdict(way)}
        found = pool_of(way.ranks, pools).train(job)
        if "refused" in found:
            assert REFUSED.search(found["refused"]), found["refused"]
            return None
        seen += found["seen"]
        if not found["left"]:
            return {**found, "seen": seen}
    raise AssertionError("the last start of a chain comes to its end")


def check(program: Program, chain: tuple[Way, ...], pools: dict[int, Pool], folder: Path) -> None:
    found = trained(program, chain, pools, folder)
    if found is None:
        return
    expected = plain.result(program)
    assert found["step"] == expected["step"]
    assert found["seen"] == expected["seen"]
    for name in ("weights", "averages"):
        for model, (mine, theirs) in enumerate(zip(found[name], expected[name], strict=True)):
            if mine is not None and theirs is not None:
                assert _flat(mine) == pytest.approx(_flat(theirs), rel=CLOSE, abs=CLOSE), f"{name} of model {model}"


def _flat(value: Any) -> list[float]:
    return [one for each in value for one in _flat(each)] if isinstance(value, list) else [value]


A, B = Source("tensors", 8, 4, False, False), Source("tensors", 4, 4, False, False)
ONE = Loss((0,), False, True, (0,), 1)
SIMPLE = Program(("sgd",), None, False, (A,), (Walk((0,), "all", 0, 1, (ONE,)),), 2, -1, True)
GAN = (Loss((0, 1), True, True, (1,), 1), Loss((0, 1), False, True, (0,), 1))


@pytest.mark.parametrize("part", range(PARTS))
@settings(
    max_examples=EXAMPLES // PARTS, deadline=None, derandomize="LOCKSTEP_LOOPS" not in os.environ, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(programs(), ways())
@example(SIMPLE, (Way(2, "fsdp", 1), Way(3, "auto")))
# Two sources of one type and length had one position; after a resume, one had that of another.
@example(
    replace(SIMPLE, sources=(A, A), walks=(Walk((0,), "all", 1, 1, (ONE,)), Walk((1,), "all", 0, 1, (ONE,)))),
    (Way(1, "auto"),),
)
@example(
    replace(SIMPLE, sources=(B, A), walks=(Walk((0,), "first", 0, 1, (ONE,)), Walk((1,), "all", 0, 1, (ONE,)))),
    (Way(1, "auto", 4), Way(1, "auto")),
)
# Of two that are walked together, the second lost an epoch after a resume at the end of a pass.
@example(
    replace(SIMPLE, sources=(A, A), walks=(Walk((0, 1), "all", 0, 1, (ONE,)),)), (Way(1, "auto", 2), Way(1, "auto"))
)
# The last batch of one was dropped by zip() while gradients waited for a step, and counted as trained on.
@example(
    replace(
        SIMPLE,
        sources=(replace(A, length=2, batch_size=1), replace(A, length=2, batch_size=2)),
        walks=(Walk((0, 1), "all", 0, 1, (replace(ONE, every=2),)), Walk((1,), "all", 0, 1, (ONE,))),
    ),
    (Way(1, "auto"),),
)
# After a resume, a source that was new took the position of one of the same type and length, which another call walks.
@example(
    replace(
        SIMPLE,
        sources=(
            replace(A, length=2, batch_size=1),
            replace(A, length=2, batch_size=2),
            replace(A, length=2, batch_size=1),
        ),
        walks=(Walk((1, 2), "all", 0, 1, (ONE,)), Walk((0,), "all", 0, 1, (ONE,)), Walk((0,), "all", 0, 1, (ONE,))),
        epochs=1,
    ),
    (Way(1, "auto", 1), Way(1, "auto")),
)
@example(
    replace(
        SIMPLE,
        sources=(replace(A, length=3, batch_size=1),) * 3,
        walks=(Walk((0,), "all", 0, 1, (ONE,)), Walk((1,), "later", 0, 1, (ONE,)), Walk((2,), "all", 2, 1, (ONE,))),
    ),
    (Way(1, "auto", 5), Way(1, "auto")),
)
# A loop that calls zero_grad() before some batches: gradients that it would have added to were dropped.
@example(
    replace(
        SIMPLE,
        optimizers=("sgd", "sgd"),
        walks=(Walk((0,), "all", 0, 1, (replace(ONE, every=2), ONE, Loss((1, 0), False, False, (1,), 1))),),
    ),
    (Way(1, "auto"),),
)
# A sum and a count were divided for one of two optimizers.
@example(
    replace(
        SIMPLE, optimizers=("sgd", "sgd"), walks=(Walk((0,), "all", 0, 1, (Loss((0, 1), False, False, (0, 1), 1),)),)
    ),
    (Way(2, "auto"),),
)
# Under fsdp, a batch that was left half way left its gradients behind.
@example(replace(SIMPLE, walks=(Walk((0,), "all", 0, 2, (ONE,)),), quit_at=0), (Way(2, "fsdp"),))
# Without zero_grad, a discriminator was trained on the generator's loss.
@example(
    replace(SIMPLE, optimizers=("sgd", "sgd"), walks=(Walk((0,), "all", 0, 1, GAN),), zero_grad=False),
    (Way(1, "auto"),),
)
# Under fsdp, a forward pass without a backward pass left what it had gathered in place of the parameters: the
# next step was not seen, and what was frozen or unfrozen then did not last.
@example(
    replace(
        SIMPLE,
        optimizers=("sgd", "sgd"),
        walks=(Walk((0,), "all", 0, 1, (ONE, Loss((0, 1), True, True, (1,), 1)), True),),
    ),
    (Way(2, "fsdp"),),
)
@example(
    replace(
        SIMPLE,
        optimizers=("sgd", "sgd"),
        walks=(Walk((0,), "all", 0, 1, (ONE,)), Walk((0,), "all", 0, 1, (Loss((0, 1), True, True, (1,), 1),))),
        frozen="first",
    ),
    (Way(1, "fsdp"),),
)
# After a resume, passes within a batch of another source were taken for done, and those left of its pass were lost.
@example(
    replace(SIMPLE, sources=(A, replace(A, batch_size=2)), walks=(Walk((0, 1), "all", 0, 1, (ONE,), form="nested"),)),
    (Way(1, "auto", 3, True), Way(2, "auto", 8), Way(1, "auto")),
)
@example(
    replace(SIMPLE, sources=(A, B), walks=(Walk((0, 1), "all", 0, 1, (ONE,), form="begins again"),)),
    (Way(2, "auto", 3), Way(1, "auto")),
)
# Under ddp, torch waited for gradients of a forward pass that had no backward pass, also once weights were frozen.
@example(
    replace(
        SIMPLE,
        optimizers=("sgd", "sgd"),
        walks=(Walk((0,), "all", 0, 1, (ONE,)), Walk((0,), "all", 0, 1, (Loss((0, 1), True, True, (1,), 1),))),
        frozen="later",
    ),
    (Way(2, "auto"),),
)
def test_a_loop_computes_what_plain_torch_computes(
    pools: dict[int, Pool], folder: Path, part: int, program: Program, chain: tuple[Way, ...]
) -> None:
    check(program, chain, pools, folder / "run")
