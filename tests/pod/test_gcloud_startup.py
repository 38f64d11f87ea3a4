"""The start-up script of a pod: the seed's by golden files, and run by bash, with programs that note their calls."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.pod import Pod
from lockstep.launchers.ssh import gcloud

GOLDEN = Path(__file__).parent / "golden"
IMAGE = "us-central1-docker.pkg.dev/tpu-pytorch-releases/docker/xla:r2.7.0_3.10_tpuvm"
SETUP = ["pip3", "install", "lockstep-train[xla]", "two words", "$(id)"]
SEED: dict[str, Any] = {
    "type": "gcloud",
    "accelerator_type": "v4-32",
    "container": {"image": IMAGE},
    "bucket": {"name": "torch-xla-xprof-outputs"},
}


def pod(**values: Any) -> Pod:
    return Pod.model_validate({**SEED, **values})


@pytest.mark.requirement("P12")
def test_the_script_of_the_seeds_config() -> None:
    assert gcloud.startup_script(pod(setup=[SETUP])) == (GOLDEN / "startup.sh").read_text()


@pytest.mark.requirement("P12")
def test_it_does_what_the_seeds_does() -> None:
    """Line by line, but for the key of the packages: apt-key is gone from newer systems, a failed curl went unseen."""
    ours = gcloud.startup_script(pod()).replace(" -o DPkg::Lock::Timeout=300", "")
    ours = ours.replace("[signed-by=/usr/share/keyrings/cloud.google.asc] ", "")
    for line in (GOLDEN / "seed_startup.sh").read_text().splitlines():
        if not line.startswith("#") and "apt-key add" not in line:
            assert line in ours, line


def test_only_what_the_config_has_is_in_it() -> None:
    plain = gcloud.startup_script(pod(container=None, bucket=None))
    assert "docker" not in plain and "gcsfuse" not in plain and "pod.setup" not in plain


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def host(tmp_path: Path) -> Run:
    """Runs a script as a host would, below a folder of the test, and comes back with what `wait` says."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (tmp_path / "etc/apt/sources.list.d").mkdir(parents=True)
    (tmp_path / "usr/share/keyrings").mkdir(parents=True)

    def run(script: str, missing: tuple[str, ...] = (), **bodies: str) -> tuple[int, str]:
        for name in ("docker", "curl", "apt-get", "gcsfuse", "mountpoint", "pip3", "lsb_release", "hostname"):
            body = bodies.get(
                name.replace("-", "_"), {"lsb_release": "echo jammy", "hostname": "echo t1v-n-0"}.get(name, "")
            )
            text = f'#!/bin/sh\n{{ printf "%s" {name}; printf " <%s>" "$@"; echo; }} >>"{tmp_path}/calls"\n{body}\n'
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        for name in missing:
            (programs / name).unlink()
        # Absolute folders of a host are below the test's.
        for folder in ("/var/lib/lockstep", "/etc/apt", "/usr/share/keyrings", "/root/logs"):
            script = script.replace(folder, f"{tmp_path}{folder}")
        (tmp_path / "startup.sh").write_text(script)
        env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
        subprocess.run(["bash", tmp_path / "startup.sh"], env=env, timeout=60)
        waiting = [
            part.replace("/var/lib/lockstep", f"{tmp_path}/var/lib/lockstep") for part in gcloud.wait_for_startup(1)
        ]
        ended = subprocess.run(waiting, capture_output=True, text=True, timeout=60)
        return ended.returncode, ended.stderr

    return run


@pytest.mark.requirement("P12")
def test_a_host_pulls_the_image_and_mounts_the_bucket(host: Run, tmp_path: Path) -> None:
    code, said = host(gcloud.startup_script(pod(setup=[SETUP])), missing=("gcsfuse",), mountpoint="exit 1", apt_get=(
        f'case "$*" in *install*) printf "#!/bin/sh\\necho gcsfuse \\"<\\$1> <\\$2>\\" >>{tmp_path}/calls\\n" '
        f">{tmp_path}/bin/gcsfuse; chmod 755 {tmp_path}/bin/gcsfuse;; esac"
    ))  # fmt: skip
    assert (code, said) == (0, "")
    assert (tmp_path / "calls").read_text().replace(str(tmp_path), "").splitlines() == [
        f"docker <pull> <{IMAGE}>",
        "lsb_release <-c> <-s>",
        "curl <-fsS> <--retry> <5> <-o> </usr/share/keyrings/cloud.google.asc> "
        "<https://packages.cloud.google.com/apt/doc/apt-key.gpg>",
        "apt-get <-o> <DPkg::Lock::Timeout=300> <update>",
        "apt-get <-o> <DPkg::Lock::Timeout=300> <install> <-y> <fuse> <gcsfuse> <--no-install-recommends>",
        "mountpoint <-q> </root/logs>",
        "gcsfuse <torch-xla-xprof-outputs> </root/logs>",
        "hostname <>",
        "pip3 <install> <lockstep-train[xla]> <two words> <$(id)>",
    ]
    listed = (tmp_path / "etc/apt/sources.list.d/gcsfuse.list").read_text().replace(str(tmp_path), "")
    assert listed == (
        "deb [signed-by=/usr/share/keyrings/cloud.google.asc] https://packages.cloud.google.com/apt "
        "gcsfuse-jammy main\n"
    )
    assert not list((tmp_path / "root/logs").iterdir())  # the probe is gone


@pytest.mark.requirement("P12")
def test_a_host_that_starts_again_leaves_alone_what_is_there(host: Run, tmp_path: Path) -> None:
    code, said = host(gcloud.startup_script(pod()))
    assert (code, said) == (0, "")
    calls = (tmp_path / "calls").read_text()
    assert "apt-get" not in calls and "gcsfuse" not in calls.replace("lockstep", "").split("mountpoint", 1)[1]


def test_a_bucket_that_cannot_be_written_is_told(host: Run, tmp_path: Path) -> None:
    # As root everything can be written: what hinders here is a folder by the name of the probe.
    (tmp_path / "root/logs/.lockstep-t1v-n-0").mkdir(parents=True)
    code, said = host(gcloud.startup_script(pod()))
    assert code == 1 and "start-up script ended with exit status 1; its last lines:" in said
    assert ".lockstep-t1v-n-0: Is a directory" in said


@pytest.mark.parametrize("program", ["docker", "curl", "apt-get"])
def test_what_fails_is_told_with_its_last_lines(host: Run, program: str) -> None:
    bodies = {program.replace("-", "_"): "echo 'no such thing' >&2; exit 9"}
    code, said = host(gcloud.startup_script(pod()), missing=("gcsfuse",), **bodies)
    assert code == 1 and "exit status 9" in said and "no such thing" in said


def test_waiting_has_an_end(tmp_path: Path) -> None:
    (tmp_path / "startup.log").write_text("+ docker pull\n")
    waiting = [part.replace(gcloud.STATE, str(tmp_path)) for part in gcloud.wait_for_startup(1)]
    ended = subprocess.run(waiting, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and "not through after 1 s" in ended.stderr and "+ docker pull" in ended.stderr
