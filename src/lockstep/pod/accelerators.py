"""Whether a run fits the accelerator that its pod is made of: told before anything is created or costs money."""

from __future__ import annotations

from lockstep.config.accelerators import Accelerator
from lockstep.config.on_slice import check_slice
from lockstep.config.on_slice import ranks_per_host as ranks_per_host
from lockstep.config.schema import RunSettings
from lockstep.errors import ConfigError


def check(settings: RunSettings) -> Accelerator:
    """What the pod of a config is made of; raises where the run could not use it."""
    if settings.pod.type != "gcloud":
        raise ConfigError("pod.type is ssh, but only a Cloud TPU (pod.type: gcloud) has an accelerator_type")
    found = settings.pod.accelerator
    try:
        check_slice(settings, found, "pod.accelerator_type")
    except ConfigError as error:
        raise ConfigError(f"{error}. Nothing was created") from None
    return found
