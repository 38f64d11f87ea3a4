"""What the roll call finds wrong with the ranks that reported, and how it says so."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.distributed.rollcall.call import call, contributions_fault
from lockstep.distributed.rollcall.report import (
    SHOWN,
    Evidence,
    Report,
    comparable,
    differences,
    digest,
    find_faults,
    render,
    source_files,
)
from lockstep.distributed.store.client import connect_unix
from lockstep.distributed.store.private import fresh_folder
from lockstep.distributed.store.server import Server, listen_on_unix
from lockstep.errors import RankAbsent, RollCallError

NO_EVIDENCE = Evidence({}, {})


def report(rank: int = 0, world_size: int = 2, **changes: Any) -> Report:
    usual = Report(
        rank=rank,
        local_rank=rank,
        host="node-a",
        pid=100 + rank,
        device=f"cuda:{rank}",
        physical_device=f"GPU-{rank}",
        world_size=world_size,
        runtime_world=None,
        python="3.11.7",
        torch="2.13.0",
        lockstep="0.2.0",
        config="c",
        source="s",
    )
    return replace(usual, **changes)


def faults(*reports: Report, world_size: int = 2, share: bool = False) -> list[tuple[str, tuple[int, ...]]]:
    return [(fault.text, fault.ranks) for fault in find_faults(list(reports), world_size, share)]


def test_ranks_that_are_what_they_should_be() -> None:
    assert faults(report(0), report(1)) == []
    assert faults(report(1, 4), report(3, 4), report(0, 4), report(2, 4), world_size=4) == []


@pytest.mark.requirement("R04")
@pytest.mark.parametrize(
    ("reports", "text", "ranks"),
    [
        ([report(0)], "rank 1 of 2 did not arrive", (1,)),
        ([report(0), report(0, pid=7)], "rank 0 is claimed 2 times, by process 100 on node-a and process 7", (0,)),
        ([report(0), report(5)], "rank 5 does not exist in a world of 2", (5,)),
        ([report(0), report(1, 3)], "WORLD_SIZE differs: 2 on rank 0, 3 on rank 1", (1,)),
        ([report(0), report(1, runtime_world=1)], "rank 1: the device runtime believes in a world of 1", (1,)),
        ([report(0), report(1, torch="2.9.0")], "versions of torch differ: 2.13.0 on rank 0, 2.9.0 on rank 1", (1,)),
        ([report(0), report(1, python="3.12.1")], "versions of Python differ", (1,)),
        ([report(0), report(1, lockstep="0.1.0")], "versions of Lockstep differ", (1,)),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_ranks(reports: list[Report], text: str, ranks: tuple[int, ...]) -> None:
    found = faults(*reports)
    assert any(text in said and concerned == ranks for said, concerned in found), found


@pytest.mark.requirement("R06")
def test_two_ranks_on_one_physical_device() -> None:
    """Both call it cuda:0, or each by another name: only the physical device tells."""
    same = [report(0), report(1, device="cuda:0", physical_device="GPU-0")]
    ((text, ranks),) = faults(*same)
    assert "ranks 0, 1 are on the same physical device, GPU-0" in text
    assert "launch.share_devices: true" in text
    assert ranks == (0, 1)
    assert faults(*same, share=True) == []
    assert faults(report(0, device="cuda:0"), report(1, device="cuda:0")) == [], "each process may call its own cuda:0"


def test_the_odd_one_out_is_marked_and_not_the_many() -> None:
    found = faults(*[report(rank, 4, torch="2.9.0" if rank == 2 else "2.13.0") for rank in range(4)], world_size=4)
    assert [ranks for _, ranks in found] == [(2,)]


def test_settings_and_files_that_differ_are_named() -> None:
    evidence = {
        1: Evidence({"seed": 0, "train": {"batch_size": 12}}, {"task.py": "a", "model.py": "b"}),
        2: Evidence({"seed": 0, "train": {"batch_size": 24}}, {"task.py": "a", "model.py": "x", "extra.py": "y"}),
    }
    reports = {1: report(0), 2: report(1, config="other", source="other", host="node-b")}
    first, second = differences(reports, evidence.__getitem__)
    assert first.text == "rank 1 has another config: train.batch_size is 24, on rank 0 12"
    assert second.text.startswith("rank 1 has another version of the task's source: model.py on node-b differs")
    assert first.ranks == second.ranks == (1,)
    assert differences({1: report(0), 2: report(1)}, evidence.__getitem__) == [], "equal digests: nothing is looked up"


def test_a_file_that_only_one_rank_loaded_is_no_contradiction() -> None:
    evidence = {1: Evidence({}, {"task.py": "a"}), 2: Evidence({}, {"task.py": "a", "rank_one_only.py": "b"})}
    assert differences({1: report(0), 2: report(1, source="other")}, evidence.__getitem__) == []


def test_the_message_has_a_table_with_the_ranks_concerned_marked() -> None:
    reports = [report(0), report(1, physical_device="GPU-0")]
    lines = render(find_faults(reports, 2, False), reports).splitlines()
    assert lines[0] == "the roll call failed:"
    assert lines[1].startswith("  - ranks 0, 1 are on the same physical device")
    assert lines[3].split() == ["rank", "host", "pid", "device", "physical", "device"]
    assert lines[4].startswith("> 0") and lines[5].startswith("> 1")


def test_a_large_world_is_cut_to_the_ranks_that_matter() -> None:
    reports = [report(rank, 512, torch="2.9.0" if rank == 400 else "2.13.0") for rank in range(512)]
    text = render(find_faults(reports, 512, False), reports)
    assert "> 400" in text
    assert f"and {512 - SHOWN} more" in text
    assert len(text.splitlines()) < SHOWN + 10


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ([[1, 0], [0, 1]], "rank 0 received nothing from rank 1; rank 1 received nothing from rank 0"),
        ([[1, 1, 2]] * 3, "rank 0 received rank 2 more than once"),
        ([[1, 1], [1, 1]], None),
    ],
)
def test_a_collective_in_which_not_everybody_took_part_once(found: list[list[int]], text: str | None) -> None:
    fault = contributions_fault(found, "xla")
    assert fault is None if text is None else text in str(fault)


def test_the_digest_does_not_depend_on_the_order_of_keys() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1, "b": 3})


def test_the_source_of_a_task_is_its_file_and_what_it_loaded_from_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lockstep.config.objects import import_object

    (tmp_path / "neighbour_of_a_task.py").write_text("x = 1\n")
    (tmp_path / "not_loaded.py").write_text("x = 1\n")
    (tmp_path / "a_task.py").write_text("import neighbour_of_a_task\n\nclass Mine: pass\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    mine = import_object(f"{tmp_path / 'a_task.py'}:Mine", "task")
    found = source_files(mine)
    assert sorted(found.digests) == ["a_task.py", "neighbour_of_a_task.py"] and found.root == tmp_path.resolve()
    assert source_files(functools.partial(mine, 1)) == found, "not that of functools"
    assert set(source_files(Report).digests) > {"distributed/rollcall/report.py", "errors.py"}, (
        "a package is compared as a whole"
    )
    for name in ("a_task", "neighbour_of_a_task"):
        del sys.modules[name]


# The roll call itself, over a real store: a thread is a rank


@pytest.fixture
def store() -> Iterator[str]:
    """The socket of one."""
    with fresh_folder() as folder:
        path = str(folder / "store")
        server = Server(listen_on_unix(path))
        yield path
        server.close()


def call_all(store: str, reports: list[Report], limit: float = 5.0) -> dict[int, Any]:
    """What each process got: its reports, or the error."""
    answers: dict[int, Any] = {}

    def rank(number: int, mine: Report) -> None:
        try:
            answers[number] = call(connect_unix(store, 10).under("run"), mine, NO_EVIDENCE, limit)
        except RollCallError as error:
            answers[number] = error

    threads = [threading.Thread(target=rank, args=(number, mine)) for number, mine in enumerate(reports)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return answers


@pytest.mark.requirement("X12")
def test_a_roll_call_needs_no_connection_between_ranks(store: str) -> None:
    reports = [report(rank, 16) for rank in range(16)]
    answers = call_all(store, reports)
    assert answers[0] == reports, "rank 0 knows everybody, in order"
    assert [answers[rank] for rank in range(1, 16)] == [[each] for each in reports[1:]]


def test_the_verdict_reaches_every_rank(store: str) -> None:
    answers = call_all(store, [report(0, 3), report(1, 3), report(2, 3, torch="2.9.0")])
    assert len({str(each) for each in answers.values()}) == 1
    assert all(isinstance(each, RollCallError) and each.exit_code == 3 for each in answers.values())
    assert "versions of torch differ: 2.13.0 on ranks 0, 1, 2.9.0 on rank 2" in str(answers[1])


def test_a_missing_rank_is_named_on_all_others_when_the_limit_is_over(store: str) -> None:
    answers = call_all(store, [report(0, 4), report(1, 4), report(3, 4)], limit=0.5)
    assert len(answers) == 3
    assert all("rank 2 of 4 did not arrive" in str(each) for each in answers.values())
    assert all("rank 2 was never seen" in str(each) for each in answers.values())
    assert all(isinstance(each, RankAbsent) for each in answers.values()), "whatever happened to it is the cause"


def test_a_missing_rank_0_is_named_too(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.distributed.rollcall.call.VERDICT_SECONDS", 0.5)
    answers = call_all(store, [report(1), report(2, 3)], limit=0.5)
    assert all("rank 0 of" in str(each) for each in answers.values())


def test_a_rank_that_is_there_twice_does_not_wait_for_the_limit(store: str) -> None:
    answers = call_all(store, [report(0, 3), report(1, 3), report(1, 3, pid=77)], limit=20.0)
    assert all("rank 1 is claimed 2 times" in str(each) for each in answers.values())
    assert all("rank 2 of 3 did not arrive" in str(each) for each in answers.values())


def test_rank_0_speaks_for_all_even_if_it_arrives_as_one_too_many(store: str) -> None:
    others = threading.Thread(target=lambda: answers.update(call_all(store, [report(1), report(1, pid=77)], 20.0)))
    answers: dict[int, Any] = {}
    others.start()
    arrived = connect_unix(store, 10).under("run")
    deadline = time.monotonic() + 10
    while arrived.add("rollcall/arrivals", 0) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    verdict = call_all(store, [report(0)])[0]
    others.join(30)
    assert "rank 1 is claimed 2 times" in str(verdict) and not isinstance(verdict, RankAbsent)
    assert {str(each) for each in answers.values()} == {str(verdict)}


def test_hosts_may_keep_the_task_in_folders_of_their_own() -> None:
    here, there = ({"seed": 1, "task": {"type": f"/{host}/task.py:Net", "width": 3}} for host in ("a", "b"))
    assert comparable(here) == comparable(there) == {"seed": 1, "task": {"type": "task.py:Net", "width": 3}}
    package = {"task": {"type": "package.module:Net"}}
    assert comparable(package) == package
    assert comparable({"seed": 1}) == {"seed": 1}, "a loop of the user's own has no task"


def test_one_process_too_many_is_refused(store: str) -> None:
    call_all(store, [report(0), report(1)])
    late = call_all(store, [report(1, pid=77)])[0]
    assert "3 processes arrived for a world of 2" in str(late)
    assert "rank 1 is claimed 2 times" in str(late)
