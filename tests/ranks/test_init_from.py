"""What a run begins with reaches every rank: whole replicas, parts, and a model that no rank ever has whole."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pretrained_bodies as bodies
import pytest
from safetensors.torch import save_file

import lockstep
from lockstep.errors import LockstepError

launch = partial(lockstep.launch, processes=2, runtime="cpu", timeouts={"collective": 30})
FSDP = "fsdp"


def test_all_ranks_begin_with_the_same_weights_under_every_strategy(tmp_path: Path) -> None:
    save_file(bodies.net(9).state_dict(), tmp_path / "weights.safetensors")
    wanted = {name: each.flatten().tolist() for name, each in bodies.net(9).named_parameters()}
    given = str(tmp_path / "weights.safetensors")
    assert launch(partial(bodies.begun, path=given), out=tmp_path) == [wanted, wanted]
    sharded = partial(bodies.begun, path=given, save=True)
    assert launch(sharded, folder=tmp_path / "sharded", strategy=FSDP) == [wanted, wanted]
    # From what two ranks have written, into a model that is made without memory: each rank reads its own parts.
    meta = partial(bodies.begun, path=str(tmp_path / "sharded"), meta=True)
    assert launch(meta, out=tmp_path, strategy=FSDP) == [wanted, wanted]


def test_what_rank_0_refuses_ends_all_ranks_with_its_words(tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match=r"init_from: .*nowhere: there is no such file or folder"):
        launch(partial(bodies.begun, path=str(tmp_path / "nowhere")), out=tmp_path)
