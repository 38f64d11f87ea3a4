"""The store of a run: what ranks ask of it, and what strangers come to that knock."""

from __future__ import annotations

import itertools
import logging
import math
import os
import pwd
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from lockstep.distributed import rendezvous
from lockstep.distributed.activity import Beat, encoded
from lockstep.distributed.rollcall.report import Evidence, Report, decoded
from lockstep.distributed.store import private, server, wire
from lockstep.distributed.store.client import Client, NotLetIn, StoreLost, connect_tcp, connect_unix
from lockstep.distributed.store.server import Server, listen_on_tcp, listen_on_unix
from lockstep.distributed.store.wire import MAX_FRAME_BYTES, Malformed, Seal, frame, take_frame, unpack
from lockstep.distributed.topology import Place, Topology
from lockstep.errors import LaunchError, RollCallError

SECRET = "a secret of sixteen or more"


@pytest.fixture
def path() -> Iterator[str]:
    with private.fresh_folder() as folder:
        serving = Server(listen_on_unix(str(folder / "store")))
        yield str(folder / "store")
        serving.close()


@pytest.fixture
def port() -> Iterator[int]:
    serving = Server(listen_on_tcp("127.0.0.1", 0), SECRET)
    yield serving.port
    serving.close()


def knock(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=5)


def is_sent_away(connection: socket.socket, limit: float = 5.0) -> bool:
    connection.settimeout(limit)
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def test_what_ranks_ask_of_it(path: str) -> None:
    store, other = connect_unix(path, 5).under("run"), connect_unix(path, 5).under("run")
    store.set("a", "text")
    assert (other.read("a"), other.read("b"), other.read_all(["a", "b"])) == (b"text", None, [b"text", None])
    assert [store.add("n", 2), other.add("n", -5), other.add("n", 0)] == [2, -3, -3]
    assert store.check(["a", "n"]) and not store.check(["a", "b"])
    assert store.compare_set("c", b"", b"1") == b"1" and store.compare_set("c", b"0", b"2") == b"1"
    store.append("c", b"+")
    assert other.read("c") == b"1+" and other.delete("c") and not other.delete("c")
    assert not store.wait(["later"], 0.05)
    threading.Timer(0.1, other.set, ("later", b"")).start()
    assert store.wait(["later"], 5) and store.read("later") == b""
    assert connect_unix(path, 5).under("another").read("a") is None
    big = os.urandom(3_000_000)
    store.set("big", big)
    assert other.read("big") == big


def test_the_store_has_bounds(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = connect_unix(path, 5)
    monkeypatch.setattr(server, "MAX_BYTES", 10_000)
    with pytest.raises(StoreLost, match="the store is full"):
        store.set("much", b"x" * 20_000)
    with pytest.raises(StoreLost, match="too long for the store"):
        store.set("k" * 2000, b"")
    with pytest.raises(StoreLost, match="no number"):
        store.add("text", 1) if not store.set("text", "x") else None
    for _ in range(20):  # the same key again is not more
        store.set("k", b"x" * 5_000)
    with pytest.raises(StoreLost):
        store.set("huge", b"x" * (MAX_FRAME_BYTES + 1))


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64, b"\xff" * 64, struct.pack(">I", 5) + b"\0\0\0\xffx", b"\0\0\0\1"]
)
def test_garbage_closes_its_own_connection_and_no_other(path: str, port: int, garbage: bytes) -> None:
    ours, theirs = connect_unix(path, 5), socket.socket(socket.AF_UNIX)
    theirs.connect(path)
    theirs.sendall(garbage)
    theirs.shutdown(socket.SHUT_WR)
    assert is_sent_away(theirs)
    over_tcp, stranger = connect_tcp("127.0.0.1", port, SECRET, 5), knock(port)
    stranger.sendall(garbage)
    stranger.shutdown(socket.SHUT_WR)
    assert is_sent_away(stranger)
    for each in (ours, over_tcp):
        each.set("still", "here")
        assert each.read("still") == b"here"


def test_who_does_not_know_the_secret_stays_outside(port: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(NotLetIn, match="does not know the secret of this run"):
        connect_tcp("127.0.0.1", port, "another secret of sixteen", 5)
    for _ in range(3):  # knows how to speak, and guesses
        stranger = knock(port)
        stranger.sendall(wire.hello())
        assert len(stranger.recv(100)) == wire.CHALLENGE_BYTES
        stranger.sendall(b"x" * wire.ANSWER_BYTES)
        assert is_sent_away(stranger)
    told = [each for each in caplog.messages if "refused a connection from 127.0.0.1" in each]
    assert len(told) == 1, "once, however often it knocks"


def test_a_proof_is_good_for_one_connection_and_a_seal_for_one_place(port: int) -> None:
    first, second = knock(port), knock(port)
    sent = wire.hello()
    first.sendall(sent)
    shaken = wire.answer(SECRET, sent, first.recv(100))
    assert shaken is not None
    second.sendall(sent)  # the same hello, and the proof that was good for the first
    second.recv(100)
    second.sendall(shaken.proof(b"client"))
    assert is_sent_away(second)
    seal = shaken.seal(b"client")
    request = frame([b"set", b"k", b"v"], seal)
    first.sendall(shaken.proof(b"client") + request)
    assert take_frame(bytearray(first.recv(100)), shaken.seal(b"server")) == [b"ok"]
    first.sendall(request)  # once more
    assert is_sent_away(first)


def test_strangers_who_only_wait_do_not_keep_ranks_out(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_HANDSHAKE_SECONDS", 1.0)
    monkeypatch.setattr(server, "_most_unauthenticated", lambda: 16)
    crowd = [knock(port) for _ in range(60)]
    rank = connect_tcp("127.0.0.1", port, SECRET, 5)
    rank.set("a", "b")
    began = time.monotonic()
    assert all(is_sent_away(each) for each in crowd)
    assert time.monotonic() - began < 4
    assert rank.read("a") == b"b"


def test_a_store_that_is_gone_is_noticed_at_once_also_with_a_forked_process(path: str) -> None:
    with private.fresh_folder() as folder:
        serving = Server(listen_on_unix(str(folder / "store")))
        store = connect_unix(str(folder / "store"), 5)
        child = os.fork()
        if child == 0:  # as a data worker is: it keeps nothing of the store open
            time.sleep(5)
            os._exit(0)
        serving.close()
        try:
            with pytest.raises(StoreLost):
                store.set("a", "b")
            with pytest.raises(FileNotFoundError if not Path(path).parent.exists() else OSError):
                connect_unix(str(folder / "nothing"), 0.1)
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)


def test_a_last_word_is_set_when_its_connection_is_closed(path: str) -> None:
    left, stays = connect_unix(path, 5), connect_unix(path, 5)
    left.under("a").set_final_message("gone", "1")
    assert stays.read("a/gone") is None
    left.close()
    assert stays.wait(["a/gone"], 5)
    assert stays.read("a/gone") == b"1"
    with pytest.raises(StoreLost):
        stays.set_final_message("gone", "x" * 2000)


def test_frames_that_do_not_add_up() -> None:
    for body in (b"", b"\0\0\0", b"\0\0\0\5abc"):
        with pytest.raises(Malformed):
            unpack(body)
    whole = frame([b"a", b""], Seal(b"k"))
    for cut in range(len(whole)):
        assert take_frame(bytearray(whole[:cut]), Seal(b"k")) is None
    for place in range(4, len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1
        with pytest.raises(Malformed, match="seal"):
            take_frame(changed, Seal(b"k"))
    assert take_frame(bytearray(whole), Seal(b"k")) == [b"a", b""]


def test_a_name_that_leads_every_host_to_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian has a host's own name in /etc/hosts, and srun gives it as the address to meet at."""
    monkeypatch.setenv(wire.VARIABLE, SECRET)
    place = Place(rank=0, local_rank=0, host_index=0, host="node07")
    several = Topology(place, 2, 1, "127.0.1.1", 29500, secret=SECRET)
    with pytest.raises(
        RollCallError, match=r"rank 0 on node07: .*127\.0\.1\.1 here: no other host gets there.*MASTER_ADDR"
    ):
        rendezvous.meet(several, 5.0)


@pytest.mark.parametrize("name", ["node07..cluster", f"{'a' * 64}.cluster"])
def test_an_address_that_is_no_name_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for rank in range(2):
        with pytest.raises(RollCallError, match=f"rank {rank} on .*{name}"):
            rendezvous.meet(Topology(Place(rank, 0, rank), 2, 1, name, 29500, secret=SECRET), 1.0)
    assert not rendezvous.is_this_host(name)


def test_agents_of_torchrun_may_count_restarts_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --rdzv-backend=c10d, one that only sees another leave starts its ranks again without counting it."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setattr(rendezvous, "_served", served := {})
    monkeypatch.setattr(rendezvous, "_meetings", itertools.repeat(0))
    monkeypatch.setattr(rendezvous, "_STALE_SECONDS", 0.1)
    torchruns = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torchruns.set("lockstep/store", "1 3")  # where rank 0 was in the attempt before

    def meet(rank: int, attempt: int) -> None:
        place = Place(rank, 0, rank)
        counted = Topology(place, 2, 1, "127.0.0.1", torchruns.port, attempt, launcher_serves_store=True, secret=SECRET)
        topology, store, _ = rendezvous.meet(counted, 20.0)
        assert store is not None
        store.set(f"attempt of rank {rank}", str(topology.attempt))
        found.append(store)

    found: list[Client] = []
    early = threading.Thread(target=meet, args=(1, 4))
    early.start()
    time.sleep(0.3)
    meet(0, 0)
    early.join(20)
    for store in found:
        assert store.read_all([f"attempt of rank {rank}" for rank in range(2)]) == [b"4", b"4"]
    assert os.environ["TORCHELASTIC_RESTART_COUNT"] == "4"
    for each in served.values():
        each.close()


def test_tcp_is_never_served_without_a_secret() -> None:
    with listen_on_tcp("127.0.0.1", 0) as listener, pytest.raises(ValueError, match="needs a secret"):
        Server(listener)
    with pytest.raises(RollCallError, match="at least 16 characters, this one has 5"):
        wire.checked("short", "LOCKSTEP_SECRET")


def test_a_secret_file_that_others_can_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert wire.from_file() is None
    file = tmp_path / "lockstep" / "secret"
    file.parent.mkdir()
    file.write_text(f"{SECRET}\n")
    file.chmod(0o640)
    with pytest.raises(RollCallError, match="chmod 600"):
        wire.from_file()
    file.chmod(0o600)
    assert wire.from_file() == SECRET


def test_the_folder_of_a_user_is_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"lockstep-{os.geteuid()}"
    monkeypatch.setattr(private, "_places", lambda: [tmp_path])
    assert private.user_folder() == tmp_path / name and (tmp_path / name).stat().st_mode & 0o777 == 0o700
    (tmp_path / name).chmod(0o755)
    with pytest.raises(LaunchError, match="others may use it"):
        private.user_folder()
    (tmp_path / name).rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LaunchError, match="is not a folder"):
        private.user_folder()
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(tmp_path / name, 65534, 65534)
        with pytest.raises(LaunchError, match="belongs to another user"):
            private.user_folder()


def test_a_home_that_cannot_be_entered_or_is_missing_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `docker run --user 1000`, which leaves HOME=/root, and for a user without an entry in /etc/passwd."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    assert private._places() == [Path("/tmp")] and wire.from_file() is None
    if os.geteuid() == 0 and (child := os.fork()) == 0:
        os.environ["HOME"] = "/root"
        os.setuid(65534)
        os._exit(private._places() != [Path("/tmp")])
    elif os.geteuid() == 0:
        assert os.waitpid(child, 0)[1] == 0


def test_a_run_is_served_by_one_process() -> None:
    folder = private.folder_of_run(f"test {os.getpid()}")
    claim = private.Claim(folder)
    (folder / "left").touch()
    with pytest.raises(BlockingIOError):
        private.Claim(folder)
    claim.release()
    assert not folder.exists()


BEAT = Beat(1, 2, 3, "loss", False, True, 0.0, 1.5, "train.py:3")


@pytest.mark.parametrize(
    "data",
    [b"", b"null", b"[]", b"{}", b"\xff\xfe", b'{"count": 1}', b"[" * 100_000, BEAT.encode().replace(b"1.5", b'"x"'),
     BEAT.encode().replace(b"false", b"7"), BEAT.encode().replace(b"1.5", b"NaN"),
     BEAT.encode().replace(b'"loss"', b'"' + b"x" * 20_000 + b'"')],
)  # fmt: skip
def test_a_malformed_beat_is_dropped(data: bytes) -> None:
    assert Beat.decode(data) is None
    assert Beat.decode(BEAT.encode()) == BEAT


def test_a_file_whose_name_is_no_text_is_in_a_beat_and_in_evidence() -> None:
    beat = replace(BEAT, where="caf\udce9.py:3", limit=math.inf)
    assert Beat.decode(beat.encode()) == replace(beat, where="caf?.py:3")
    evidence = encoded({"config": {"a": math.inf}, "source": {"caf\udce9.py": "0"}})
    assert decoded(Evidence, evidence).source == {"caf?.py": "0"}


@pytest.mark.parametrize("data", [None, b"", b"[]", b'{"rank": 0}', b"[" * 100_000])
def test_a_malformed_report_is_refused(data: bytes | None) -> None:
    for kind in (Report, Evidence):
        with pytest.raises(RollCallError, match="same version of Lockstep"):
            decoded(kind, data)
    with pytest.raises(RollCallError):
        decoded(Evidence, b'{"config": {}, "source": 3}')


def test_torch_can_meet_there(port: int) -> None:
    """As its groups do on several hosts: through torch's own prefixes, from C++."""
    from torch._C._distributed_c10d import PrefixStore

    from lockstep.distributed.rendezvous import TorchStore

    def connected() -> PrefixStore:
        client: Client = connect_tcp("127.0.0.1", port, SECRET, 5)
        return PrefixStore("groups", TorchStore(client, timedelta(seconds=1)))

    one, two = connected(), connected()
    threading.Timer(0.1, one.set, ("key", b"\x00\xff")).start()
    assert two.get("key") == b"\x00\xff"
    assert one.add("n", 3) == 3 and two.check(["n"]) and not two.check(["m"])
    one.multi_set(["a", "b"], ["1", "2"])
    assert two.multi_get(["a", "b"]) == [b"1", b"2"]
    assert two.compare_set("a", "1", "3") == b"3" and two.delete_key("a") and one.num_keys() == 3
    one.append("b", "+")
    assert two.get("b") == b"2+"
    two.wait(["b"], timedelta(seconds=1))
    with pytest.raises(Exception, match="timed out"):
        two.wait(["never"], timedelta(milliseconds=50))
