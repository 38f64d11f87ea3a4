"""Whatever is read from a file or a network, with anything in it: our own errors and no others, in bounded time.

`LOCKSTEP_FUZZ=20000 pytest tests/fuzz` looks longer.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lockstep.checkpoint import codec, manifest
from lockstep.checkpoint.header import read_header
from lockstep.checkpoint.manifest import Damaged
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.checkpoint.tensor_file import dtype_of
from lockstep.config.load import load
from lockstep.config.schema import RunConfig
from lockstep.config.sweep import load_sweep
from lockstep.config.yaml_text import parse_yaml
from lockstep.distributed import group
from lockstep.distributed.activity import Beat
from lockstep.errors import ConfigError, LockstepError
from lockstep.launchers import script
from lockstep.record import run_folder
from lockstep.record.writers import keep_rows, read_rows

EXAMPLES = int(os.environ.get("LOCKSTEP_FUZZ", "60"))
LIMIT = 5.0  # seconds that any one input may take, on a machine that is busy

fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)

# JSON that means no good: numbers beyond any type, NaN, deep nesting, keys that are nearly right.
numbers = st.integers() | st.floats() | st.sampled_from([10**400, -(10**30), 2**63, 2**64, True, False, -1, 0, 1])
leaves = st.none() | st.booleans() | numbers | st.text(max_size=20)
values = st.recursive(
    leaves,
    lambda below: st.lists(below, max_size=4) | st.dictionaries(st.text(max_size=8), below, max_size=4),
    max_leaves=12,
)
deep = st.integers(1, 20_000).map(lambda depth: "[" * depth)
LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + before] * 9)}]\n" for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{','.join(['*' + before] * 9)}]}}\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)

SCHEMA = RunConfig.model_json_schema(by_alias=True)
names = st.sampled_from(
    sorted({*SCHEMA["properties"], *(name for each in SCHEMA["$defs"].values() for name in each.get("properties", {}))})
)
intervals = st.sampled_from(["1 step", "9" * 400 + " steps", "1e3 steps", "0 epochs", "5 minutes", "-1 s", "1.5 steps"])
configs = st.dictionaries(
    names | st.text(max_size=5),
    values
    | intervals
    | st.dictionaries(names, values | intervals | st.dictionaries(names, values, max_size=3), max_size=4),
    max_size=6,
)


@contextmanager
def in_time() -> Iterator[None]:
    began = time.process_time()  # another program may keep the cores busy
    yield
    assert time.process_time() - began < LIMIT


@contextmanager
def file(data: str | bytes, name: str = "file") -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data if isinstance(data, bytes) else data.encode(errors="surrogatepass"))
        with in_time():
            yield path


def only(read: Callable[[], Any], *errors: type[Exception]) -> Any:
    """What it returns; an error of ours has to have words, and any other is a fault."""
    try:
        return read()
    except errors as error:
        assert str(error)
        return None


# The config and what else is YAML


@fuzz
@given(text=st.text() | st.binary().map(lambda data: data.decode("latin-1")))
@example(text=LAUGHS)
@example(text=MERGES)
@example(text="task: &a [*a]")
@example(text="? [a]\n: b")
@example(text="task: !!python/object/apply:os.system [true]")
@example(text="task: !!timestamp x")
@example(text="task: !!binary x")
@example(text="task: " + "9" * 10_000)
@example(text="task: 0x" + "f" * 10_000)
@example(text="task: 1" + ":59" * 10_000)
@example(text="[" * 20_000)
@example(text="a: {" * 400)
@example(text="- " * 10_000)
@example(text="? " * 3_000)
@example(text="task: 'a\x00b.py:Task'")
@example(text='task: "a\\0b.py:Task"')
@example(text=f"task: '{'x' * 5000}.py:Task'")
@example(text="{task: a.py:A, 1: 2, null: 3, [a]: 4}")
@example(text="{task: a.py:A, 1: 2, null: 3, 1.5: 4, true: 5}")
def test_any_text_as_a_config(text: str) -> None:
    with in_time():
        only(lambda: parse_yaml(text), yaml.YAMLError)
    with file(text, "config.yaml") as path:
        assert only(lambda: load(path), ConfigError) is None
        only(lambda: run_folder.read_config(path.parent), ConfigError)
    with file(text, script.SCRIPT_FILE) as path:
        only(lambda: script.read(path.parent), ConfigError)


@fuzz
@given(raw=configs)
def test_any_values_in_a_config(raw: dict[str, Any]) -> None:
    with file(json.dumps({"task": "json:JSONDecoder", **raw}), "config.yaml") as path:
        only(lambda: load(path), ConfigError)


@fuzz
@given(overrides=st.lists(st.builds("{}={}".format, st.text(max_size=12) | names, st.text(max_size=30)), max_size=4))
@example(overrides=["task=&a [*a]"])
@example(overrides=["a" + ".a" * 2000 + "=1"])
@example(overrides=["train.steps=" + "[" * 3000])
def test_any_override(overrides: list[str]) -> None:
    with file("task: json:JSONDecoder\n", "config.yaml") as path:
        only(lambda: load(path, overrides), ConfigError)


@fuzz
@given(raw=st.dictionaries(st.sampled_from(["metric", "samples", "space", "prune", "seed"]), values))
def test_any_sweep(raw: dict[str, Any]) -> None:
    config = RunConfig.model_validate({"task": "json:JSONDecoder"})
    axis = {"train.steps": raw.get("space"), "optimizer.lr": {"uniform": raw.get("seed")}}
    with file(json.dumps({"space": axis, **raw})) as path:
        only(lambda: load_sweep(path, config), ConfigError)


# What a run's folder holds


@fuzz
@given(data=st.binary() | deep.map(str.encode) | values.map(lambda value: json.dumps(value).encode()))
def test_any_summary(data: bytes) -> None:
    with file(data, run_folder.SUMMARY_FILE) as path:
        assert isinstance(run_folder.read_summary(path.parent), dict)
        run_folder.record(path.parent, "failed", "why \ud800")
        assert run_folder.read_summary(path.parent)["status"] == "failed"


@fuzz
@given(
    lines=st.lists(st.binary() | deep.map(str.encode) | values.map(lambda value: json.dumps(value).encode())),
    good=st.integers(0, 3),
)
@example(lines=[b'{"step": "1"}', b'{"step": null}', b'{"step": [1]}', b'{"step": NaN}', b"[]", b"\xff", b"1"], good=1)
def test_any_rows(lines: list[bytes], good: int) -> None:
    rows = [json.dumps({"step": step, "examples_per_second": 1.0}).encode() for step in range(1, good + 1)]
    with file(b"\n".join([*lines, *rows]) + b"\n") as path:
        found = list(read_rows(path))
        assert all(isinstance(row, dict) for row in found) and found[len(found) - good :] == [*map(json.loads, rows)]
        assert keep_rows(path, len(path.read_bytes().splitlines())) >= len(found) == len(list(read_rows(path)))
        assert keep_rows(path, 2) <= 2 and len(path.read_bytes().split(b"\n")) <= 3


GOOD = {
    "format": 1, "step": 3, "value": 0.5,
    "files": {name: {"bytes": 4, "sha256": "x"} for name in manifest.FILES},
}  # fmt: skip


@fuzz
@given(
    changes=st.dictionaries(st.sampled_from([*GOOD, "digest", "more"]), values),
    inside=st.dictionaries(st.sampled_from(["bytes", "sha256"]), values),
)
def test_any_manifest(changes: dict[str, Any], inside: dict[str, Any]) -> None:
    told: dict[str, Any] = {**GOOD, **changes}
    if "files" not in changes:
        told["files"] = {**told["files"], manifest.MODEL_FILE: {**told["files"][manifest.MODEL_FILE], **inside}}
    told["digest"] = changes.get("digest", manifest._digest(told))  # what means no good knows how to make one
    with file(json.dumps(told), manifest.MANIFEST_FILE) as path:
        only(lambda: manifest.read(path.parent), Damaged)
        assert isinstance(manifest.problem(path.parent), str)
        place = path.parent / "step-00000003"
        place.mkdir()
        path.rename(place / manifest.MANIFEST_FILE)
        for name in manifest.FILES:
            (place / name).write_bytes(b"abcd")
        storage = CheckpointStorage(path.parent)
        assert [each.step for each in storage.saved()] == [3]
        storage.to_try(best=True)


SHARD = manifest.shard_name("model", 1, 1)
BY_OWNERS = {
    "format": 2, "step": 3, "value": 0.5,
    "files": {
        manifest.TREE_FILE: {"bytes": 4, "sha256": "x"},
        manifest.PARTS_FILE: {"bytes": 4, "sha256": "x"},
        manifest.INDEX_FILE: {"bytes": 4, "sha256": "x"},
        SHARD: {"bytes": 4, "sha256": {"0": "x", "1": "y"}},
    },
}  # fmt: skip


@fuzz
@given(
    changes=st.dictionaries(st.sampled_from([*BY_OWNERS, "digest", "more"]), values),
    inside=st.dictionaries(st.sampled_from(["bytes", "sha256"]), values),
    which=st.sampled_from([SHARD, manifest.PARTS_FILE, "../model-00001-of-00001.safetensors"]),
    parts=values | st.lists(st.lists(st.integers(-1, 5), max_size=5)).map(lambda each: {SHARD: {"0": each, "1": each}}),
)
def test_any_manifest_of_several_ranks(changes: dict[str, Any], inside: dict[str, Any], which: str, parts: Any) -> None:
    data = json.dumps(parts).encode()
    digest = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    files: dict[str, Any] = {**BY_OWNERS["files"], manifest.PARTS_FILE: digest}  # type: ignore[dict-item]
    told: dict[str, Any] = {**BY_OWNERS, "files": {**files, which: {**files.get(which, {}), **inside}}, **changes}
    told["digest"] = changes.get("digest", manifest._digest(told))
    with file(json.dumps(told), manifest.MANIFEST_FILE) as path:
        for name in (manifest.TREE_FILE, manifest.INDEX_FILE, SHARD):
            (path.parent / name).write_bytes(b"abcd")
        (path.parent / manifest.PARTS_FILE).write_bytes(data)
        only(lambda: manifest.read(path.parent), Damaged)
        assert isinstance(manifest.problem(path.parent), str)


@fuzz
@given(data=st.binary() | deep.map(str.encode))
def test_any_bytes_as_a_manifest(data: bytes) -> None:
    with file(data, manifest.MANIFEST_FILE) as path, pytest.raises(Damaged):
        manifest.read(path.parent)


def header(told: Any, rest: bytes = b"") -> bytes:
    text = told if isinstance(told, bytes) else json.dumps(told).encode()
    return struct.pack("<Q", len(text)) + text + rest


def tensor(dtype: str, shape: list[int], end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}


entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "I64", "BOOL", "X1"]) | values,
        "shape": st.lists(st.integers(0, 4) | numbers, max_size=4) | values,
        "data_offsets": st.tuples(st.integers(0, 64), st.integers(0, 64)).map(list) | values,
    },
)
BAD_TENSORS = (ValueError, KeyError, TypeError, AttributeError)  # what a reader calls damaged


@fuzz
@given(
    told=st.dictionaries(st.text(max_size=3), entries, max_size=3) | values,
    metadata=st.none() | values | st.fixed_dictionaries({"complex": values.map(json.dumps)}),
    rest=st.binary(max_size=64),
)
@example(told={"a": tensor("F32", [0, 2**70], 0)}, metadata=None, rest=b"")
@example(told={"a": tensor("F32", [True], 4)}, metadata=None, rest=b"abcd")
@example(told={"a": tensor("F32", [1] * 5000, 4)}, metadata=None, rest=b"abcd")
@example(told={"a": tensor("I64", [2], 16)}, metadata={"complex": '["a"]'}, rest=bytes(16))
@example(told={"a": tensor("F32", [2], 8)}, metadata={"complex": '["a"]'}, rest=bytes(8))
@example(told=[], metadata={"complex": "[" * 10_000}, rest=b"")
def test_any_header_of_tensors(told: Any, metadata: Any, rest: bytes) -> None:
    if metadata is not None and isinstance(told, dict):
        told = {**told, "__metadata__": metadata}
    read_tensors(header(told, rest))


@fuzz
@given(data=st.binary(max_size=200))
@example(data=struct.pack("<Q", 2**63) + b"{}")
@example(data=struct.pack("<Q", 10_000) + b"[" * 10_000)
def test_any_bytes_as_tensors(data: bytes) -> None:
    read_tensors(data)


def read_tensors(data: bytes) -> None:
    with in_time():
        found = only(lambda: [dtype_of(each) for each in read_header(io.BytesIO(data), len(data))], *BAD_TENSORS)
    assert found is None or all(isinstance(each, torch.dtype) for each in found)


def test_a_header_that_is_longer_than_the_format_allows_takes_no_memory() -> None:
    stream = io.BytesIO(struct.pack("<Q", 2**39))
    with pytest.raises(ValueError, match="the format allows"):
        read_header(stream, 2**40)


@fuzz
@given(
    tree=values
    | st.dictionaries(st.sampled_from(["$tensor", "$array", "$bytes", "$tuple", "$map", "$counter"]), values)
)
def test_any_tree_of_state(tree: Any) -> None:
    only(lambda: codec.unpack(tree, {"a": torch.zeros(1)}), *BAD_TENSORS)


# What comes over a network

BEAT = asdict(Beat(1, 2, 3, "loss", False, True, 0.0, 1.5, "train.py:3"))


@fuzz
@given(
    changes=st.dictionaries(st.sampled_from([*BEAT, "more"]), values),
    left_out=st.sets(st.sampled_from(list(BEAT)), max_size=1),
)
@example(changes={"still": 10**400}, left_out=set())
@example(changes={"count": True}, left_out=set())
@example(changes={"limit": math.inf}, left_out=set())
@example(changes={"doing": "x" * 10**6}, left_out=set())
def test_any_beat(changes: dict[str, Any], left_out: set[str]) -> None:
    told = {name: value for name, value in {**BEAT, **changes}.items() if name not in left_out}
    beat = Beat.decode(json.dumps(told).encode())
    if beat is not None:
        assert len(beat.describe()) < 10_000 and beat.still + beat.limit >= 0 and (beat.count + 1, beat.step + 1)
    assert changes or left_out or beat == Beat(**BEAT)


@fuzz
@given(data=st.binary() | deep.map(str.encode) | values.map(lambda value: json.dumps(value).encode()))
@example(data=b"")
@example(data=b"null")
@example(data=b'{"failed": 1}')
@example(data=b'{"failed": {}, "name": 1}')
@example(data=b'"failed"')
def test_any_message(data: bytes) -> None:
    with in_time():
        assert Beat.decode(data) is None
        only(lambda: group._unwrap(data, "a name"), LockstepError)
        only(lambda: group._decoded(data, "a name"), LockstepError)
        only(lambda: group._size(data, "a name"), LockstepError)
