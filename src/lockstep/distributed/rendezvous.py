"""How ranks find each other: the store, and the process groups.

Our launcher serves the store on a Unix socket in a folder of mode 0700, or, for several hosts, at the address of the
first host, for clients that know the secret of the run. If another launcher started the ranks, rank 0 serves it: in a
private folder of the user on one host, at MASTER_ADDR with the secret on several.

Every rank has two connections to the store. Gloo connects ranks when they first communicate: a gather is a ring, and a
long broadcast adds about log2(N) connections. Up to listener.MOST_RANKS ranks connect at once, so that gloo's listeners
can be closed (listener.py).
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import ipaddress
import itertools
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from lockstep.distributed import listener
from lockstep.distributed.activity import Activity
from lockstep.distributed.group import Group
from lockstep.distributed.store import private
from lockstep.distributed.store import wire as run_secret
from lockstep.distributed.store.client import Client, NotLetIn, connect_tcp, connect_unix
from lockstep.distributed.store.server import Server, listen_on_tcp, listen_on_unix
from lockstep.distributed.topology import NETWORK_STORE, Topology
from lockstep.errors import LaunchError, RollCallError
from lockstep.runtime import with_variables
from lockstep.runtime.base import Runtime

# For as long as the process lives: torch holds on to the part of a store that is not Python's.
_kept: list[TorchStore] = []


class TorchStore(Store):
    """Our store for torch's process groups, with every method that torch calls, from any thread."""

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


# Where rank 0 is to listen, if not at MASTER_ADDR: behind an address that is translated on its way.
LISTEN_AT = "LOCKSTEP_STORE_ADDRESS"

# In torchrun's own store: the port of rank 0's, and the attempt that rank 0 takes this for.
_NOTICE = "lockstep/store"
# How long that port is tried before it is read again: after a restart, it may still be that of the attempt before.
_STALE_SECONDS = 2.0

_meetings = itertools.count()  # of this process; the same on all ranks, as they all run the same program
_served: dict[str, Server] = {}  # by this process, until it ends


def meet(topology: Topology, limit: float) -> tuple[Topology, Client | None, Client | None]:
    """Returns two connections to the store, so that a wait on one does not block the other; none for one process.

    In the topology that is returned, the attempt is the same on all ranks.
    """
    if topology.world_size == 1 and not topology.watched:
        return topology, None, None
    with _saying_who_does_not_answer(topology, limit):
        connect, attempt = _way(topology, limit)
        prefix = private.store_prefix(attempt, next(_meetings))
        return replace(topology, attempt=attempt), connect().under(prefix), connect().under(prefix)


def from_rank_0(topology: Topology, limit: float, name: str, data: bytes) -> bytes:
    """Returns rank 0's data on every rank before the group exists."""
    with _saying_who_does_not_answer(topology, limit):
        connect, attempt = _way(topology, limit)
        store = connect().under(f"lockstep/attempt-{attempt}/before")
        if topology.place.rank == 0:
            store.set(name, data)
            return data
        if not store.wait([name], limit):
            raise RollCallError(
                f"rank {topology.place.rank} on {topology.place.host}: rank 0 did not say within {limit:g} s what "
                f"{name} is: look at what it says"
            )
        return store.read(name) or b""


@contextlib.contextmanager
def _saying_who_does_not_answer(topology: Topology, limit: float) -> Iterator[None]:
    try:
        yield
    except NotLetIn as error:
        raise RollCallError(
            f"rank {topology.place.rank} on {topology.place.host}: {error}: {run_secret.VARIABLE} must be the same on "
            "all hosts, or another run has that port"
        ) from None
    except (OSError, UnicodeError, RuntimeError, dist.DistError) as error:
        raise RollCallError(
            f"rank {topology.place.rank} on {topology.place.host}: nobody answers at {topology.address}:"
            f"{topology.port} within {limit:g} s, where rank 0 or the launcher should be. Check that rank 0 was "
            f"started, the address, the port and the firewall ({str(error).strip().splitlines()[0]}); "
            "timeouts.rendezvous sets the limit"
        ) from None


def join(
    topology: Topology, runtime: Runtime, store: Client | None, timeout: float, activity: Activity | None = None
) -> Group:
    """Forms the group of all ranks."""
    rank, world_size = topology.place.rank, topology.world_size
    if world_size == 1:
        alone = Group(0, 1, timeout, activity=activity)
        alone.join_alone(runtime.backend)
        return alone
    assert store is not None
    limit = timedelta(seconds=timeout)
    extra: dict[str, Any] = {"device_id": runtime.device} if runtime.backend == "nccl" else {}
    at_once = _connect_at_once(topology)
    with with_variables({_LAZY: "0" if at_once else "1"}), listener.closed_behind(at_once):
        found = store_for_groups(store, rank, limit)
        dist.init_process_group(runtime.backend, store=found, rank=rank, world_size=world_size, timeout=limit, **extra)
        if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            raise RollCallError(
                f"this process was started as rank {rank} of {world_size}, but the group says it is rank "
                f"{dist.get_rank()} of {dist.get_world_size()}"
            )
        control = dist.new_group(backend="gloo", timeout=limit)
    return Group(rank, world_size, timeout, store, control, activity, at_once)


_LAZY = "TORCH_GLOO_LAZY_INIT"


def _connect_at_once(topology: Topology) -> bool:
    """Whether gloo connects every two ranks at the beginning."""
    if _LAZY in os.environ:
        return os.environ[_LAZY] in ("", "0")
    return topology.world_size <= listener.MOST_RANKS


def store_for_groups(store: Client, rank: int, limit: timedelta) -> Any:
    """Returns the store for torch's groups; on one host a file, which torch reads from any thread."""
    if store.unix_path is None:
        return PrefixStore("groups", TorchStore(store, limit))
    if rank == 0:
        store.set("groups", f"groups-{secrets.token_hex(8)}")
    if not store.wait(["groups"], limit.total_seconds()):
        raise RollCallError(f"rank 0 did not say within {limit.total_seconds():g} s where the groups meet")
    name = (store.read("groups") or b"").decode()
    file = FileStore(str(Path(store.unix_path).parent / Path(name).name), -1)
    file.set_timeout(limit)
    return PrefixStore("groups", file)


def _way(topology: Topology, limit: float) -> tuple[Callable[[], Client], int]:
    """Returns how to connect to the store, and the attempt; on rank 0, serves the store if nobody else does."""
    secret = run_secret.checked(topology.secret, run_secret.VARIABLE) if topology.secret else None
    if topology.store == NETWORK_STORE:
        known = secret or _refuse_without(topology)
        return lambda: connect_tcp(topology.address, topology.port, known, limit), topology.attempt
    if topology.store:
        return lambda: connect_unix(topology.store, limit), topology.attempt
    if secret is None and topology.host_count == 1 and is_this_host(topology.address):
        return _in_a_folder(topology, limit), topology.attempt
    known = secret or run_secret.from_file() or _refuse_without(topology)
    _refuse_own_name(topology)
    port, attempt = topology.port, topology.attempt
    if topology.launcher_serves_store:
        port, attempt = _told_by_torchrun(topology, known, limit)
    elif topology.place.rank == 0:
        _serve(topology, port, known)
    return lambda: connect_tcp(topology.address, port, known, limit), attempt


def _refuse_without(topology: Topology) -> str:
    place = topology.place
    raise RollCallError(
        f"rank {place.rank} on {place.host}: the ranks of this run meet over the network at {topology.address}, where "
        f"others can come too, and there is no secret to tell them apart. Set {run_secret.VARIABLE} to the same text "
        f"on all hosts, or write it to ~/.config/lockstep/secret there (mode 600); {run_secret.how_to_make_one()}. "
        "(Where all ranks are on one host, LOCAL_WORLD_SIZE and MASTER_ADDR have to say so.)"
    )


def _in_a_folder(topology: Topology, limit: float) -> Callable[[], Client]:
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
    try:
        folder = private.folder_of_run(f"{topology.port} {run_id} {topology.attempt}")
    except LaunchError as error:
        raise RollCallError(f"rank {topology.place.rank} on {topology.place.host}: {error}") from None
    path = str(folder / private.SOCKET)
    if topology.place.rank == 0 and path not in _served:
        try:
            claim = private.Claim(folder)
        except BlockingIOError:
            raise RollCallError(_taken(topology)) from None
        atexit.register(claim.release)
        _served[path] = Server(listen_on_unix(path))
    return lambda: connect_unix(path, limit)


def _told_by_torchrun(topology: Topology, secret: str, limit: float) -> tuple[int, int]:
    """Returns the port of rank 0's store and the attempt, which rank 0 says by torchrun's store.

    Agents that only see another agent leave or come start their ranks again without counting it.
    """
    deadline, longest = time.monotonic() + limit, timedelta(seconds=limit)
    told = TCPStore(topology.address, topology.port, is_master=False, wait_for_workers=False, timeout=longest)
    if topology.place.rank == 0:
        port = _serve(topology, 0, secret)
        before = _notice(told.get(_NOTICE)) if told.check([_NOTICE]) else (0, -1)
        attempt = before[1] if before[0] == port else max(topology.attempt, before[1] + 1)
        told.set(_NOTICE, f"{port} {attempt}")
    else:
        while True:
            port, attempt = _notice(told.get(_NOTICE))
            try:
                connect_tcp(topology.address, port, secret, min(limit, _STALE_SECONDS)).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)  # also for `lockstep resume --step`, which goes back once
    return port, attempt


def _notice(text: bytes) -> tuple[int, int]:
    """Returns the port of rank 0's store and the attempt."""
    words = text.split()
    if len(words) != 2 or not all(each.isdigit() and len(each) < 10 for each in words) or not 0 < int(words[0]) < 65536:
        raise RollCallError(f"the launcher's store has {text[:40]!r} for the port of rank 0's: somebody else wrote it")
    return int(words[0]), int(words[1])


def _refuse_own_name(topology: Topology) -> None:
    """Refuses a host name that resolves to a loopback address on every host."""
    if topology.host_count == 1 or LISTEN_AT in os.environ:
        return
    try:
        found = {str(each[4][0]) for each in socket.getaddrinfo(topology.address, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):  # of a name that cannot be one
        return  # whoever goes there will say so
    # 127.0.0.1 is what somebody has meant who plays several hosts on one.
    if all(ipaddress.ip_address(each).is_loopback and each not in ("127.0.0.1", "::1") for each in found):
        place = topology.place
        raise RollCallError(
            f"rank {place.rank} on {place.host}: the ranks of {topology.host_count} hosts are to meet at "
            f"{topology.address}, which is {', '.join(sorted(found))} here: no other host gets there. Debian writes a "
            "host's own name to /etc/hosts so. Set MASTER_ADDR on all hosts to an address of the first that the others "
            "reach, and GLOO_SOCKET_IFNAME to the interface that has it; or take that line out of /etc/hosts"
        )


def _serve(topology: Topology, port: int, secret: str) -> int:
    """Serves the store on the network and returns its port."""
    name = f"{topology.address} {port} {topology.attempt} {secret}"
    if name not in _served:
        address = os.environ.get(LISTEN_AT) or topology.address
        try:
            _served[name] = Server(listen_on_tcp(address, port), secret)
        except (OSError, UnicodeError) as error:
            if getattr(error, "errno", None) == errno.EADDRINUSE:
                raise RollCallError(_taken(topology)) from None
            raise RollCallError(
                f"rank 0 on {topology.place.host}: cannot listen at {address} ({error}), where the ranks are to meet. "
                "MASTER_ADDR has to be an address of rank 0's host; where it is translated on its way, set "
                f"{LISTEN_AT} there to the address to listen at"
            ) from None
    return _served[name].port


def is_this_host(address: str) -> bool:
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(address).is_loopback:
            return True
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
    except (OSError, UnicodeError):
        return False
    return True


def _taken(topology: Topology) -> str:
    return (
        f"rank 0 on {topology.place.host}: port {topology.port} is in use on this host (MASTER_PORT), where "
        "rank 0 serves the store. RANK=0 is given to another process as well, or another run has that port"
    )
