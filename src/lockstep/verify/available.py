"""Which combinations can run here, and why the others cannot."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.doctor.installed import fit_together, version_of
from lockstep.runtime.gpus import gpu_count
from lockstep.verify.combinations import Combination


def missing(combination: Combination, hosts: Sequence[str] = ()) -> str | None:
    """What a combination lacks here, or with a config that names these hosts; None where it can run."""
    if combination.hosts and not hosts:
        return "the config names no hosts (launch: ssh)"
    for package in combination.packages:
        if version_of(package) is None:
            return f"{package} is not installed"
    torch, torch_xla = version_of("torch"), version_of("torch_xla")
    if "torch_xla" in combination.packages and not fit_together(str(torch), str(torch_xla)):
        return f"torch_xla {torch_xla} does not fit torch {torch}"
    if combination.gpus and (present := gpu_count()) < combination.gpus:
        wanted = "a GPU" if combination.gpus == 1 else f"{combination.gpus} GPUs"
        return f"needs {wanted}, and torch sees {present or 'none'}"
    return None
