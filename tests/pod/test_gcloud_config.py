"""The pod section of a Cloud TPU: what it stands for, and what is refused before anything costs money."""

from __future__ import annotations

import contextlib
import math
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st
from pydantic import ValidationError

from lockstep.config.accelerators import ACCELERATORS, accelerator, ranks_per_host
from lockstep.config.load import load
from lockstep.config.pod import Pod
from lockstep.config.schema import RunSettings
from lockstep.errors import ConfigError
from lockstep.launchers.ssh.commands import check_accelerator
from lockstep.launchers.ssh.gcloud import startup_script
from lockstep.runtime import pjrt


@pytest.mark.requirement("P11")
@pytest.mark.parametrize(
    ("type", "chips", "hosts", "per_host", "topology", "devices"),
    [
        ("v2-8", 4, 1, 4, "2x2", 8),
        ("v2-512", 256, 64, 4, "16x16", 512),
        ("v3-8", 4, 1, 4, "2x2", 8),
        ("v3-32", 16, 4, 4, "4x4", 32),
        ("v4-8", 4, 1, 4, "2x2x1", 4),
        ("v4-16", 8, 2, 4, "2x2x2", 8),
        ("v4-32", 16, 4, 4, "2x2x4", 16),
        ("v4-4096", 2048, 512, 4, "8x16x16", 2048),
        ("v5litepod-1", 1, 1, 1, "1x1", 1),
        ("v5litepod-4", 4, 1, 4, "2x2", 4),
        ("v5litepod-8", 8, 1, 8, "2x4", 8),
        ("v5litepod-16", 16, 4, 4, "4x4", 16),
        ("v5litepod-256", 256, 64, 4, "16x16", 256),
        ("v5p-8", 4, 1, 4, "2x2x1", 4),
        ("v5p-12288", 6144, 1536, 4, "16x16x24", 6144),
        ("v6e-8", 8, 1, 8, "2x4", 8),
        ("v6e-32", 32, 8, 4, "4x8", 32),
    ],
)
def test_what_an_accelerator_type_stands_for(
    type: str, chips: int, hosts: int, per_host: int, topology: str, devices: int
) -> None:
    found = accelerator(type)
    assert (found.chips, found.hosts, found.chips_per_host, found.topology, found.devices) == (
        chips, hosts, per_host, topology, devices,
    )  # fmt: skip


def test_every_topology_has_the_chips() -> None:
    for each in ACCELERATORS.values():
        assert math.prod(map(int, each.topology.split("x"))) == each.chips == each.hosts * each.chips_per_host


def refused(tmp_path: Path, pod: dict[str, Any]) -> str:
    (tmp_path / "task.py").write_text("class Mine: pass\n")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"task": "task.py:Mine", "pod": pod}, sort_keys=False))
    with pytest.raises(ConfigError) as told:
        load(tmp_path / "config.yaml")
    return str(told.value)


CLOUD = {"type": "gcloud", "accelerator_type": "v4-32"}
IMAGE = {"image": "example.com/a/b:1"}


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        ({"type": "gclod"}, "pod.type: must be one of ssh or gcloud; did you mean gcloud?, got 'gclod'"),
        ({"type": "gcloud"}, "needs an accelerator_type, for example v4-32"),
        ({**CLOUD, "accelerator_type": "v4-33"}, "did you mean v4-32? v4 has the sizes 8, 16, 32"),
        ({**CLOUD, "accelerator_type": "v5e-16"}, "did you mean v5litepod-16?"),
        ({**CLOUD, "accelerator_type": "v44-32"}, "did you mean v4-32?"),
        ({**CLOUD, "accelerator_type": "h100"}, "the generations are v2, v3, v4, v5litepod, v5p, v6e"),
        ({**CLOUD, "accelerator_type": "--help"}, "there is no such accelerator type"),
        ({**CLOUD, "zone": "-x"}, "must be one word"),
        ({**CLOUD, "acelerator_type": "v4-8"}, "unknown key, did you mean accelerator_type?"),
        ({**CLOUD, "project": "Not A Project"}, "and . _ - @ : /, got 'Not A Project'"),
        ({**CLOUD, "runtime_version": "a b"}, "must be one word"),
        ({**CLOUD, "provisioning": "sport"}, "must be one of spot, on-demand or reserved; did you mean spot?"),
        ({**CLOUD, "network": "-x"}, "must be one word"),
        ({**CLOUD, "user": "-oProxyCommand=x"}, "must be one word"),
        ({**CLOUD, "python": "-c"}, "pod.python: begins with a dash"),
        ({**CLOUD, "directory": "a\nb"}, "pod.directory: must be printable"),
        ({**CLOUD, "bucket": {"name": "gs://mine"}}, "without gs://"),
        ({**CLOUD, "bucket": {"name": "Mine"}}, "not the name of a bucket"),
        ({**CLOUD, "bucket": {"name": "-o"}}, "not the name of a bucket"),
        ({**CLOUD, "bucket": {"name": "mine", "mount": "logs"}}, "pod.bucket.mount: must be an absolute path"),
        ({**CLOUD, "bucket": {"name": "mine", "mount": "/a/../b"}}, "must be an absolute path"),
        ({**CLOUD, "bucket": {"name": "mine", "mount": "/$(id)"}}, "must be an absolute path"),
        ({**CLOUD, "container": {}}, "pod.container.image: missing"),
        ({**CLOUD, "container": {"image": "--rm"}}, "must be one word"),
        ({**CLOUD, "container": {"image": "a b"}}, "must be one word"),
        ({**CLOUD, "container": {**IMAGE, "name": "-f"}}, "must be one word"),
        ({**CLOUD, "container": {**IMAGE, "mounts": ["/root"]}}, "a mount is HOST_FOLDER:CONTAINER_FOLDER"),
        ({**CLOUD, "container": {**IMAGE, "mounts": ["/a:/b:rwx"]}}, "a mount is HOST_FOLDER:CONTAINER_FOLDER"),
        ({**CLOUD, "container": {**IMAGE, "privileged": False}}, "does not get at the TPU"),
        ({**CLOUD, "container": {**IMAGE, "env": {"a b": "c"}}}, "not the name of an environment variable"),
        ({**CLOUD, "container": {**IMAGE, "env": {"A": "b\nc"}}}, "must be printable"),
        ({**CLOUD, "container": {**IMAGE, "env": {"HF_TOKEN": "abc"}}}, "HF_TOKEN looks like a secret"),
        ({**CLOUD, "user": "me", "container": IMAGE}, "none has /home/me/.lockstep (pod.directory) by the same path in "
         "the container; add /home/me:/home/me"),
        ({**CLOUD, "directory": "/data/x", "container": IMAGE}, "none has /data/x (pod.directory)"),
        ({**CLOUD, "container": IMAGE, "bucket": {"name": "mine", "mount": "/mnt/logs"}},
         "none has /mnt/logs, where the bucket is; add /mnt/logs:/mnt/logs"),
        ({**CLOUD, "setup": ["apt-get update"]}, "pod.setup[0]"),
        ({**CLOUD, "setup": [[]]}, "pod.setup[0]"),
        ({**CLOUD, "setup": [["a\0"]]}, "no zero byte"),
        ({"zone": "us-central2-b"}, "zone is for a Cloud TPU (type: gcloud), but pod.type is ssh"),
        ({"bucket": {"name": "mine"}}, "bucket is for a Cloud TPU"),
        ({"provisioning": "on-demand"}, "provisioning is for a Cloud TPU"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_with_its_place_and_the_remedy(tmp_path: Path, pod: dict[str, Any], expected: str) -> None:
    text = refused(tmp_path, pod)
    assert expected in text, text
    assert str(tmp_path / "config.yaml") in text


def test_a_variable_that_only_sounds_like_a_secret_is_taken() -> None:
    env = {"TOKENIZERS_PARALLELISM": "false", "MAX_TOKENS": "5"}
    assert Pod.model_validate({"container": {**IMAGE, "env": env}}).container.env == env  # type: ignore[union-attr]


@settings_of_hypothesis(max_examples=200, deadline=None)
@given(st.text(max_size=300))
def test_whatever_is_taken_is_one_plain_argument(text: str) -> None:
    for name in ("zone", "project", "runtime_version", "network", "service_account", "user", "accelerator_type"):
        with contextlib.suppress(ValidationError):
            found = getattr(Pod.model_validate({**CLOUD, name: text}), name)
            assert found.isascii() and not found.startswith("-") and shlex.split(found) == [found]
    with contextlib.suppress(ValidationError):
        pod = Pod.model_validate({**CLOUD, "bucket": {"name": text, "mount": f"/{text}"}, "setup": [[text, text]]})
        assert shlex.quote(text) == text and f"gcsfuse {text} /{text}\n" in startup_script(pod)
    with contextlib.suppress(ValidationError):
        image = Pod.model_validate({"container": {"image": text}}).container
        assert image is not None and shlex.split(image.image) == [text]


def test_a_secret_in_a_config_is_not_repeated(tmp_path: Path) -> None:
    assert "hunter2" not in refused(tmp_path, {**CLOUD, "container": {**IMAGE, "env": {"API_KEY": "hunter2"}}})


def test_what_is_right_is_taken() -> None:
    assert Pod.model_validate({**CLOUD, "zone": "us-central2-b"}).version == "tpu-ubuntu2204-base"
    assert Pod.model_validate({**CLOUD, "accelerator_type": "v6e-8"}).version == "v2-alpha-tpuv6e"
    assert Pod.model_validate({**CLOUD, "project": "example.com:my-project"}).project == "example.com:my-project"
    Pod.model_validate({**CLOUD, "user": "root", "container": IMAGE, "bucket": {"name": "mine"}})
    Pod.model_validate({**CLOUD, "user": "me", "container": {**IMAGE, "mounts": ["/home/me:/home/me"]}})
    for image in ("xla", "a/b", "localhost:5000/a/b:tag", "us-central1-docker.pkg.dev/p/docker/xla:r2.7.0_3.10_tpuvm"):
        Pod.model_validate({"container": {"image": image}})


def settings(type: str = "v4-32", strategy: Any = "spmd", **values: Any) -> RunSettings:
    return RunSettings.model_validate({"strategy": strategy, "pod": {**CLOUD, "accelerator_type": type}, **values})


def spmd(**values: Any) -> dict[str, Any]:
    return {"type": "spmd", **values}


PAIR = {"pair": {"data": -1, "model": 2}}


@pytest.mark.requirement("P11")
@pytest.mark.parametrize(
    ("fitting", "ranks"),
    [
        (settings(), 1),
        (settings(strategy=spmd(mesh={"data": 16}, meshes=PAIR)), 1),
        (settings("v4-8", spmd(mesh={"data": 2, "model": 2})), 1),
        (settings("v3-32", spmd(mesh={"data": 32})), 1),  # two devices of every chip
        (settings("v4-8", spmd(mesh={"data": 1}), xla={"chips": [0]}), 1),
        (settings(strategy="ddp"), 4),
        (settings(strategy="auto", processes=4), 4),
        (settings("v5litepod-8", "ddp"), 8),
        (settings("v4-8", "ddp", processes=2), 2),
        (settings("v3-8", "threads"), 1),
    ],
)
def test_a_run_that_fits_its_pod(fitting: RunSettings, ranks: int) -> None:
    assert ranks_per_host(fitting, check_accelerator(fitting)) == ranks


@pytest.mark.requirement("P11")
@pytest.mark.parametrize(
    ("unfitting", "expected"),
    [
        (settings(strategy=spmd(mesh={"data": 32})),
         r"mesh: \{data: 32\} is a mesh of 32 devices, but there are 16.*or pod.accelerator_type: v4-32 has 16 chips "
         r"\(4 hosts of 4, 2x2x4\). Nothing was created"),
        (settings(strategy=spmd(mesh={"data": -1, "model": 3})), "make 3, which does not divide the 16 devices"),
        (settings(strategy=spmd(meshes={"wide": {"data": 4, "model": 2}})), "strategy.meshes.wide.* mesh of 8 devices"),
        (settings(strategy=spmd(mesh={"data": 8, "model": 2})),
         r"\{data: 8, model: 2\}.*the axis data has all 16 devices"),
        (settings("v3-32", spmd(mesh={"data": 16})), "but there are 32.*v3-32 has 16 chips .*, which are 32 devices"),
        (settings(processes=4), "processes: 4 with strategy: spmd"),
        (settings(strategy="ddp", processes=8), "processes: 8 on every host, but v4-32 .*set processes: 4"),
        (settings(strategy="ddp", processes=2), "processes: 2 on every host, but v4-32 .*all chips"),
        (settings("v3-8", "ddp"), "one device for every process, but v3-8 .*use strategy: spmd, or threads"),
        (settings(strategy="threads"), "threads trains on one host, but v4-32"),
        (settings(strategy="single"), "single trains on one host, but v4-32"),
        (settings(devices=4), "devices: 4 cannot be set for a TPU"),
        (settings(runtime="cuda"), "runtime: cuda cannot use a TPU"),
        (settings(xla={"device": "CPU"}), "xla.device: CPU, but v4-32"),
        (settings(xla={"chips": [0]}), r"xla.chips: \[0\] picks chips of a host that stands alone"),
        (settings("v4-8", xla={"chips": [4]}), "no chip 4: v4-8 has 4 chips .*from 0 to 3"),
    ],
)  # fmt: skip
def test_a_run_that_does_not_fit_its_pod_is_refused_with_the_numbers(unfitting: RunSettings, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        check_accelerator(unfitting)


def test_hosts_by_ssh_have_no_accelerator_type() -> None:
    with pytest.raises(ConfigError, match=r"pod\.type is ssh"):
        check_accelerator(RunSettings())


@pytest.mark.requirement("X03")
def test_chips_by_a_variable_are_counted() -> None:
    ddp = RunSettings.model_validate({"strategy": "ddp", "xla": {"device": "TPU"}})
    assert pjrt.processes(ddp, {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_VISIBLE_CHIPS": "0"}) == 1
    assert pjrt.processes(ddp, {"TPU_VISIBLE_CHIPS": "0,1,3"}) == 3
    named = RunSettings.model_validate({"strategy": "ddp", "xla": {"device": "TPU", "chips": [0, 1]}})
    assert pjrt.processes(named, {"TPU_VISIBLE_CHIPS": "0"}) == 2
