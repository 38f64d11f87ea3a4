"""Closes the door that gloo leaves open.

Every gloo group listens at a TCP port, asks nobody who they are, takes the first connection that sends the right small
number for a rank, and brings its process down where there are too many. Up to a few dozen ranks connect at once; then
no more connections are taken, and those that there are, where both ends are on this host, must be of this user.
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

# Beyond this, a connection between every two ranks costs more than it is worth.
MOST_RANKS = 32
_SO_ATTACH_FILTER = 26
_LINUX = sys.platform.startswith("linux")


@contextlib.contextmanager
def closed_behind(enabled: bool = True) -> Iterator[None]:
    """What began to listen within the block listens to nobody any more; a stranger who got in is an error."""
    if not (enabled and _LINUX):
        yield
        return
    before = {inode for inode, _ in _sockets()}
    yield
    made = [(inode, each) for inode, each in _sockets() if inode not in before]
    inodes = {inode for inode, _ in made}
    for _, descriptor in made:
        _close(descriptor)
    if (stranger := _stranger(inodes)) is not None:
        raise RollCallError(
            f"a process of another user (uid {stranger}) connected to this rank in the place of another rank, while "
            "the group was being formed. Nothing was trained. Start again; if it happens again, that user is at it"
        )


def _sockets() -> list[tuple[str, int]]:
    """Inode and descriptor of every socket of this process."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them is gone by now
            target = str(entry.readlink())
            if target.startswith("socket:["):
                found.append((target[8:-1], int(entry.name)))
    return found


def _close(descriptor: int) -> None:
    """Where this listens for TCP, have the system drop whatever comes; connections that there are stay."""
    try:
        listener = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return
    with listener:
        if listener.family not in (socket.AF_INET, socket.AF_INET6):
            return
        if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # a BPF program: return 0
            with contextlib.suppress(OSError):  # a kernel without it: as open as it was
                program = struct.pack("HP", 1, ctypes.addressof(drop_all))
                listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _stranger(inodes: set[str]) -> int | None:
    """The user at the other end of one of these connections, where it is not this user; on this host, that is."""
    everybody = list(established())
    owners = {(side.local, side.remote): side.uid for side in everybody}
    mine = os.geteuid()
    others = {owners.get((side.remote, side.local), mine) for side in everybody if side.inode in inodes}
    return next((uid for uid in others if uid != mine), None)


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
