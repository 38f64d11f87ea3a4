"""The `pod` section: the hosts of a run, how they are created, and what is on them."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from lockstep.config.accelerators import Accelerator, accelerator, runtime_version
from lockstep.config.secrets import secrets_in
from lockstep.config.values import Section, matching, require, variable_name

_LONGEST = 1024


def _plain(text: str) -> str:
    """An argument of a command must not look like an option or span two lines."""
    if text.startswith("-"):
        raise ValueError("begins with a dash, as options of commands do")
    if not text.isprintable() or len(text) > _LONGEST:
        raise ValueError(f"must be printable, in one line of {_LONGEST} characters at most")
    return text


def _folder(text: str) -> str:
    if not re.fullmatch(r"/[\w./ @%+=-]*", text) or len(text) > _LONGEST or ".." in text.split("/"):
        raise ValueError("must be an absolute path of letters, digits and . _ - @ % + = without ..")
    return text


def _mount(text: str) -> str:
    host, _, rest = text.partition(":")
    inside, _, mode = rest.partition(":")
    if mode not in ("", "ro", "rw"):
        raise ValueError("a mount is HOST_FOLDER:CONTAINER_FOLDER, or with :ro behind it")
    try:
        _folder(host), _folder(inside)
    except ValueError as error:
        raise ValueError(f"a mount is HOST_FOLDER:CONTAINER_FOLDER, and each {error}") from None
    return text


def _no_secrets(values: dict[str, str]) -> dict[str, str]:
    if name := next(secrets_in(values), None):
        raise ValueError(
            f"what is written here is on a command line of every host, and {name} looks like a secret; name it in "
            "pod.env instead, which passes on the value that this machine has"
        )
    return values


# What becomes one argument of gcloud or docker.
Word = Annotated[
    str, matching(r"[A-Za-z0-9_][A-Za-z0-9._@:/-]{0,254}", "must be one word of letters, digits and . _ - @ : /")
]
Folder = Annotated[str, AfterValidator(_folder)]
Argument = Annotated[
    str,
    require(
        lambda text: "\0" not in text and len(text) <= _LONGEST,
        f"an argument has no zero byte, and {_LONGEST} characters at most",
    ),
]
_NAME = r"[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?"


class Container(Section):
    """The container that ranks run in on every host, as for `docker run`."""

    image: Word = Field(description="what the start-up script pulls, by tag or by digest")
    name: Word = Field("lockstep", description="to stop it by; one container of a name can run on a host at a time")
    mounts: tuple[Annotated[str, AfterValidator(_mount)], ...] = Field(
        ("/root:/root",), strict=False, description="HOST_FOLDER:CONTAINER_FOLDER; pod.directory must be in one of them"
    )
    privileged: bool = Field(True, description="what a TPU is reached by")
    env: Annotated[
        dict[Annotated[str, AfterValidator(variable_name)], Annotated[str, AfterValidator(_plain)]],
        AfterValidator(_no_secrets),
    ] = Field({}, description="variables and their values; on a Cloud TPU PJRT_DEVICE is TPU where not given")
    sudo: bool = Field(False, description="call docker by sudo: for a user who is not in its group")


class Bucket(Section):
    """A bucket that gcsfuse mounts on every host, for what a run writes."""

    name: Annotated[
        str, matching(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]", "not the name of a bucket, without gs:// and folders")
    ]
    mount: Folder = Field("/root/logs", description="where it is on the hosts, and in the container by its mounts")


class Pod(Section):
    """How Lockstep runs on the hosts of `launch: ssh`, or on a Cloud TPU pod."""

    type: Literal["ssh", "gcloud"] = Field("ssh", description="hosts that are there, or a Cloud TPU that gcloud makes")
    python: Annotated[str, AfterValidator(_plain)] = Field(
        "python3", min_length=1, description="the interpreter there, such as that of a virtual environment"
    )
    directory: Annotated[str, AfterValidator(_plain)] = Field(
        ".lockstep", min_length=1, description="where code and runs are on every host; relative to the home folder"
    )
    env: tuple[Annotated[str, AfterValidator(variable_name)], ...] = Field(
        (), strict=False, description="names of variables of this machine that ranks get; no other is passed on"
    )
    container: Container | None = Field(None, description="null: ranks run by pod.python, without a container")
    accelerator_type: Annotated[str, AfterValidator(lambda text: accelerator(text).type)] | None = Field(
        None, description="for gcloud: such as v4-32, which is 4 hosts of 4 chips"
    )
    zone: Word | None = Field(None, description="such as us-central2-b; that of `gcloud config` where not given")
    project: Word | None = Field(None, description="that of `gcloud config` where not given")
    runtime_version: Word | None = Field(
        None, description="the image of the machines; where not given, by the accelerator's generation"
    )
    provisioning: Literal["spot", "on-demand", "reserved"] = Field(
        "spot", description="spot: a fraction of the price of on-demand, and can be taken away at any time"
    )
    network: Word | None = Field(None, description="the one called default where not given")
    service_account: Word | None = Field(None, description="whose rights the hosts have, as to write to the bucket")
    user: Word | None = Field(None, description="who to log in as there; gcloud takes your own name where not given")
    host_keys: Literal["first", "known"] = Field(
        "first", description="first: as gcloud does, trust a new host's key once; known: only keys that are known"
    )
    bucket: Bucket | None = Field(None, description="mounted on every host by the start-up script")
    setup: tuple[Annotated[tuple[Argument, ...], Field(strict=False, min_length=1)], ...] = Field(
        (), strict=False, description="commands at the end of the start-up script, each a list of arguments"
    )

    @model_validator(mode="after")
    def _what_belongs_together(self) -> Pod:
        if self.type == "ssh":
            given = next(
                (name for name in _OF_THE_CLOUD if getattr(self, name) != Pod.model_fields[name].default), None
            )
            if given:
                raise ValueError(f"{given} is for a Cloud TPU (type: gcloud), but pod.type is ssh")
            return self
        if self.accelerator_type is None:
            raise ValueError("type: gcloud needs an accelerator_type, for example v4-32")
        if self.container is not None and not self.container.privileged:
            raise ValueError("container.privileged: a container does not get at the TPU without it")
        _check_mounts(self)
        return self

    @property
    def accelerator(self) -> Accelerator:
        assert self.accelerator_type is not None
        return accelerator(self.accelerator_type)

    @property
    def version(self) -> str:
        return self.runtime_version or runtime_version(self.accelerator)


_OF_THE_CLOUD = (
    "accelerator_type", "zone", "project", "runtime_version", "provisioning", "network", "service_account", "user",
    "host_keys", "bucket", "setup",
)  # fmt: skip


def _check_mounts(pod: Pod) -> None:
    """The code must be mounted under the same path, and the bucket under any."""
    if pod.container is None:
        return
    mounts = [tuple(mount.split(":")[:2]) for mount in pod.container.mounts]
    if pod.user is not None or pod.directory.startswith("/"):
        home = PurePosixPath("/root" if pod.user == "root" else f"/home/{pod.user}")
        directory = home / pod.directory
        if not any(host == inside and directory.is_relative_to(host) for host, inside in mounts):
            folder = home if directory.is_relative_to(home) else directory
            raise ValueError(
                f"container.mounts: none has {directory} (pod.directory) by the same path in the container; add "
                f"{folder}:{folder}"
            )
    bucket = pod.bucket.mount if pod.bucket is not None else None
    if bucket is not None and not any(PurePosixPath(bucket).is_relative_to(host) for host, _ in mounts):
        raise ValueError(f"container.mounts: none has {bucket}, where the bucket is; add {bucket}:{bucket}")


def pod_name(text: str) -> str:
    """Validates the name of a Cloud TPU, which becomes an argument of gcloud."""
    if not re.fullmatch(_NAME, text, re.ASCII):
        raise ValueError(
            "not the name of a pod: lower-case letters, digits and dashes, with a letter in front, up to 63"
        )
    return text
