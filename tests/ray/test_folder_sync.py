"""What a node with a disk of its own sends to the driver's, without a cluster: the calls go straight to the store."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("ray", reason="Ray is not installed: pip install 'lockstep-train[ray]'")

from lockstep.checkpoint.manifest import MODEL_FILE
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.checkpoint.writer import Snapshot, write
from lockstep.config.schema import Keep
from lockstep.distributed.topology import Place
from lockstep.errors import CheckpointError, FolderLost
from lockstep.ray.mailbox import FolderStore, NodeSync

KEEP = Keep(last=2, best=0)


class Direct(NodeSync):
    def __init__(self, driver: Path, node: Path) -> None:
        store = FolderStore(str(driver))
        super().__init__(lambda what, *arguments: getattr(store, what)(*arguments), node, Place(), KEEP)


def save(folder: Path, step: int, value: float | None = None) -> None:
    folder.mkdir(exist_ok=True)
    snapshot = Snapshot(step, {"w": torch.full((3,), float(step))}, {}, {}, about={"value": value})
    write(CheckpointStorage(folder / "checkpoints"), snapshot)


def goes_on_from(folder: Path, step: int | None) -> None:
    """As a run does before its first save."""
    CheckpointStorage(folder / "checkpoints").set_aside_after(step)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("[!.]*"))


def test_what_is_newer_than_what_was_pulled_is_set_aside_on_the_drivers_disk_too(tmp_path: Path) -> None:
    driver, node = tmp_path / "driver", tmp_path / "node"
    for step in (5, 10):
        save(driver, step)
    file = driver / "checkpoints" / "step-00000010" / MODEL_FILE
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    sync = Direct(driver, node)
    sync.pull()
    assert names(node) == ["step-00000005"]
    sync.push()
    assert names(driver) == ["step-00000005", "step-00000010"], "nothing new, nothing changed"
    goes_on_from(node, 5)
    save(node, 6)
    sync.push()
    assert names(driver) == ["damaged-step-00000010", "step-00000005", "step-00000006"]
    save(node, 7)
    sync.push()
    assert names(driver) == ["damaged-step-00000010", "step-00000006", "step-00000007"]


def test_what_the_node_set_aside_is_not_deleted_on_the_drivers_disk(tmp_path: Path) -> None:
    driver, node = tmp_path / "driver", tmp_path / "node"
    save(driver, 5)
    sync = Direct(driver, node)
    sync.pull()
    goes_on_from(node, None)
    save(node, 1)
    sync.push()
    assert names(driver) == ["aside-step-00000005", "step-00000001"]


def test_a_node_whose_disk_was_wiped_deletes_nothing_on_the_drivers(tmp_path: Path) -> None:
    driver, node = tmp_path / "driver", tmp_path / "node"
    driver.mkdir()
    sync = Direct(driver, node)
    sync.pull()
    save(node, 1)
    save(node, 2)
    sync.push()
    shutil.rmtree(node / "checkpoints")
    sync.push()
    assert names(driver) == ["step-00000001", "step-00000002"]


def test_where_none_can_be_used_nothing_begins_anew_on_the_node(tmp_path: Path) -> None:
    driver, node = tmp_path / "driver", tmp_path / "node"
    save(driver, 5)
    (driver / "checkpoints" / "step-00000005" / MODEL_FILE).unlink()
    with pytest.raises(CheckpointError, match="the only checkpoint cannot be used"):
        Direct(driver, node).pull()


def test_a_folder_that_was_moved_on_the_drivers_disk_is_not_made_anew(tmp_path: Path) -> None:
    driver, node = tmp_path / "driver", tmp_path / "node"
    driver.mkdir()
    sync = Direct(driver, node)
    sync.pull()
    driver.rename(tmp_path / "moved")
    save(node, 1)
    with pytest.raises(FolderLost, match="was moved to"):
        sync.push()
    assert not driver.exists()


def test_a_step_that_is_saved_once_more_is_sent_once_more(tmp_path: Path) -> None:
    driver, node = tmp_path / "driver", tmp_path / "node"
    driver.mkdir()
    sync = Direct(driver, node)
    sync.pull()
    save(node, 1)
    sync.push()
    save(node, 1, value=0.5)  # judged by now
    sync.push()
    assert CheckpointStorage(driver / "checkpoints").best_good("min") == 1
