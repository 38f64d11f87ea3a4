"""Deciding together: the part of a Run that needs nothing but the group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

from lockstep.distributed.group import Group

Value = TypeVar("Value")


class Deciding:
    """One rank among others. Every call here must be made by all ranks, in the same order."""

    def __init__(self, group: Group) -> None:
        self.group = group

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def world_size(self) -> int:
        return self.group.world_size

    @property
    def is_main(self) -> bool:
        return self.group.rank == 0

    @overload
    def agree(self, value: Callable[[], Value], name: str = ...) -> Value: ...

    @overload
    def agree(self, value: Value, name: str = ...) -> Value: ...

    def agree(self, value: Any, name: str = "a decision") -> Any:
        """Rank 0's value on every rank; a callable runs on rank 0 only, and its exception is raised on every rank."""
        return self.group.agree(value, name)

    def any(self, value: bool, name: str = "whether any rank wants to") -> bool:
        return self.group.any(value, name)

    def all(self, value: bool, name: str = "whether all ranks want to") -> bool:
        return self.group.all(value, name)

    def gather(self, value: Value, name: str = "a gathering") -> list[Value]:
        return self.group.gather(value, name)

    def barrier(self, name: str = "a barrier") -> None:
        self.group.barrier(name)

    def rendezvous(self, tag: str, payload: bytes = b"", ranks: Sequence[int] | None = None) -> list[bytes]:
        """Exchange bytes among all ranks; asking for some of them only is refused."""
        return self.group.rendezvous(tag, payload, ranks)
