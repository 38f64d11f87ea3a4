"""`launch: ssh` and `lockstep pod` on real sshd servers: one run over three hosts, whatever happens to one of them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file

from conftest import losses, rows, steps_saved, summary, wait_until
from laptop import NAMES, Laptop
from lockstep.cli import main
from lockstep.runs.reader import read_run


def differences(run: Path, reference: Path) -> list[str]:
    """Where a run is not bit for bit another one."""
    names = ("train/epoch_loss", "val/loss", "val/accuracy")
    ours, theirs = ([[row.get(name) for name in names] for row in rows(each)] for each in (run, reference))
    found = [] if ours == theirs else [f"{ours} instead of {theirs}"]
    weights, others = (
        load_file(max((each / "checkpoints").glob("step-*")) / "model.safetensors") for each in (run, reference)
    )
    return found + [name for name in others if not torch.equal(weights[name], others[name])]


def under_way(laptop: Laptop, pod: str, started: subprocess.Popen[str], steps: int = 4) -> Path:
    """Once the run has saved its first checkpoint."""
    wait_until(lambda: laptop.runs("anna", pod) or started.poll() is not None, what="the run's folder")
    assert laptop.runs("anna", pod), started.communicate()[0]
    run = laptop.runs("anna", pod)[-1]
    return Path(wait_until(lambda: steps_saved(run) and max(steps_saved(run)) >= steps and run, what="a checkpoint"))


@pytest.mark.requirement("P13")
@pytest.mark.requirement("P07")
@pytest.mark.requirement("P01")
def test_three_hosts_train_as_one_machine_does(laptop: Laptop, one_machine: Path) -> None:
    started = laptop.start("train", laptop.config(task={"type": "tasks.py:Tiny", "dropout": 0.2, "sleep": 0.2}))
    run = under_way(laptop, "tiny", started)
    stranger, open_ports = _knock(laptop, run), _open_to_others(laptop)
    out, _ = started.communicate(timeout=120)
    assert started.returncode == 0, out
    (run,) = laptop.runs("anna", "tiny")
    assert not differences(run, one_machine)
    assert [each["host"] for each in json.loads((run / "topology.json").read_text())["ranks"]] == [
        "anna", "anna", "bert", "carl",
    ]  # fmt: skip
    assert out.count("roll call: all 4 ranks are here") == 1
    assert "completed" in out and "lockstep pod pull tiny" in out
    # Nobody but the first host has the run; the others have the logs of their ranks.
    (elsewhere,) = laptop.runs("bert", "tiny")
    assert not (elsewhere / "checkpoints").exists()
    assert (elsewhere / "logs" / "rank-2.log").exists()
    # Whoever does not know the run's secret is sent away, and named.
    assert stranger == b"", "the store answered a stranger"
    order = json.loads(next((run.parents[1] / "jobs").glob("*/order.json")).read_text())
    assert set(open_ports) <= {22, order["port"]}, "gloo takes connections of strangers"
    (console,) = (laptop.network.hosts["anna"].disk / "tiny" / "jobs").glob("*/console.log")
    assert "10.77.0.14" in console.read_text()
    pulled = laptop.run("pod", "pull", "tiny")
    assert pulled.code == 0, pulled.text
    here = laptop.folder / "runs" / run.name
    assert {each.name for each in (here / "logs").iterdir()} == {f"rank-{rank}.log" for rank in range(4)}
    assert not differences(here, one_machine)
    looked_at = read_run(here)
    assert looked_at.status == "completed" and {"start", "roll call", "train", "end"} <= {
        each.kind for each in looked_at.timeline
    }
    assert looked_at.live is not None and [each.host for each in looked_at.live.ranks] == [
        "anna",
        "anna",
        "bert",
        "carl",
    ]
    assert looked_at.lags and (here / "report.html").is_file()
    for host in laptop.network.hosts.values():
        assert not host.processes("lockstep")


@pytest.mark.long
def test_a_trained_model_is_evaluated_on_the_hosts(laptop: Laptop, one_machine: Path) -> None:
    """Of a run that all of them see under one path."""
    launch = yaml.safe_load(laptop.config().read_text())
    asked = {key: launch[key] for key in ("launch", "pod")}
    here = CliRunner().invoke(main, ["evaluate", str(one_machine), "--json"])
    settings = [part for key, each in asked.items() for part in ("--set", f"{key}={json.dumps(each)}")]
    finished = laptop.run("evaluate", one_machine, *settings)
    assert finished.code == 0, finished.text
    first, second = map(json.loads, (one_machine / "evaluations.jsonl").read_text().splitlines())
    assert json.loads(here.stdout)["metrics"] == first["metrics"] == second["metrics"]
    assert second["world_size"] == 4


def _open_to_others(laptop: Laptop) -> list[int]:
    """The ports of the first host that a stranger gets an answer from, while a run is at work there."""
    anna = laptop.network.hosts["anna"]
    ports = sorted({int(line.split()[3].rpartition(":")[2]) for line in anna.run("ss", "-Hltn").splitlines()})
    program = (
        "import socket, sys\n"
        f"for port in {ports}:\n"
        f"    try: socket.create_connection(({anna.address!r}, port), 1).close(); print(port)\n"
        "    except OSError: pass\n"
    )
    return [int(port) for port in laptop.network.hosts["dora"].run(sys.executable, "-c", program).split()]


def _knock(laptop: Laptop, run: Path) -> bytes:
    """From a host that has no part in it, at the port where the ranks meet: what comes back."""
    order = json.loads(next((run.parents[1] / "jobs").glob("*/order.json")).read_text())
    program = (
        "import socket, sys\n"
        f"s = socket.create_connection(({order['hosts'][0]['address']!r}, {order['port']}), 5)\n"
        "s.sendall(b'GET / HTTP/1.0\\r\\n\\r\\n' + b'x' * 100)\n"
        "s.settimeout(10)\n"
        "try: sys.stdout.buffer.write(s.recv(100))\n"
        "except ConnectionResetError: pass\n"
    )
    return laptop.network.hosts["dora"].run(sys.executable, "-c", program).encode()


@pytest.mark.long
@pytest.mark.requirement("P11")
def test_a_run_outlives_its_client_and_an_sshd_and_is_stopped_and_resumed(laptop: Laptop, one_machine: Path) -> None:
    config = laptop.config("verbs", task={"type": "tasks.py:Tiny", "dropout": 0.2, "sleep": 0.7})
    created = laptop.run("pod", "create", "verbs", "--config", config)
    assert created.code == 0, created.text
    assert [line.split()[0] for line in created.out.splitlines()[1:4]] == ["anna", "bert", "carl"]
    assert "2 files on 3 hosts" in laptop.run("pod", "push", "verbs").text
    nasty = ["a b", "$(touch /tmp/x)", "`id`", "'\"", "two\nlines", "-n", "*", "\\"]
    code = "import json, sys; print(json.dumps(sys.argv[1:]))"
    told = laptop.run("pod", "exec", "verbs", "--worker", "1", "--", sys.executable, "-c", code, *nasty)
    assert json.loads(told.out.splitlines()[-1].removeprefix("[bert] ")) == nasty
    assert "may hang" in told.text
    client = laptop.start("train", config, "--pod", "verbs")
    run = under_way(laptop, "verbs", client)
    assert laptop.run("pod", "ps", "verbs").out.count("is at work") == 3
    seen = json.loads(laptop.run("watch", "--pod", "verbs", "--once", "--json").out)
    assert (seen["status"], [each["rank"] for each in seen["live"]["ranks"]]) == ("running", [0, 1, 2, 3])
    assert seen["step"] > 0 and "train/loss" in seen["latest"]
    client.kill()
    client.wait(10)
    laptop.network.hosts["bert"].stop_sshd()
    before = max(losses(run))
    wait_until(lambda: max(losses(run)) > before + 1, what="steps without a client")
    laptop.network.hosts["bert"].start_sshd()
    watching = laptop.start("pod", "logs", "verbs", "--follow")
    assert laptop.run("pod", "stop", "verbs").code == 0
    out, _ = watching.communicate(timeout=60)
    assert watching.returncode == 75, out
    assert "saved and stopped; go on with: lockstep pod resume verbs" in out
    assert summary(run)["status"] == "preempted"
    resumed = laptop.run("pod", "resume", "verbs", "--set", "timeouts.stop=50 s")
    assert resumed.code == 0, resumed.text
    assert f"restored step-{summary_step(out):08d}" in resumed.text
    assert not differences(run, one_machine)
    deleted = laptop.run("pod", "delete", "verbs", "--yes")
    assert deleted.code == 0, deleted.text
    assert not any((host.disk / "verbs").exists() for host in laptop.network.hosts.values())


def summary_step(out: str) -> int:
    return int(next(line for line in out.splitlines() if "saved at step" in line).split("saved at step ")[1].split()[0])


@pytest.mark.long
def test_a_host_that_is_killed_is_noticed_by_its_closed_connections(laptop: Laptop) -> None:
    started = laptop.start("train", laptop.config("closed", task={"type": "tasks.py:Tiny", "sleep": 0.3}))
    under_way(laptop, "closed", started)
    laptop.network.hosts["carl"].die()
    began = time.monotonic()
    out, _ = started.communicate(timeout=60)
    assert started.returncode == 5, out
    assert time.monotonic() - began < 8  # two cores that others use too; 10 s of silence were needed before
    assert "host carl (rank 3) is gone: its connection was closed" in out
    assert "lockstep pod resume closed" in out and "Traceback" not in out


@pytest.mark.long
def test_a_cut_link_ends_the_run_on_both_sides(laptop: Laptop) -> None:
    config = laptop.config("cut", task={"type": "tasks.py:Tiny", "sleep": 0.3})
    started = laptop.start("train", config)
    under_way(laptop, "cut", started)
    bert = laptop.network.hosts["bert"]
    bert.cut()
    began = time.monotonic()
    out, _ = started.communicate(timeout=60)
    assert started.returncode == 5, out
    assert time.monotonic() - began < 25
    assert "host bert (rank 2) is gone: nothing was heard of it for 10 s" in out
    assert "lockstep pod resume cut" in out
    assert "Traceback" not in out
    # Who is cut off ends too: nothing trains on alone.
    wait_until(lambda: not bert.processes("lockstep.worker") and not bert.processes("forkserver"), what="the cut host")
    for name in ("anna", "carl"):
        assert not laptop.network.hosts[name].processes("lockstep")


@pytest.mark.long
def test_a_slow_link_is_no_fault(laptop: Laptop) -> None:
    laptop.network.hosts["bert"].slow_down(delay=0.2, loss=0.05)
    config = laptop.config("slow", train={"steps": 5, "batch_size": 12}, checkpoint={"every": "5 steps"})
    finished = laptop.run("train", config, limit=180)
    assert finished.code == 0, finished.text
    assert "completed" in finished.text and "gone" not in finished.text


@pytest.mark.long
def test_a_rank_that_dies_on_another_host_is_named(laptop: Laptop) -> None:
    config = laptop.config(
        "killed",
        task={"type": "tasks.py:Tiny", "fail_at": {"rank": 2, "how": "kill", "step": 6}},
        launch={"port": 29777},
    )
    finished = laptop.run("train", config)
    assert finished.code == 5, finished.text
    assert "rank 2 of 4 on bert failed: killed by SIGKILL" in finished.text
    assert "Traceback" not in finished.text
    config = laptop.config(
        "raised", task={"type": "tasks.py:Tiny", "fail_at": {"rank": 3, "how": "exception", "step": 6}}
    )
    finished = laptop.run("train", config)
    assert finished.code == 5, finished.text
    assert "rank 3 of 4 on carl failed: ValueError: this example cannot be right" in finished.text


def test_hosts_that_cannot_take_part_are_named_before_anything_starts(laptop: Laptop) -> None:
    network = laptop.network

    def refused(**values: object) -> str:
        finished = laptop.run("train", laptop.config("bad", **values))  # type: ignore[arg-type]
        assert finished.code == 2, finished.text
        assert "Traceback" not in finished.text
        return finished.text

    network.write_ssh_config(known=["anna", "bert"])
    text = refused()
    assert "1 of 3 hosts cannot take part, so nothing was started" in text
    assert "its host key is not known here" in text and "ssh carl" in text
    network.write_ssh_config()
    assert "the login was refused" in refused(hosts=("anna", "nobody@bert"))
    assert "no such host name" in refused(hosts=("anna", "nowhere.invalid"))
    assert "bert is listed twice" in refused(hosts=("anna", "bert", "bert"))
    assert "is the same host as bert" in refused(hosts=("anna", "bert", network.hosts["bert"].address))
    assert "check pod.python" in refused(pod={"python": "/no/such/python", "directory": str(network.disk)})
    bare = refused(pod={"python": "/usr/bin/env", "directory": str(network.disk)})
    assert "cannot take part" in bare
    assert "2 ranks cannot be spread over 3 hosts" in refused(processes=2)
    assert "pod.env: NOT_SET" in refused(
        pod={"python": sys.executable, "directory": str(network.disk), "env": ["NOT_SET"]}
    )
    assert "it has no address in launch.network" in refused(launch={"network": "192.0.2.0/24"})
    assert "no metric 'val/acuracy': did you mean val/accuracy" in refused(
        checkpoint={"keep": {"metric": "val/acuracy"}}
    )
    assert not any(laptop.runs(name, "bad") for name in NAMES[:3])
    network.hosts["carl"].stop_sshd()
    try:
        assert "nothing listens for SSH there" in refused()
    finally:
        network.hosts["carl"].start_sshd()
    for host in network.hosts.values():
        assert not host.processes("lockstep")


@pytest.mark.long
def test_a_host_that_goes_wrong_between_look_and_start_ends_the_others(laptop: Laptop) -> None:
    """The port is taken: the head cannot begin, and nobody is left waiting for it."""
    listen = "import socket, time; s = socket.create_server(('10.77.0.11', 29778)); print('up', flush=True)"
    argv = laptop.network.hosts["anna"].enter(sys.executable, "-c", f"{listen}; time.sleep(60)")
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as taking:
        assert taking.stdout is not None
        taking.stdout.readline()
        finished = laptop.run("train", laptop.config("taken", launch={"port": 29778}))
        taking.kill()
    assert finished.code == 2, finished.text
    assert "10.77.0.11 port 29778: nothing can listen there" in finished.text
    wait_until(lambda: not any(h.processes("lockstep") for h in laptop.network.hosts.values()), what="no agent left")


@pytest.mark.long
@pytest.mark.requirement("P11")
def test_ranks_run_in_a_container_where_the_pod_has_one(laptop: Laptop, one_machine: Path) -> None:
    """By a stand-in for docker, which runs what it is given: the agent, and nothing beside it."""
    docker = laptop.network.programs / "docker"
    source = Path(__file__).parents[1] / "stand_in_docker.py"
    docker.write_text(f"#!{sys.executable}\n{source.read_text()}")
    docker.chmod(0o755)
    disk = str(laptop.network.disk)
    image = {"image": "registry.example/lockstep:1", "mounts": [f"{disk}:{disk}"], "name": "training"}
    config = laptop.config(
        "boxed", pod={"python": sys.executable, "directory": disk, "container": image},
        task={"type": "tasks.py:Tiny", "dropout": 0.2, "sleep": 0.2},
    )  # fmt: skip
    started = laptop.start("train", config)
    run = under_way(laptop, "boxed", started)
    assert laptop.run("pod", "stop", "boxed").code == 0
    out, _ = started.communicate(timeout=60)
    assert started.returncode == 75, out
    resumed = laptop.run("pod", "resume", "boxed")
    assert resumed.code == 0, resumed.text
    assert not differences(run, one_machine)
    calls = [json.loads(line) for line in (laptop.network.programs / "calls" / "calls.jsonl").read_text().splitlines()]
    detached = [call for call in calls if call[1:3] == ["run", "-d"]]
    assert sorted(call[0] for call in detached) == sorted(["anna", "bert", "carl"] * 2)
    flags = ["--name=training", "--rm", "--privileged", "--net=host", "--ipc=host", "-v", f"{disk}:{disk}", "-w"]
    assert detached[0][3 : 3 + len(flags)] == flags
    secret = json.loads(next((run.parents[1] / "jobs").glob("*/order.json")).read_text())["secret"]
    assert secret not in json.dumps(calls)


@pytest.mark.long
def test_a_host_that_is_to_be_taken_away_has_the_run_saved(laptop: Laptop) -> None:
    """What a cloud does to a spot host: SIGTERM to its processes."""
    started = laptop.start("train", laptop.config("spot", task={"type": "tasks.py:Tiny", "sleep": 0.4}))
    run = under_way(laptop, "spot", started)
    (agent,) = laptop.network.hosts["bert"].processes("lockstep.launchers.ssh.agent")[:1]
    agent.send_signal(signal.SIGTERM)
    out, _ = started.communicate(timeout=60)
    assert started.returncode == 75, out
    assert "bert was asked to stop: finishing the step, saving and leaving" in out
    assert summary(run)["status"] == "preempted"


@pytest.mark.long
def test_a_shell_that_talks_at_its_start_is_not_taken_for_an_answer(laptop: Laptop, one_machine: Path) -> None:
    """On the host that leads: its answers are parsed, its console followed, its archive fetched."""
    chatty = laptop.folder / "bashrc"
    chatty.write_text("echo 'Welcome to anna'\necho '{\"error\": \"not ours\"}'\nprintf 'no line end here'\n")
    anna = laptop.network.hosts["anna"]
    bashrc = str(Path.home() / ".bashrc")
    anna.run("sh", "-c", f'test -e "{bashrc}" || touch "{bashrc}"')
    anna.run("mount", "--bind", str(chatty), bashrc)
    try:
        told = laptop.network.client.run("ssh", "anna", "true")
        assert told.endswith("no line end here"), "this shell reads no start-up file"
        finished = laptop.run("train", laptop.config("chatty"))
        assert finished.code == 0, finished.text
        assert "completed" in finished.text and "Welcome" not in finished.text
        assert "2 files on 3 hosts" in laptop.run("pod", "push", "chatty").text
        assert "has ended: completed" in laptop.run("pod", "ps", "chatty").out
        logs = laptop.run("pod", "logs", "chatty", "--worker", "0")
        assert "completed" in logs.text and "Welcome" not in logs.text
        pulled = laptop.run("pod", "pull", "chatty")
        assert pulled.code == 0, pulled.text
    finally:
        anna.run("umount", bashrc)
    (here,) = (laptop.folder / "runs").glob("chatty-*")
    assert not differences(here, one_machine)


# the mount.
HUNGRY = """
import contextlib, glob, os, select, sys, time
here = f"/proc/self/fd/{os.open(sys.argv[1], os.O_RDONLY)}"
disk = os.statvfs(here)
assert disk.f_blocks * disk.f_frsize < 2 << 30, "this is no small disk"
end = time.monotonic() + 120
while time.monotonic() < end and not select.select([0], [], [], 0.001)[0]:
    if not os.path.exists(f"{here}/filler"):
        continue
    for each in [f"{here}/filler-more", *glob.glob(f"{here}/full/jobs/*/console.log")]:
        with contextlib.suppress(OSError), open(each, "ab", buffering=0) as file:
            while time.monotonic() < end:
                file.write(b" " * (1 if each.endswith(".log") else 4096))
"""


def test_a_full_disk_on_the_host_that_leads_is_named(laptop: Laptop) -> None:
    anna, disk = laptop.network.hosts["anna"], laptop.network.disk
    anna.run("mount", "-t", "tmpfs", "-o", "size=1100m", "tmpfs", str(disk))
    fail_at = {"rank": 0, "step": 6, "how": "fill", "file": str(disk / "filler")}
    hungry = subprocess.Popen(anna.enter(sys.executable, "-c", HUNGRY, str(disk)), stdin=subprocess.PIPE)
    try:
        finished = laptop.run(
            "train",
            laptop.config("full", ("anna", "bert"), processes=2, task={"type": "tasks.py:Tiny", "fail_at": fail_at}),
        )
    finally:
        hungry.communicate(timeout=60)
        anna.run("umount", "-l", str(disk))
    assert hungry.returncode == 0
    assert finished.code == 5, finished.text
    assert "Traceback" not in finished.text and "ended without a message" not in finished.text
    assert "rank 0 of 2 on anna failed: " in finished.text and "No space left on device" in finished.text
    assert "make room" in finished.text and finished.text.count("lockstep pod resume full") == 1


def test_of_two_commands_that_start_a_pod_at_once_one_goes_on(laptop: Laptop) -> None:
    config = laptop.config("twice", NAMES[:2], processes=2, train={"steps": 4, "batch_size": 12})
    both = [laptop.start("train", config) for _ in range(2)]
    texts = [each.communicate(timeout=120)[0] for each in both]
    assert sorted(each.returncode for each in both) == [0, 2], texts
    (refused,) = [text for text, each in zip(texts, both, strict=True) if each.returncode]
    assert "is being started by another command" in refused or "is still at work there" in refused
    (run,) = laptop.runs("anna", "twice")
    assert summary(run)["status"] == "completed"
    pod = {"python": sys.executable, "directory": str(laptop.network.disk), "env": ["NOT_SET"]}
    assert "pod.env: NOT_SET" in laptop.run("train", laptop.config("twice", NAMES[:2], pod=pod)).text
    claims = [(laptop.network.hosts[name].disk / "twice" / "claim.json").read_text() for name in NAMES[:2]]
    assert claims == ["{}"] * 2, "neither who was refused nor who is done keeps others out"
