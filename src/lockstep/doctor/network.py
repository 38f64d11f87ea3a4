"""Whether processes on this host can meet: a port on loopback, the interface that gloo uses, the host's own name."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

from lockstep.doctor.ask import Answer, Stage
from lockstep.doctor.check import Check

_CONNECT_SECONDS = 5.0


def look() -> Check:
    interfaces = [name for _, name in socket.if_nameindex()]
    return ports(_port_problem(), interfaces, os.environ.get("GLOO_SOCKET_IFNAME"))


def ports(problem: str, interfaces: list[str], chosen: str | None) -> Check:
    """`chosen` is what GLOO_SOCKET_IFNAME says; without it, the launcher has gloo use loopback."""
    data = {"interfaces": interfaces}
    if problem:
        remedy = "ranks meet on 127.0.0.1: bring the loopback interface up, and let the firewall pass it"
        return Check("ports", "fail", f"127.0.0.1: {problem}", remedy, data)
    wanted = chosen.split(",") if chosen else ["lo0" if sys.platform == "darwin" else "lo"]
    absent = [name for name in wanted if name not in interfaces]
    if absent:
        remedy = f"set GLOO_SOCKET_IFNAME to one of {', '.join(interfaces)}" + (", or unset it" if chosen else "")
        return Check("ports", "fail", f"there is no network interface {absent[0]}, which gloo is to use", remedy, data)
    return Check("ports", "ok", f"a port on 127.0.0.1 opens and answers; gloo uses {', '.join(wanted)}", data=data)


def look_up(stage: Stage, host: str) -> dict[str, Any]:
    """In a process of its own: a name server that does not answer takes its time."""
    stage(f"looking up the address of {host}")
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return {"addresses": [], "problem": str(error.strerror or error)}
    foreign = [str(address[0]) for family, _, _, _, address in found if not _is_ours(family, address)]
    problem = f"{foreign[0]} is not an address of this machine" if foreign else ""
    return {"addresses": sorted({str(address[0]) for *_, address in found}), "problem": problem}


def hostname(host: str, answer: Answer) -> Check:
    facts = answer.value or {"addresses": [], "problem": answer.trouble}
    found = f"{host} is {', '.join(facts['addresses']) or 'unknown'}"
    data = {"hostname": host, "addresses": facts["addresses"]}
    if not facts["problem"]:
        return Check("hostname", "ok", found, data=data)
    remedy = (
        f"runs on this host alone do not need it; for torchrun and for several hosts, give {host} an address in "
        "/etc/hosts, or name the interface to use in GLOO_SOCKET_IFNAME"
    )
    return Check("hostname", "warn", f"{found}: {facts['problem']}", remedy, data)


def _port_problem() -> str:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(_CONNECT_SECONDS)
            with socket.create_connection(server.getsockname(), _CONNECT_SECONDS) as client:
                peer, _ = server.accept()
                with peer:
                    client.sendall(b"?")
                    peer.settimeout(_CONNECT_SECONDS)
                    return "" if peer.recv(1) == b"?" else "a connection carries no data"
    except OSError as error:
        return str(error.strerror or error)


def _is_ours(family: int, address: Any) -> bool:
    """Only an address of this machine can be bound."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address[0], 0, *address[2:]))
    except OSError:
        return False
    return True
