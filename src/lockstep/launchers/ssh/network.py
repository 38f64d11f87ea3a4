"""The addresses of this host, and the interface that has one of them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct

_SIOCGIFADDR = 0x8915


def interfaces() -> dict[str, str]:
    """Every interface that has an IPv4 address, with it; on Linux."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def address(network: str | None) -> str:
    """Where the others reach this host: its address in a network, or else the one that the login came to."""
    mine = interfaces().values()
    if network is not None:
        import ipaddress

        wanted = ipaddress.ip_network(network, strict=False)
        inside = [each for each in mine if ipaddress.ip_address(each) in wanted]
        return inside[0] if inside else ""
    login = os.environ.get("SSH_CONNECTION", "").split()
    if len(login) == 4 and login[2] in mine:
        return login[2]
    outside = [each for each in mine if not each.startswith("127.")]
    return outside[0] if outside else "127.0.0.1"


def interface_of(address: str) -> str | None:
    return next((name for name, each in interfaces().items() if each == address), None)


def free_port(address: str) -> int:
    """One that nobody has at this moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
