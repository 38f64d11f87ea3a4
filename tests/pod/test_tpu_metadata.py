"""The hosts of a Cloud TPU pod learn of each other from the metadata server, without being told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from lockstep.distributed.topology import Topology, launched

ENDPOINTS = "unknown:8470:10.130.0.5,unknown:8470:10.130.0.6,unknown:8470:10.130.0.7,unknown:8470:10.130.0.8"
Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a metadata server on loopback, and comes back with its address."""
    servers: list[ThreadingHTTPServer] = []

    def start(**attributes: str) -> str:
        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                where, _, name = self.path.rpartition("/")
                known = (
                    where == "/computeMetadata/v1/instance/attributes" and self.headers["Metadata-Flavor"] == "Google"
                )
                text = attributes.get(name.replace("-", "_")) if known else None
                self.send_response(200 if text is not None else 404)
                self.end_headers()
                self.wfile.write((text or "").encode())

            def log_message(self, *_: object) -> None:
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Answer))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return f"127.0.0.1:{servers[-1].server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.requirement("X04")
@pytest.mark.parametrize("worker", [0, 3])
def test_the_same_command_on_every_host_is_one_run(serve: Serve, worker: int) -> None:
    address = serve(agent_worker_number=str(worker), worker_network_endpoints=ENDPOINTS)
    env = {"PJRT_DEVICE": "TPU", "GCE_METADATA_HOST": address, "http_proxy": "http://127.0.0.1:1"}
    assert launched(env)
    topology = Topology.from_env(env)
    assert (topology.place.rank, topology.world_size, topology.host_count) == (worker, 4, 4)
    assert (topology.address, topology.port) == ("10.130.0.5", 29500)
    # Who was given a rank, picked a chip, or has no TPU asks nobody.
    assert Topology.from_env({**env, "RANK": "0", "WORLD_SIZE": "1"}).world_size == 1
    assert not launched({**env, "TPU_PROCESS_BOUNDS": "1,1,1", "TPU_VISIBLE_CHIPS": "0"})
    assert not launched({**env, "PJRT_DEVICE": "CPU"})


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"agent_worker_number": "0"},
        {"agent_worker_number": "0", "worker_network_endpoints": "unknown:8470:10.130.0.5"},  # one host
        {"agent_worker_number": "x", "worker_network_endpoints": ENDPOINTS},
        {"agent_worker_number": "0", "worker_network_endpoints": "10.130.0.5,10.130.0.6"},
        {"agent_worker_number": "0", "worker_network_endpoints": "a:1:$(id),b:2:-x y"},
    ],
)
def test_what_names_no_pod_is_none(serve: Serve, attributes: dict[str, str]) -> None:
    assert not launched({"PJRT_DEVICE": "TPU", "GCE_METADATA_HOST": serve(**attributes)})


def test_where_nobody_answers_there_is_no_pod() -> None:
    assert not launched({"PJRT_DEVICE": "TPU", "GCE_METADATA_HOST": "127.0.0.1:1"})
