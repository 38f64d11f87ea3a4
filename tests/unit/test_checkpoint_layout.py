"""Who writes what: every byte of every file by one rank, and nothing where the ranks' parts do not fit together."""

from __future__ import annotations

import io
import json
import random

import pytest
import torch

from lockstep.checkpoint import layout, ranges, tensor_file
from lockstep.checkpoint.header import Piece, check_pieces, laid_out, read_header
from lockstep.checkpoint.layout import Block, Item
from lockstep.errors import CheckpointError


def item(name: str, *shape: int, kind: str = "model", dtype: torch.dtype = torch.float32, spread: bool = True) -> Item:
    return Item(kind, tensor_file.entry_of(name, dtype, shape), spread)


def rows(shape: tuple[int, ...], ranks: int) -> list[Block]:
    """As torch divides the first axis: the last ranks may get nothing."""
    each = -(-shape[0] // ranks)
    cuts = [min(rank * each, shape[0]) for rank in range(ranks + 1)]
    return [
        Block((cuts[rank], *(0 for _ in shape[1:])), (cuts[rank + 1] - cuts[rank], *shape[1:])) for rank in range(ranks)
    ]


@pytest.mark.parametrize(("ranks", "apart"), [(1, False), (2, False), (3, False), (5, False), (2, True), (5, True)])
def test_every_byte_is_written_by_one_rank(ranks: int, apart: bool) -> None:
    items = [
        item("a", 7, 3),
        item("b", 2, 3, dtype=torch.bfloat16),
        item("flag", 3, dtype=torch.bool, spread=False),
        item("none", 0, 3),
        item("c", 33, 65),
        item("momentum", 7, 3, kind="state"),
        item("step", kind="state", spread=False),
    ]
    had = [[rows(each.entry.shape, ranks)[rank] for each in items if each.spread] for rank in range(ranks)]
    made = layout.make(items, had, apart)
    for file in made.files:
        assert not apart or list(made.parts(ranks)[file.name]) == [str(file.owner)], "on several hosts, by one alone"
        written = bytearray(file.size)
        for found in made.parts(ranks).get(file.name, {}).values():
            for begin, length, stride, count in found:
                for row in range(count):
                    for at in range(begin + row * stride, begin + row * stride + length):
                        written[at] += 1
        assert set(written) == {1}, file.name
    index = made.index()
    models = [file for file in made.files if file.name in index["weight_map"].values()]
    names = {each.entry.tensor for file in models for each in file.items}
    assert names == {"a", "b", "c", "flag", "none"} and (apart or set(index["weight_map"]) == names)
    assert index["metadata"]["total_size"] == 7 * 3 * 4 + 2 * 3 * 2 + 3 + 33 * 65 * 4
    assert [Item.from_plain(json.loads(json.dumps(each.plain()))) for each in items] == items


def test_files_are_about_as_long_as_each_other_and_in_order() -> None:
    items = [item(f"layer{number:03d}", 100, random.Random(number).randint(90, 110)) for number in range(40)]
    made = layout.make(items, [[rows(each.entry.shape, 4)[rank] for each in items] for rank in range(4)])
    assert [file.name for file in made.files] == [f"model-0000{k}-of-00004.safetensors" for k in range(1, 5)]
    sizes = [file.size for file in made.files]
    assert max(sizes) < 1.2 * min(sizes)
    names = [each.entry.name for file in made.files for each in file.items]
    assert names == sorted(names)


def test_of_those_that_have_the_same_block_one_writes_it_each_in_its_turn() -> None:
    """Two replicas of two halves: ranks 0 and 2 have the first, 1 and 3 the second."""
    items = [item(str(number), 4) for number in range(4)]
    halves = [Block((0,), (2,)), Block((2,), (2,))]
    made = layout.make(items, [[halves[rank % 2]] * 4 for rank in range(4)])
    writers = [sorted(made.blocks[each.key]) for each in items]
    assert writers == [[0, 1], [2, 3], [0, 1], [2, 3]]


@pytest.mark.parametrize(
    "blocks",
    [
        [Block((0, 0), (2, 4)), Block((3, 0), (1, 4))],  # a row is missing
        [Block((0, 0), (3, 4)), Block((2, 0), (2, 4))],  # two overlap
        [Block((0, 0), (2, 4)), Block((4, 0), (0, 4))],  # the end is missing
        [Block((0, 0), (2, 2)), Block((2, 2), (2, 2))],  # two corners of four
        [Block((4, 0), (0, 4)), Block((4, 0), (0, 4))],
    ],
)
def test_parts_that_do_not_make_up_a_tensor_are_refused(blocks: list[Block]) -> None:
    with pytest.raises(CheckpointError, match=r"'w' of shape \[4, 4\] cannot be saved: .* does not make it up"):
        layout.make([item("w", 4, 4)], [[each] for each in blocks])


def test_a_model_without_any_state_has_no_file_for_it() -> None:
    made = layout.make([item("w", 4, spread=False)], [[], []])
    assert [file.name for file in made.files] == ["model-00001-of-00001.safetensors"]
    assert made.written_by(1, made.files[0]) == []
    assert ranges.total(made.parts(2)[made.files[0].name]["0"]) == made.files[0].size


def test_pieces_that_do_not_make_up_a_tensor_are_found() -> None:
    def file(*pieces: tuple[int, int, torch.dtype], shape: tuple[int, ...] = (4,)) -> bytes:
        told = [
            tensor_file.entry_of(f"w[{at}]", dtype, (size,))._replace(piece=Piece("w", shape, (at,)))
            for at, size, dtype in pieces
        ]
        header, entries = laid_out(told)
        return header + bytes(sum(each.nbytes for each in entries))

    def read(data: bytes) -> None:
        check_pieces(read_header(io.BytesIO(data), len(data)))

    real = torch.float32
    read(file((0, 3, real), (3, 1, real)))
    for bad in (
        file((0, 3, real)), file((0, 2, real), (0, 2, torch.float64)), file((0, 3, real), (2, 2, real)),
        file((3, 2, real)), file((0, 2, real), shape=(10**9,)), file((0, 2, real), shape=(4, 4)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="'w"):
            read(bad)
