"""What the store holds, and what can be asked of it: bytes by key, within a bound on all of it together."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lockstep.distributed.store.wire import MAX_KEY_BYTES, MAX_VALUE_BYTES, Malformed

MAX_BYTES = 512 * 1024 * 1024
_ENTRY_BYTES = 200  # what a key costs beside its bytes
_YES, _NO = b"1", b"0"


class Refused(Exception):
    """A request that was understood and cannot be met."""


class Table:
    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._bytes = 0
        self._requests: dict[bytes, Callable[..., list[bytes]]] = {
            b"set": self._set,
            b"read": self._read,
            b"add": self._add,
            b"check": self._check,
            b"delete": self._delete,
            b"count": self._count,
            b"compare": self._compare,
            b"append": self._append,
        }

    def answer(self, request: list[bytes]) -> list[bytes]:
        """Raises Malformed where this is no request, Refused where it cannot be met."""
        name, *arguments = request
        try:
            return self._requests[name](*arguments)
        except (KeyError, TypeError):
            raise Malformed("an unknown request") from None

    def missing(self, keys: Iterable[bytes]) -> bytes | None:
        return next((key for key in keys if key not in self._values), None)

    def _set(self, key: bytes, value: bytes) -> list[bytes]:
        self._put(key, value)
        return []

    def _read(self, *keys: bytes) -> list[bytes]:
        return [_YES + self._values[key] if key in self._values else _NO for key in keys]

    def _add(self, key: bytes, amount: bytes) -> list[bytes]:
        total = _number(self._values.get(key, b"0")) + _number(amount)
        self._put(key, b"%d" % total)
        return [b"%d" % total]

    def _check(self, *keys: bytes) -> list[bytes]:
        return [_YES if all(key in self._values for key in keys) else _NO]

    def _delete(self, key: bytes) -> list[bytes]:
        value = self._values.pop(key, None)
        if value is None:
            return [_NO]
        self._bytes -= _ENTRY_BYTES + len(key) + len(value)
        return [_YES]

    def _count(self) -> list[bytes]:
        return [b"%d" % len(self._values)]

    def _compare(self, key: bytes, expected: bytes, desired: bytes) -> list[bytes]:
        """As torch's: what is there afterwards; a key that is not there is set where nothing was expected."""
        present = self._values.get(key)
        if present == expected or (present is None and not expected):
            self._put(key, desired)
            return [desired]
        return [expected if present is None else present]

    def _append(self, key: bytes, more: bytes) -> list[bytes]:
        self._put(key, self._values.get(key, b"") + more)
        return []

    def _put(self, key: bytes, value: bytes) -> None:
        if len(key) > MAX_KEY_BYTES or len(value) > MAX_VALUE_BYTES:
            raise Refused(f"a key of {len(key)} bytes with {len(value)} is too long for the store")
        before = self._values.get(key)
        more = len(value) - len(before) if before is not None else _ENTRY_BYTES + len(key) + len(value)
        if self._bytes + more > MAX_BYTES:
            raise Refused(f"the store is full ({self._bytes} bytes)")
        self._bytes += more
        self._values[key] = value


def _number(text: bytes) -> int:
    if len(text) > 20 or not text.removeprefix(b"-").isdigit():
        raise Refused("what is to be added to, or is added, is no number")
    return int(text)
