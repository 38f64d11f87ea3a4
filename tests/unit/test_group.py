"""The group of one: it never waits, and what it gives is what several ranks would be given."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.distributed.group import Group, out_of_step
from lockstep.errors import PeerLost, RankMissing


@pytest.fixture
def alone() -> Group:
    return Group(0, 1, timeout=10.0)


def test_a_value_and_what_a_callable_returns_are_agreed(alone: Group) -> None:
    assert alone.agree(3) == 3
    assert alone.agree(lambda: {"a": [1, None, True, "x", 0.5]}) == {"a": [1, None, True, "x", 0.5]}


def test_what_a_callable_raises_is_raised(alone: Group) -> None:
    with pytest.raises(KeyError, match="mine"):
        alone.agree(lambda: {}["mine"], "a decision")


@pytest.mark.parametrize(
    ("value", "expected"), [((1, 2), [1, 2]), ({1: "a"}, {"1": "a"}), ([(1,), {"a": (2,)}], [[1], {"a": [2]}])]
)
def test_values_arrive_as_they_would_on_several_ranks(alone: Group, value: Any, expected: Any) -> None:
    """Code that works on one process must not meet other types on two."""
    assert alone.agree(value) == expected
    assert alone.gather(value) == [expected]


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes"])
def test_what_could_not_go_to_other_ranks_is_refused_by_name(alone: Group, value: Any) -> None:
    with pytest.raises(TypeError, match=r"'my decision': only plain data .* can go to other ranks"):
        alone.agree(value, "my decision")
    with pytest.raises(TypeError, match=r"'my gathering': only plain data .* can go to other ranks"):
        alone.gather(value, "my gathering")


def test_everybody_is_there_at_once(alone: Group) -> None:
    alone.barrier("a barrier")
    assert alone.rendezvous("a tag", b"\x00payload") == [b"\x00payload"]
    assert (alone.any(True), alone.any(False), alone.all(True), alone.all(False)) == (True, False, True, False)
    alone.leave()


def test_a_payload_is_bytes(alone: Group) -> None:
    with pytest.raises(TypeError, match="rendezvous 'a tag': the payload must be bytes, got str"):
        alone.rendezvous("a tag", "text")  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["shape mismatch", "the kernel timed out", "Connection reset by peer", "broken pipe"])
def test_alone_no_error_is_the_fault_of_another_rank(alone: Group, text: str) -> None:
    error = RuntimeError(text)
    assert alone.explain(error, "the gradients of step 1") is error


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[pair.cc:534] Connection closed by peer [127.0.0.1]:35012", PeerLost),
        ("NCCL communicator was aborted on rank 1", PeerLost),
        ("Timed out waiting 1800000ms for recv operation to complete", RankMissing),
        ("mat1 and mat2 shapes cannot be multiplied", RuntimeError),
    ],
)
def test_an_error_of_the_data_plane_is_explained(text: str, expected: type[Exception]) -> None:
    explained = Group(1, 2, timeout=30.0).explain(RuntimeError(text), "the gradients of step 7")
    assert type(explained) is expected
    assert ("the gradients of step 7" in str(explained)) == (expected is not RuntimeError)


@pytest.mark.requirement("D13")
def test_ranks_at_different_places_are_named_by_place() -> None:
    text = out_of_step(["metrics of step 5", "a barrier", "metrics of step 5"])
    assert text.startswith("the ranks are not in step: ranks 0, 2 at 'metrics of step 5'; rank 1 at 'a barrier'. ")
