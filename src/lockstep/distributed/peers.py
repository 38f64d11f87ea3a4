"""Whose process is at the other end of a TCP connection on this host, as Linux lists them."""

from __future__ import annotations

import contextlib
import ipaddress
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ESTABLISHED = "01"


class Side(NamedTuple):
    """One side of a connection, which another line of the list has the other way round."""

    local: tuple[str, int]
    remote: tuple[str, int]
    uid: int
    inode: str


def established() -> Iterator[Side]:
    """Every established TCP connection of this host, once for each side that is here; nothing on other systems."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _ESTABLISHED:
                    yield Side(_place(words[1]), _place(words[2]), int(words[7]), words[9])


def owner(remote: tuple[str, int], local_port: int) -> int | None:
    """The user whose process connected from there to a port of this host; None where it is not of this host."""
    host = _plain(ipaddress.ip_address(remote[0]))
    for side in established():
        if side.local == (host, remote[1]) and side.remote[1] == local_port:
            return side.uid
    return None


def _place(text: str) -> tuple[str, int]:
    """`0100007F:1F90` is 127.0.0.1:8080: words of four bytes, in the order of the machine."""
    address, _, port = text.partition(":")
    words = [address[at : at + 8] for at in range(0, len(address), 8)]
    packed = b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)
    return _plain(ipaddress.ip_address(packed)), int(port, 16)


def _plain(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
