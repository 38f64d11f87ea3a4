"""Passes frames between two interfaces late, and loses some: what tc netem does, for kernels that come without it.

    python slow_link.py ONE OTHER DELAY_SECONDS LOSS

in the network namespace that has both. The hosts at either end must not leave checksums to their (virtual) cards.
"""

from __future__ import annotations

import collections
import ctypes
import fcntl
import random
import select
import socket
import struct
import sys
import time

_EVERY_PROTOCOL = 3
_SIOCETHTOOL = 0x8946
_WITHOUT = (0x00000017, 0x00000015, 0x0000001F, 0x00000024, 0x0000002C)  # tx and rx checksums, TSO, GSO, GRO


def without_offloads(interface: str) -> None:
    """Have the system itself finish what it sends by this interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for command in _WITHOUT:
            value = bytearray(struct.pack("II", command, 0))
            address = ctypes.addressof((ctypes.c_char * len(value)).from_buffer(value))
            try:
                fcntl.ioctl(probe.fileno(), _SIOCETHTOOL, struct.pack("16sP", interface.encode(), address))
            except OSError:
                continue


def relay(names: list[str], delay: float, loss: float) -> None:
    sockets = []
    for name in names:
        raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERY_PROTOCOL))
        raw.bind((name, 0))
        sockets.append(raw)
    chance = random.Random(7)
    waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()
    print("up", flush=True)
    while True:
        limit = max(waiting[0][0] - time.monotonic(), 0.0) if waiting else 1.0
        for ready in select.select(sockets, [], [], limit)[0]:
            frame, (_, _, kind, *_rest) = ready.recvfrom(65536)
            if kind != socket.PACKET_OUTGOING and chance.random() >= loss:
                waiting.append((time.monotonic() + delay, 1 - sockets.index(ready), frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, other, frame = waiting.popleft()
            try:
                sockets[other].send(frame)
            except OSError:  # too long, or the link is down: lost, as on any link
                continue


if __name__ == "__main__":
    if sys.argv[1] == "--without-offloads":
        without_offloads(sys.argv[2])
    else:
        relay(sys.argv[1:3], float(sys.argv[3]), float(sys.argv[4]))
