"""Cloud TPUs by gcloud: the seed's commands by golden files, and a stand-in that checks every argument list."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config.pod import Pod
from lockstep.errors import ConfigError, LaunchError
from lockstep.launchers.ssh import gcloud
from lockstep.launchers.ssh.commands import run_in_container, stop_container
from lockstep.launchers.ssh.gcloud import Gcloud, Transport
from lockstep.launchers.ssh.ssh import Command

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
IMAGE = "us-central1-docker.pkg.dev/tpu-pytorch-releases/docker/xla:r2.7.0_3.10_tpuvm"
SEED: dict[str, Any] = {
    "type": "gcloud",
    "accelerator_type": "v4-32",
    "container": {"image": IMAGE, "name": "example-run"},
    "bucket": {"name": "torch-xla-xprof-outputs"},
}
# What a shell, gcloud's splitting at spaces, or an option parser might take for something else.
AWKWARD = [
    "two  words", "", " ", "it's", '"quoted"', "$(touch pwned)", "`id`", "$HOME", "a\nb", "\n", "tab\there", "*", "~",
    "-x", "--worker=0", "a;b", "a&&b", "|", ">file", "\\", "ünïcödé", "%s", "!x", "{a,b}", "#no comment", "\r",
]  # fmt: skip


def pod(**values: Any) -> Pod:
    return Pod.model_validate({**SEED, **values})


def the_seeds(name: str = "torch-xla-multihost-example-v4-32") -> Gcloud:
    return Gcloud(name, pod(), Path("example_startup.sh"))


def rendered(*commands: list[Command]) -> list[str]:
    return [command.render() for several in commands for command in several]


def seed_commands() -> list[str]:
    seeds, train = the_seeds(), ["python", "-u", "mnist_xla.py", "/root/logs/"]
    return rendered(
        seeds.create(),
        seeds.run(["mkdir", "-p", "/root/example/"]),
        seeds.copy(Path("mnist_xla.py"), "/root/example/mnist_xla.py"),
        seeds.run(run_in_container(seeds.pod, train, workdir="/root/example")),
        seeds.run(["docker", "ps", "-a"]),
        seeds.run(["docker", "ps", "-a"], worker=0),
        seeds.run(stop_container(seeds.pod, grace=60)),
        seeds.delete(),
    )


@pytest.mark.requirement("P11")
def test_the_commands_of_the_seed() -> None:
    assert seed_commands() == (GOLDEN / "commands.txt").read_text().splitlines()


@pytest.mark.requirement("P11")
def test_they_differ_from_the_seeds_own_in_what_is_said_here_alone() -> None:
    """`--command=` as one argument; a grace for saving; and no prompt, which the seed answers by `yes |`."""
    for ours, seeds in zip(seed_commands(), (GOLDEN / "seed.txt").read_text().splitlines(), strict=True):
        expected = shlex.split(seeds)
        if "--command" in expected:
            at = expected.index("--command")
            expected[at : at + 2] = [f"--command={expected[at + 1]}"]
        if "delete" in expected:
            expected[-1] = "--quiet"
        assert shlex.split(ours.replace("docker stop -t 60", "docker stop")) == expected


@pytest.mark.requirement("P11")
def test_everything_that_can_be_set() -> None:
    settings = pod(
        accelerator_type="v5litepod-16", zone="us-west4-a", project="lab-1234", provisioning="reserved", network="lab",
        service_account="tpu@lab-1234.iam.gserviceaccount.com", user="root", host_keys="known",
        container={
            "image": f"example.com/xla@sha256:{'0123456789abcdef' * 4}", "name": "train", "sudo": True,
            "mounts": ["/root:/root", "/data:/data:ro"], "env": {"XLA_IR_DEBUG": "1"},
        },
    )  # fmt: skip
    made = Gcloud("pod-a", settings, Path("startup.sh"))
    command = run_in_container(
        settings,
        ["python", "-m", "lockstep"],
        workdir="/work",
        detached=True,
    )
    assert rendered(
        made.create(), made.describe(), made.start(), made.run(command, worker=3),
        made.copy(Path("code.tar"), ".lockstep/code.tar"), made.delete(),
    ) == (GOLDEN / "everything.txt").read_text().splitlines()  # fmt: skip


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a stand-in for gcloud, which is on the PATH."""
    folder, programs = tmp_path / "cloud", tmp_path / "bin"
    (folder / "pods").mkdir(parents=True)
    programs.mkdir()
    (programs / "gcloud").write_text(f'#!/bin/sh\nexec "{sys.executable}" "{HERE / "stand_in_gcloud.py"}" "$@"\n')
    (programs / "gcloud").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN_GCLOUD", str(folder))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "example_startup.sh").write_text("#!/bin/bash\n")
    return folder


def carry_out(commands: list[Command]) -> subprocess.CompletedProcess[str]:
    (command,) = commands
    return subprocess.run(command.argv, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)


def calls(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]


@pytest.mark.requirement("P11")
def test_a_pod_from_its_creation_to_its_end(cloud: Path, tmp_path: Path) -> None:
    seeds: Transport = the_seeds("pod")
    gcloud.require_gcloud()
    assert seeds.workers == ("worker 0", "worker 1", "worker 2", "worker 3")
    done = [seeds.create(), seeds.run(["mkdir", "-p", "code"])]
    assert [carry_out(each).returncode for each in done] == [0, 0]

    (tmp_path / "a file").write_text("for all")
    done.append(seeds.copy(tmp_path / "a file", "code/file"))
    assert carry_out(done[-1]).returncode == 0
    assert [(cloud / "pods" / "pod" / str(worker) / "code" / "file").read_text() for worker in range(4)] == [
        "for all"
    ] * 4

    done.append(seeds.run(["sh", "-c", 'echo "$TPU_WORKER" >only; cat only'], worker=2))
    assert carry_out(done[-1]).stdout == "2\n"
    assert isinstance(seeds, Gcloud)
    done.append(seeds.describe())
    assert gcloud.next_step(carry_out(done[-1]).stdout) == ("READY", "use")
    done.append(seeds.delete())
    assert carry_out(done[-1]).returncode == 0
    assert not list((cloud / "pods").iterdir())
    assert calls(cloud) == [list(command.argv) for several in done for command in several]


@pytest.mark.requirement("X04")
def test_the_same_command_reaches_every_worker_and_a_failure_is_told_by_its_number(cloud: Path) -> None:
    seeds = the_seeds("pod")
    carry_out(seeds.create())
    ended = carry_out(seeds.run(["sh", "-c", 'echo "on $TPU_WORKER"; [ "$TPU_WORKER" != 2 ] || exit 7']))
    assert (ended.stdout, ended.returncode) == ("on 0\non 1\non 2\non 3\n", 7)
    told = seeds.explain(seeds.run(["true"])[0], ended.returncode, ended.stderr)
    assert "worker 2" in told


@pytest.mark.requirement("P11")
def test_arguments_arrive_as_they_are(cloud: Path) -> None:
    """Through gcloud's splitting at spaces, and a real shell."""
    seeds = the_seeds("pod")
    carry_out(seeds.create())
    show = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.argv[1:]))", *AWKWARD]
    ended = carry_out(seeds.run(show, worker=1))
    assert json.loads(ended.stdout) == AWKWARD
    assert not list(cloud.rglob("pwned"))
    # And what `--dry-run` prints is the same command for who pastes it.
    pasted = subprocess.run(
        ["bash", "-c", rendered(seeds.run(show, worker=1))[0]], capture_output=True, text=True, timeout=60
    )
    assert json.loads(pasted.stdout) == AWKWARD
    assert calls(cloud)[-1] == calls(cloud)[-2]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), max_size=5))
def test_any_arguments_are_quoted(arguments: list[str]) -> None:
    (command,) = the_seeds().run(["echo", *arguments])
    (option,) = [each for each in command.argv if each.startswith("--command=")]
    assert shlex.split(option.removeprefix("--command=")) == ["echo", *arguments]
    pasted = subprocess.run(["bash", "-c", f"printf '%s\\0' {command.render()}"], capture_output=True, check=True)
    assert pasted.stdout.split(b"\0")[:-1] == [each.encode() for each in command.argv]


def test_other_commands_for_a_container() -> None:
    named = pod(container={"image": IMAGE, "name": "a.b"})
    assert stop_container(named, grace=0.2)[-3:] == ["-t", "1", "a.b"]
    plain = Pod.model_validate({"container": {"image": IMAGE, "privileged": False, "mounts": []}})
    assert run_in_container(plain, ["x"], workdir="/w") == [
        "docker", "run", "--name=lockstep", "--rm", "--net=host", "--ipc=host", "-w", "/w", IMAGE, "x"
    ]  # fmt: skip


@pytest.mark.requirement("X03")
def test_all_chips_are_used_unless_something_else_is_said() -> None:
    assert not any("TPU_VISIBLE_CHIPS" in part for part in run_in_container(pod(), ["x"], workdir="/w"))
    one = pod(container={"image": IMAGE, "env": {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_VISIBLE_CHIPS": "0"}})
    text = shlex.join(run_in_container(one, ["x"], workdir="/w"))
    assert "-e PJRT_DEVICE=TPU -e TPU_PROCESS_BOUNDS=1,1,1 -e TPU_VISIBLE_CHIPS=0" in text


@pytest.mark.parametrize(
    ("state", "step"),
    [
        ("READY", "use"),
        ("CREATING", "wait"),
        ("DREAMING", "wait"),
        ("STOPPED", "start"),
        ("PREEMPTED", "recreate"),
        ("TERMINATED", "recreate"),
    ],
)
def test_what_a_pod_needs_before_a_run_can_go_on(state: str, step: str) -> None:
    assert gcloud.next_step(json.dumps({"name": "pod", "state": state})) == (state, step)


@pytest.mark.parametrize("text", ["", "[]", "{}", "not json", "[" * 100_000])
def test_a_state_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="did not say what state"):
        gcloud.next_step(text)


def test_without_gcloud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(LaunchError, match=r"gcloud is not installed.*`gcloud init`.*--dry-run works without it"):
        gcloud.require_gcloud()


@pytest.mark.parametrize(
    "name", ["", "-x", "--quiet", "a b", "A", "a_b", "a\n", "$(id)", "a" * 64, "1a", "a-", "root@a", "a:b"]
)
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="not the name of a pod"):
        Gcloud(name, pod())


def test_what_gcloud_or_a_shell_would_take_for_something_else_is_refused() -> None:
    seeds = the_seeds()
    for path in ("a b", "$(id)", "a;b", "a'b", "", "a\nb", "*", "~/x"):
        with pytest.raises(ConfigError, match="cannot be a path on the hosts"):
            seeds.copy(Path("file"), path)
    for argv in ([], ["-x"], ["--command=x"]):
        with pytest.raises(ConfigError, match="not a command to run"):
            seeds.run(argv)
    for worker in (-1, 4):
        with pytest.raises(ConfigError, match=rf"no worker {worker}: v4-32 has 16 chips \(4 hosts of 4.*the last is 3"):
            seeds.run(["true"], worker=worker)
    with pytest.raises(ConfigError, match=r"pod.type: gcloud"):
        Gcloud("pod", Pod())


def test_pods_are_spoken_of_without_torch() -> None:
    modules = ("gcloud", "commands", "pod", "launcher")
    names = "".join(f", lockstep.launchers.ssh.{each}" for each in modules)
    program = f"import sys{names}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.requirement("P11")
def test_what_is_said_before_a_command_on_one_worker() -> None:
    assert "may hang" in gcloud.ONE_WORKER and "all workers" in gcloud.ONE_WORKER
