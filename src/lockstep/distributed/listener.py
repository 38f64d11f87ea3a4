"""Closes gloo's listeners once its ranks are connected.

Every gloo group listens on a TCP port without authentication, accepts the first connection that sends the number of a
rank, and crashes if there are too many. Up to MOST_RANKS ranks connect at once; then no more connections are accepted,
and connections from this host must belong to this user.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import RollCallError

# Beyond this, connecting every two ranks costs too much.
MOST_RANKS = 32
_SO_ATTACH_FILTER = 26
_LINUX = sys.platform.startswith("linux")


@contextlib.contextmanager
def closed_behind(enabled: bool = True) -> Iterator[None]:
    """Closes the listeners opened within the block; raises if another user connected to one."""
    if not (enabled and _LINUX):
        yield
        return
    before = {inode for inode, _ in _sockets()}
    yield
    made = [(inode, each) for inode, each in _sockets() if inode not in before]
    inodes = {inode for inode, _ in made}
    for _, descriptor in made:
        _close(descriptor)
    if (other := _other_user(inodes)) is not None:
        raise RollCallError(
            f"a process of another user (uid {other}) connected to this rank in the place of another rank, while "
            "the group was being formed. Nothing was trained. Start again; if it happens again, ask that user"
        )


def _sockets() -> list[tuple[str, int]]:
    """Returns the inode and descriptor of every socket of this process."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor that lists them is closed by now
            target = str(entry.readlink())
            if target.startswith("socket:["):
                found.append((target[8:-1], int(entry.name)))
    return found


def _close(descriptor: int) -> None:
    """Makes the kernel drop new connections to a TCP listener; open ones stay."""
    try:
        listener = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return
    with listener:
        if listener.family not in (socket.AF_INET, socket.AF_INET6):
            return
        if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # a BPF program: return 0
            with contextlib.suppress(OSError):  # not supported by this kernel
                program = struct.pack("HP", 1, ctypes.addressof(drop_all))
                listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _other_user(inodes: set[str]) -> int | None:
    """Returns another user of this host who holds the other end of one of these connections."""
    sides = list(established())
    owners = {(side.local, side.remote): side.uid for side in sides}
    mine = os.geteuid()
    others = {owners.get((side.remote, side.local), mine) for side in sides if side.inode in inodes}
    return next((uid for uid in others if uid != mine), None)


_ESTABLISHED = "01"


class Side(NamedTuple):
    """One side of a connection."""

    local: tuple[str, int]
    remote: tuple[str, int]
    uid: int
    inode: str


def established() -> Iterator[Side]:
    """Yields the local sides of established TCP connections (Linux only)."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _ESTABLISHED:
                    yield Side(_place(words[1]), _place(words[2]), int(words[7]), words[9])


def owner(remote: tuple[str, int], local_port: int) -> int | None:
    """Returns the user of this host who connected from an address to a local port, or None."""
    host = _plain(ipaddress.ip_address(remote[0]))
    for side in established():
        if side.local == (host, remote[1]) and side.remote[1] == local_port:
            return side.uid
    return None


def _place(text: str) -> tuple[str, int]:
    """`0100007F:1F90` is 127.0.0.1:8080, in words of four bytes of native order."""
    address, _, port = text.partition(":")
    words = [address[at : at + 8] for at in range(0, len(address), 8)]
    packed = b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)
    return _plain(ipaddress.ip_address(packed)), int(port, 16)


def _plain(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
