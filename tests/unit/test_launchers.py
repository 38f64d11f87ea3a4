"""Every launcher has the four functions of the protocol, and a config chooses one of them."""

from __future__ import annotations

import pytest

from lockstep.config.schema import RunConfig
from lockstep.distributed.failure import Failure, Result
from lockstep.engine.stop_requests import Preempted
from lockstep.errors import WorkerFailed
from lockstep.launchers import cluster, ending, rank, slurm
from lockstep.launchers.base import Launcher, launcher_of
from lockstep.launchers.ending import require_done
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


@pytest.mark.parametrize(
    ("result", "raised", "code"),
    [
        (Result(130), SystemExit, 130),  # in a notebook, KeyboardInterrupt
        (Result(75), Preempted, 75),
        (Result(5, failure=Failure(1, "box", "the cause", 5, memory="host")), WorkerFailed, None),
    ],
)
def test_a_caller_in_python_is_told_how_a_run_ended(
    monkeypatch: pytest.MonkeyPatch, result: Result, raised: type[BaseException], code: int
) -> None:
    monkeypatch.setattr(ending, "interactive", lambda: False)
    require_done(Result(0), 2, "config.yaml")
    with pytest.raises(raised) as told:
        require_done(result, 2, "config.yaml")
    assert getattr(told.value, "code", None) == code
    if result.failure is not None:
        assert "rank 1 of 2 on box failed: the cause" in str(told.value) and "lockstep plan config.yaml" in str(
            told.value
        )
