"""The store as torch's process groups see it, where they cannot have one of torch's own.

Torch calls it from threads of its own as well. It is kept for as long as the process lives: torch holds on to the part
of it that is not Python's, and would call into nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from lockstep.distributed.store.client import Client

_kept: list[TorchStore] = []


class TorchStore(Store):
    """Every method that torch's own code calls, by both of the names that it has for some."""

    def __init__(self, client: Client, limit: timedelta) -> None:
        super().__init__()
        self._client = client
        self._limit = limit
        self.set_timeout(limit)
        _kept.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        self._client.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._client.read(key) or b""

    def add(self, key: str, amount: int) -> int:
        return self._client.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._client.check(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit = (timeout or self._limit).total_seconds()
        if not self._client.wait(keys, limit):
            raise dist.DistStoreError(f"wait timeout: {', '.join(keys)} did not come within {limit:g} s: timed out")

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._client.compare_set(key, expected, desired)

    def append(self, key: str, value: str | bytes) -> None:
        self._client.append(key, value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        return [each or b"" for each in self._client.read_all(keys)]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self._client.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def delete_key(self, key: str) -> bool:
        return self._client.delete(key)

    def num_keys(self) -> int:
        return self._client.count()

    def clone(self) -> TorchStore:
        return self

    deleteKey, getNumKeys = delete_key, num_keys
