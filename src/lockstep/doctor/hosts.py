"""`lockstep doctor --hosts`: whether the hosts of a config, or of a list, could take part in a run, and why not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.config.load import load, load_python, with_overrides
from lockstep.config.schema import RunConfig
from lockstep.doctor.check import Check
from lockstep.pod.preflight import Inspection
from lockstep.pod.verbs import Pod
from lockstep.start import folder as folders

# What a host says of its code is a digest for every file: too long to read.
_LEFT_OUT = ("code",)


def pod_of(asked: str, overrides: Sequence[str]) -> Pod:
    """The hosts of a config file, or those that are named here, with commas between them."""
    file = Path(asked)
    if file.suffix in (".yaml", ".yml") or file.is_file():
        config = load(file, overrides)
        return Pod(config.name or folders.named(file.stem), config)
    return Pod("doctor", _of_names([each.strip() for each in asked.split(",") if each.strip()], overrides))


def _of_names(names: list[str], overrides: Sequence[str]) -> RunConfig:
    """A config that says where, and nothing of what: its task stands for none, and is not imported."""
    where = {"task": "lockstep:Task", "launch": {"type": "ssh", "hosts": names}}
    return with_overrides(load_python(where, {}, "--hosts"), overrides)


def checks(inspections: Sequence[Inspection]) -> list[Check]:
    """A verdict for every host, in the doctor's own words."""
    return [_check(each) for each in inspections]


def _check(host: Inspection) -> Check:
    data = {key: value for key, value in host.found.items() if key not in _LEFT_OUT}
    if host.reached:
        data["clock_seconds_ahead"] = host.clock
    if host.problems:
        return Check(host.name, "fail", "; ".join(host.problems), data=data)
    return Check(host.name, "ok", f"can take part, at {host.found['address']}", data=data)
