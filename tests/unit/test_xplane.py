"""A trace of torch.profiler, converted, is what XLA's own message definition and TensorBoard's plugin say it is."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.profiler.xplane import SESSIONS, convert, make_readable

# As torch writes it: microseconds, a process per device, a thread per stream, and tracks that repeat the rest.
EVENTS: list[dict[str, Any]] = [
    {"ph": "M", "name": "process_name", "pid": 42, "tid": 0, "args": {"name": "python"}},
    {"ph": "M", "name": "process_labels", "pid": 42, "tid": 0, "args": {"labels": "CPU"}},
    {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
    {"ph": "M", "name": "thread_name", "pid": 42, "tid": 42, "args": {"name": "thread 42 (python)"}},
    {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "stream 7"}},
    {"ph": "X", "name": "ProfilerStep#10", "pid": 42, "tid": 42, "ts": 1000.0, "dur": 50.0},
    {"ph": "X", "name": "forward", "pid": 42, "tid": 42, "ts": 1000.0, "dur": 20.25},
    {"ph": "X", "name": "gemm", "pid": 0, "tid": 7, "ts": 1010.5, "dur": 3.125},
    {"ph": "X", "name": "gemm", "pid": 0, "tid": 7, "ts": 1020.0, "dur": 3.0},
    {"ph": "X", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "PyTorch Profiler", "ts": 990.0, "dur": 99.0},
    {"ph": "s", "name": "ac2g", "pid": 42, "tid": 42, "ts": 1001.0, "id": 1},
    {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": 1100.0, "s": "g"},
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "proc_0.1700000000000000000.pt.trace.json.gz"
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": EVENTS}).encode()))
    return file


def test_the_message_reads_back_with_xlas_definition(trace: Path) -> None:
    space = definition()()
    space.ParseFromString(convert(trace))
    planes = {plane.name: plane for plane in space.planes}
    assert set(planes) == {"/host:CPU", "/device:GPU:0"}

    def lines(plane: Any) -> dict[str, list[tuple[str, int, int]]]:
        names = {entry.key: entry.value.name for entry in plane.event_metadata}
        return {
            line.name: [(names[event.metadata_id], event.offset_ps, event.duration_ps) for event in line.events]
            for line in plane.lines
        }

    # A step comes before what is in it, though both begin at the same time.
    host = [("ProfilerStep#10", 0, 50_000_000), ("forward", 0, 20_250_000)]
    assert lines(planes["/host:CPU"]) == {"thread 42 (python)": host}
    assert lines(planes["/device:GPU:0"]) == {
        "stream 7": [("gemm", 10_500_000, 3_125_000), ("gemm", 20_000_000, 3_000_000)]
    }


def test_it_is_written_where_the_plugin_looks_and_only_once(trace: Path) -> None:
    make_readable(trace)
    (file,) = (trace.parent / SESSIONS).glob("*/proc_0.xplane.pb")
    file.write_bytes(b"as it was")
    make_readable(trace)
    assert file.read_bytes() == b"as it was"
    assert not list(trace.parent.rglob("*.partial"))


@pytest.mark.requirement("P10")
def test_tensorboards_plugin_reads_it(trace: Path) -> None:
    reader = pytest.importorskip("xprof.convert.raw_to_tool_data", reason="the profile extra is not installed")
    make_readable(trace)
    (file,) = (trace.parent / SESSIONS).glob("*/proc_0.xplane.pb")
    data, _ = reader.xspace_to_tool_data([str(file)], "trace_viewer", {})
    shown = {
        (event["name"], event["ts"], event["dur"])
        for event in json.loads(data)["traceEvents"]
        if event.get("ph") == "X"
    }
    assert ("forward", 0.0, 20.25) in shown and ("gemm", 10.5, 3.125) in shown


def definition() -> Any:
    """XSpace from tsl/profiler/protobuf/xplane.proto, as far as it is used."""
    descriptor_pb2 = pytest.importorskip("google.protobuf.descriptor_pb2", reason="protobuf comes with tensorboard")
    from google.protobuf import descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="xplane.proto", package="test", syntax="proto3")
    messages = {
        "XSpace": [("planes", 1, "XPlane")],
        "XPlane": [("id", 1, int), ("name", 2, str), ("lines", 3, "XLine"), ("event_metadata", 4, "Entry")],
        "Entry": [("key", 1, int), ("value", 2, "*XEventMetadata")],
        "XEventMetadata": [("id", 1, int), ("name", 2, str)],
        "XLine": [("id", 1, int), ("name", 2, str), ("timestamp_ns", 3, int), ("events", 4, "XEvent")],
        "XEvent": [("metadata_id", 1, int), ("offset_ps", 2, int), ("duration_ps", 3, int)],
    }  # fmt: skip
    field = descriptor_pb2.FieldDescriptorProto
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for called, number, kind in fields:
            one = isinstance(kind, type) or str(kind).startswith("*")
            label = field.LABEL_OPTIONAL if one else field.LABEL_REPEATED
            made = message.field.add(name=called, number=number, label=label)
            if isinstance(kind, type):
                made.type = field.TYPE_INT64 if kind is int else field.TYPE_STRING
            else:
                made.type, made.type_name = field.TYPE_MESSAGE, f".test.{str(kind).removeprefix('*')}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("test.XSpace"))
