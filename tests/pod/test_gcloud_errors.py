"""What gcloud says where something is wrong, and what a user is told then."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.config.pod import Pod
from lockstep.launchers.ssh.gcloud import Gcloud

IMAGE = "example.com/image:1"


def told(errors: str, code: int = 1, worker: int | None = None, **values: Any) -> str:
    base = {"type": "gcloud", "accelerator_type": "v4-32", "zone": "us-central2-b", "container": {"image": IMAGE}}
    made = Gcloud("pod", Pod.model_validate({**base, **values}))
    return made.explain(made.run(["true"], worker)[0], code, errors)


CREATE, SSH = "ERROR: (gcloud.compute.tpus.tpu-vm.create) ", "ERROR: (gcloud.compute.tpus.tpu-vm.ssh) "
LOGIN = "You do not currently have an active account selected.\nPlease run:\n\n  $ gcloud auth login\n\nto obtain new."
UNREACHABLE = "[/usr/bin/ssh] exited with return code [255]."
NODE = "Resource 'projects/p/locations/us-central2-b/nodes/pod' was not found"


@pytest.mark.parametrize(
    ("errors", "code", "expected"),
    [
        (CREATE + LOGIN, 1, "not logged in: run `gcloud auth login`"),
        (CREATE + "There was a problem refreshing your current auth tokens: invalid_grant", 1, "not logged in"),
        (CREATE + "The required property [project] is not currently set.", 1, "set pod.project"),
        (CREATE + "The required property [compute/zone] is not currently set.", 1, "set pod.zone"),
        (CREATE + 'There is no more capacity in the zone "us-central2-b"; you can try in another zone', 1,
         "no free v4-32 in us-central2-b now"),
        (CREATE + "Quota limit 'TPUV4PreemptiblePodPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0", 1,
         "quota allows no v4-32"),
        (CREATE + "PERMISSION_DENIED: The caller does not have permission", 1, "TPU Admin"),
        (CREATE + "ALREADY_EXISTS: Resource already exists", 1, "a pod called pod already"),
        (SSH + "NOT_FOUND: " + NODE, 1, "no such pod, or accelerator, in us-central2-b"),
        (SSH + 'This TPU has terminal state "PREEMPTED", so it cannot be used anymore.', 1,
         "`lockstep pod resume pod`"),
        (SSH + 'This TPU has state "STOPPED", so it cannot be currently connected to.', 1,
         "not running: `lockstep pod resume"),
        (SSH + 'SSH Key is not present in the SSH agent. Please run "ssh-add x"', 1,
         "ssh-add ~/.ssh/google_compute_engine"),
        ("Host key verification failed.\n" + SSH + UNREACHABLE, 1, "key is not the known one"),
        ("me@1.2.3.4: Permission denied (publickey).\n" + SSH + UNREACHABLE, 1, "cannot be reached by SSH"),
        ("ssh: connect to host 1.2.3.4 port 22: Connection timed out", 255, "cannot be reached by SSH"),
    ],
)  # fmt: skip
def test_every_mistake_has_its_remedy(errors: str, code: int, expected: str) -> None:
    text = told(errors, code)
    assert expected in text
    assert text.startswith("`gcloud compute tpus tpu-vm ssh ...` failed (exit status")


def test_what_the_command_on_the_host_prints_is_not_taken_for_what_gcloud_says() -> None:
    text = told("quota of the disk: PERMISSION_DENIED\nValueError: active account selected", 3, worker=2)
    assert "on worker 2 failed (exit status 3): \n" in text
    assert text.endswith("\n  quota of the disk: PERMISSION_DENIED\n  ValueError: active account selected")


def test_text_of_others_is_bounded_and_plain() -> None:
    text = told("\x1b[31m" + "x" * 10_000 + "\n" + "\n".join(map(str, range(1000))), 3)
    assert len(text) < 5000 and "\x1b" not in text and text.endswith("\n  999")
