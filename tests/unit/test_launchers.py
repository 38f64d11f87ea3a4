"""Every launcher has the four functions of the protocol, and a config chooses one of them."""

from __future__ import annotations

from lockstep.config.schema import RunConfig
from lockstep.launchers import cluster, rank, slurm
from lockstep.launchers.base import Launcher, launcher_of
from lockstep.launchers.local import launcher as local
from lockstep.launchers.ssh import launcher as ssh

LAUNCHERS: dict[str, Launcher] = {"local": local, "ssh": ssh, "slurm": slurm, "ray": cluster}  # as mypy checks


def test_a_config_chooses_its_launcher() -> None:
    for name, launcher in LAUNCHERS.items():
        config = RunConfig.model_validate({"task": "tasks:Tiny", "launch": name})
        assert launcher_of(config, {}) is launcher
        assert launcher_of(config, {"RANK": "0", "WORLD_SIZE": "1"}) is rank
        assert launcher_of(config, {}, pod="team") is ssh
        assert launcher.describe(config)
