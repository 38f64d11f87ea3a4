"""What counts as a checkpoint in a bucket, and what becomes of those that are not to be gone on with."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
import torch

from conftest import wait_until
from lockstep.checkpoint.manifest import MANIFEST_FILE, MODEL_FILE
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.checkpoint.writer import Snapshot, delete_old, write
from lockstep.config.schema import Checkpoint, Keep, RunSettings
from lockstep.errors import BucketBehind, CheckpointError, ConfigError
from lockstep.mirror import lease, staging
from lockstep.mirror.bucket import Bucket
from lockstep.mirror.mark import mirrored
from lockstep.mirror.mirror import Mirror
from lockstep.mirror.uploads import Uploads
from lockstep.mirror.url import Url, parse, place
from lockstep.record.folder_lease import Holder
from s3_server import Link, S3Server

SETTINGS = RunSettings(checkpoint=Checkpoint(keep=Keep(last=2, best=1)))


@pytest.fixture
def url(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Url:
    """Of a run in a bucket, as seen from this process."""
    for name, value in {**s3.environment, "XDG_CACHE_HOME": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # of another server
    return parse("s3://bucket/runs/one", "RUN_DIR")


def save(folder: Path, step: int, value: float | None = None, base: int | None = None, size: int = 3) -> Path:
    """Save a checkpoint; with `base`, as the first one after a restore from that step."""
    folder.mkdir(exist_ok=True)
    snapshot = Snapshot(step, {"w": torch.full((size,), float(step))}, {}, {}, about={"value": value})
    storage = CheckpointStorage(folder / "checkpoints")
    if base is not None:
        storage.set_aside_after(base)
    return write(storage, snapshot)


def steps(s3: S3Server) -> list[str]:
    return sorted(each.name for each in (s3.disk / "bucket/runs/one/checkpoints").iterdir() if any(each.iterdir()))


def fill(url: Url, folder: Path, *saved: int) -> None:
    """A run of before, in the bucket alone."""
    bucket = Bucket(url)
    bucket.write("config.yaml", b"checkpoint: {keep: {mode: min}}\n")
    for step in saved:
        bucket.publish(save(folder, step, float(step)), f"checkpoints/step-{step:08d}")


def test_half_of_a_checkpoint_is_passed_over_and_makes_room_for_the_next(
    url: Url, s3: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(url, tmp_path / "before", 5, 10, 15, 20)
    bucket = Bucket(url)
    bucket.delete(f"checkpoints/step-00000010/{MANIFEST_FILE}")  # as an upload leaves it that was interrupted
    short, wrong = (f"checkpoints/step-000000{step}/{MODEL_FILE}" for step in (15, 20))
    bucket.write(short, (bucket.read(short) or b"")[:-1])
    bucket.write(wrong, (bucket.read(wrong) or b"")[:-1] + b"!")  # only its digest tells
    with caplog.at_level(logging.WARNING):
        folder = staging.opened(url, "RUN_DIR")
    assert CheckpointStorage(folder / "checkpoints").steps() == [5]
    assert "step-00000020, as it came from elsewhere, is damaged and is passed over: model.safetensors" in caplog.text
    with mirrored(folder, SETTINGS, pytest.fail) as mirror:
        assert mirror is not None
        save(folder, 6, base=5)
        mirror.settle()
        assert steps(s3) == [
            "aside-step-00000020", "damaged-step-00000015", "step-00000005", "step-00000006",
        ]  # fmt: skip
    assert Bucket(url).to_try() == ["checkpoints/step-00000006", "checkpoints/step-00000005"]


def test_the_only_whole_one_counts_until_its_step_has_been_uploaded_again(
    url: Url, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(url, tmp_path / "before", 2)
    again, path = save(tmp_path / "before", 2, 0.5, size=4), "checkpoints/step-00000002"
    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "send", lambda *_: pytest.fail("the host is lost here"))
        with pytest.raises(pytest.fail.Exception):
            Bucket(url).publish(again, path)
    assert Bucket(url).to_try() == Bucket(url).to_try(2) == ["checkpoints/kept-step-00000002"]
    folder = CheckpointStorage(staging.opened(url, "RUN_DIR") / "checkpoints")
    assert [(each.step, each.value) for each in folder.saved()] == [(2, 2.0)]
    bucket = Bucket(url)
    bucket.publish(again, path)
    assert steps(s3) == ["step-00000002"] and list(Bucket(url).digests()) == [2]
    fill(url, tmp_path / "before", 3)
    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "send", lambda *_: pytest.fail("the host is lost here"))
        with pytest.raises(pytest.fail.Exception):
            bucket.publish(save(tmp_path / "before", 3, 0.5), "checkpoints/step-00000003")
    assert Bucket(url).to_try() == [path], "nothing is copied where another one is whole"


def test_where_none_is_whole_nothing_is_begun_anew(url: Url, tmp_path: Path) -> None:
    fill(url, tmp_path / "before", 5)
    Bucket(url).delete(f"checkpoints/step-00000005/{MANIFEST_FILE}")
    with pytest.raises(CheckpointError, match="none is whole, so nothing was begun anew"):
        staging.opened(url, "RUN_DIR")


def test_one_that_is_chosen_is_fetched_and_retention_weighs_those_of_before(
    url: Url, s3: S3Server, tmp_path: Path
) -> None:
    fill(url, tmp_path / "before", 1, 2, 3)
    with pytest.raises(CheckpointError, match=r"no whole checkpoint of step 7 \(steps with one: 1, 2, 3\)"):
        staging.opened(url, "RUN_DIR", step=7)
    best = staging.opened(url, "RUN_DIR", best=True)
    assert CheckpointStorage(best / "checkpoints").steps() == [1]
    folder = staging.opened(url, "RUN_DIR", step=2)
    with mirrored(folder, SETTINGS, pytest.fail) as mirror:
        assert mirror is not None
        for step in (4, 5):
            save(folder, step, 10.0, base=2 if step == 4 else None)
            mirror.settle()
    assert steps(s3) == ["aside-step-00000003", "step-00000001", "step-00000004", "step-00000005"], "1 is the best"


def test_a_copy_that_another_host_has_gone_past_is_not_gone_on_with(
    url: Url, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(url, tmp_path / "before", 1)
    here = staging.opened(url, "RUN_DIR")
    with mirrored(here, SETTINGS, pytest.fail):
        save(here, 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another host"))
    there = staging.opened(url, "RUN_DIR")
    with mirrored(there, SETTINGS, pytest.fail):
        save(there, 3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(
        ConfigError, match=r"was written by another host since .* `lockstep resume s3://bucket/runs/one`"
    ):
        Mirror.begin(here, staging.mark_of(here) or pytest.fail(), SETTINGS, print)
    assert staging.opened(url, "RUN_DIR") == here
    assert max(CheckpointStorage(here / "checkpoints").steps()) == 3
    left = here.with_name("one-left-1")
    assert CheckpointStorage(left / "checkpoints").steps() == [1, 2], "what was here of before"


def test_one_writer_at_a_time_and_one_that_is_gone_is_none(url: Url, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket(url)
    first = lease.BucketLease.take(bucket, Holder("its writer"), lambda token: None)
    with pytest.raises(ConfigError, match="another run is at work in this folder: its writer, process"):
        lease.BucketLease.take(bucket, Holder("a second"), lambda token: None)
    first.release()
    lease.BucketLease.take(bucket, Holder("a second"), lambda token: None).release()
    bucket.write(lease.LEASE_FILE, Holder("killed", started="0").encode(token="x", beat=1, released=False))
    lease.BucketLease.take(bucket, Holder("a third"), lambda token: None).release()
    monkeypatch.setattr(lease, "STALE_SECONDS", 1.0)
    monkeypatch.setattr(lease, "_LOOK_SECONDS", 0.2)
    bucket.write(lease.LEASE_FILE, Holder("of another host", machine="far").encode(token="x", beat=1, released=False))
    fourth = lease.BucketLease.take(bucket, Holder("a fourth"), lambda token: None)
    fourth.release()
    wait_until(lambda: b'"released": true' in (bucket.read(lease.LEASE_FILE) or b""), 10, "the lease")


def test_who_has_lost_the_lease_writes_nothing_more(
    url: Url, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.2)
    fill(url, tmp_path / "before", 1)
    folder, told = staging.opened(url, "RUN_DIR"), list[str]()
    lost = pytest.raises(BucketBehind, match=r"another, process .* has taken .* over")
    with lost, mirrored(folder, SETTINGS, told.append) as mirror:
        assert mirror is not None
        Bucket(url).write(lease.LEASE_FILE, Holder("another").encode(token="another", beat=1, released=False))
        wait_until(lambda: mirror._lease.lost, 10, "the lease to be lost")
        save(folder, 2)
    assert steps(s3) == ["step-00000001"]
    assert "Nothing more is written there" in told[0]


def test_a_local_folder_that_is_wiped_deletes_nothing_in_the_bucket(url: Url, s3: S3Server, tmp_path: Path) -> None:
    fill(url, tmp_path / "before", 1)
    folder, told = staging.opened(url, "RUN_DIR"), list[str]()
    with pytest.raises(BucketBehind, match="folder was deleted"), mirrored(folder, SETTINGS, told.append) as mirror:
        assert mirror is not None
        save(folder, 2, base=1)
        mirror.settle()
        shutil.rmtree(folder / "checkpoints")
        mirror.settle()
        assert steps(s3) == ["step-00000001", "step-00000002"]
        save(folder, 3)
        mirror.settle()
        save(folder, 4)
        mirror.settle()
        kept = ["step-00000001", "step-00000003", "step-00000004"]
        assert steps(s3) == kept, "retention looks at what is in the bucket: the best and the last two"
        shutil.rmtree(folder)
        save(folder, 5)  # whoever made this folder, it is another one
        save(folder, 6)
        mirror.settle()
    assert steps(s3) == kept
    assert "folder was deleted" in told[-1]


def test_a_bucket_that_is_slower_than_saving_gets_the_newest(
    url: Url, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, told = Link(s3.port, rate=1e6), list[str]()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{link.port}")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    folder = staging.existing_or_new(url, "--out")
    with mirrored(folder, SETTINGS, told.append):
        for step in range(1, 31):
            save(folder, step, size=200_000)
            delete_old(CheckpointStorage(folder / "checkpoints"), step, SETTINGS.checkpoint.keep)
            time.sleep(0.2)
        checkpoints = s3.disk / "bucket/runs/one/checkpoints"
        whole = [each for each in steps(s3) if (checkpoints / each / MANIFEST_FILE).exists()]
        assert whole and int(whole[-1][-2:]) >= 15, whole
        link.rate = None
    assert steps(s3) == ["step-00000029", "step-00000030"]
    slow = next(each for each in told if "slower" in each)
    assert "was deleted here meanwhile" in slow and "MB/s" in slow
    assert not (folder / ".sending").exists()
    link.close()


def test_an_evicted_writer_changes_nothing_of_the_new_holder(url: Url, s3: S3Server, tmp_path: Path) -> None:
    """Before its next beat: it looks at the lease before every change."""
    fill(url, tmp_path / "before", 1)
    folder, told = staging.opened(url, "RUN_DIR"), list[str]()
    lost = pytest.raises(BucketBehind, match=r"another, process .* has taken .* over")
    with lost, mirrored(folder, SETTINGS, told.append) as mirror:
        assert mirror is not None
        save(folder, 2, base=1)
        mirror.settle()
        other = Bucket(url)
        other.write(lease.LEASE_FILE, Holder("another").encode(token="another", generation=9, beat=1, released=False))
        other.remove("checkpoints/step-00000002")
        other.publish(save(tmp_path / "other", 3, base=1), "checkpoints/step-00000003")
        for step in (4, 5, 6):
            save(folder, step)
            delete_old(CheckpointStorage(folder / "checkpoints"), step, SETTINGS.checkpoint.keep)
            mirror.settle()
        assert steps(s3) == ["step-00000001", "step-00000003"]
    assert steps(s3) == ["step-00000001", "step-00000003"]
    assert "Nothing more is written there" in told[-1]


def test_what_an_evicted_writer_had_under_way_is_of_a_branch_that_was_left(
    url: Url, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = lease.BucketLease.take(Bucket(url), Holder("first"), lambda token: None)
    first.release()
    ours = Bucket(url, first)
    ours.set_aside_after(None, "a")
    for step in (2, 4):
        ours.publish(save(tmp_path / "a", step, float(step)), f"checkpoints/step-{step:08d}")
    second = lease.BucketLease.take(Bucket(url), Holder("second"), lambda token: None)
    second.release()
    assert second.generation > first.generation
    theirs = Bucket(url, second)
    theirs.set_aside_after(2, "b")
    theirs.publish(save(tmp_path / "b", 3, 3.0), "checkpoints/step-00000003")
    monkeypatch.setattr(first, "check", lambda: None)  # a request that was on its way already
    ours.publish(save(tmp_path / "a", 6, 0.0), "checkpoints/step-00000006")
    assert Bucket(url).to_try() == ["checkpoints/step-00000003", "checkpoints/step-00000002"]
    assert "step-00000006 is passed over: another writer has resumed from before it" in caplog.text
    assert Bucket(url).to_try(best=True)[0] == "checkpoints/step-00000002"
    theirs.retain(Keep(last=1, best=0))
    assert Bucket(url).to_try() == ["checkpoints/step-00000003"]


def test_a_lease_that_is_missing_belongs_to_nobody(url: Url, s3: S3Server, tmp_path: Path) -> None:
    fill(url, tmp_path / "before", 1)
    folder = staging.opened(url, "RUN_DIR")
    with mirrored(folder, SETTINGS, pytest.fail) as mirror:
        assert mirror is not None
        Bucket(url).delete(lease.LEASE_FILE)
        save(folder, 2, base=1)
        mirror.settle()
        assert steps(s3) == ["step-00000001", "step-00000002"]
        assert Holder.decode(Bucket(url).read(lease.LEASE_FILE) or b"") is not None


def test_a_file_that_cannot_be_sent_is_named_and_holds_up_nothing(url: Url, s3: S3Server, tmp_path: Path) -> None:
    fill(url, tmp_path / "before", 1)
    folder, told = staging.opened(url, "RUN_DIR"), list[str]()
    (folder / "logs").mkdir(exist_ok=True)
    (folder / os.fsdecode(b"logs/bad-\xff.txt")).write_text("x")
    (folder / "logs" / "later.txt").write_text("x")
    with mirrored(folder, SETTINGS, told.append) as mirror:
        assert mirror is not None
        save(folder, 2, base=1)
        mirror.settle()
        assert steps(s3) == ["step-00000001", "step-00000002"]
    assert (s3.disk / "bucket/runs/one/logs/later.txt").exists()
    assert "logs/bad-\\udcff.txt cannot be sent" in told[0] and "not UTF-8" in told[0]


def test_names_that_lead_out_of_the_folder_are_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket(parse(f"file://{tmp_path}", "--out"))
    names = [f"{tmp_path}/logs/{name}" for name in ("rank-0.log", "../../evil", "a//b")]
    found = {name: {"type": "file", "size": 1} for name in names}
    monkeypatch.setattr(bucket._fs, "find", lambda path, detail: found)
    assert bucket.files("logs") == [("logs/rank-0.log", 1)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("azure://x/y", "azure:// is not supported. s3://, gs://, file:// work"),
        ("s3://", "names no bucket"),
        ("s3:///x", "names no bucket"),
        ("s3://bucket/a/../b", "without empty parts"),
        ("s3://bucket/a?x=1", "without empty parts"),
        ("file://relative/x", "takes an absolute path"),
    ],
)
def test_urls_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(text, "--out")


def test_what_is_a_url() -> None:
    assert place("runs", "--out") == Path("runs") and place("a:/b", "--out") == Path("a:/b")
    assert place("~/runs", "--out") == Path.home() / "runs"
    with pytest.raises(ConfigError, match=r"--out ~nobody-here: there is no home folder of that user on this machine"):
        place("~nobody-here", "--out")
    assert str(place("gcs://bucket/a/", "--out")) == "gs://bucket/a"
    with pytest.raises(ConfigError, match="a Path cannot hold a URL"):
        place(Path("s3://bucket/runs"), "out:")


def test_a_missing_package_is_named_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ConfigError, match=r"gs:// needs the package gcsfs, .*: pip install 'lockstep-train\[gcs\]'"):
        Bucket(parse("gs://bucket/x", "--out"))


def test_rows_arrive_before_the_checkpoint_that_stands_on_them(tmp_path: Path) -> None:
    """Whoever goes on from a checkpoint has all rows up to it, whenever the host that sent them died."""

    class Recording:
        sent: ClassVar[list[str]] = []

        def send(self, file: Path, path: str) -> None:
            self.sent.append(f"{path} of {file.stat().st_size} bytes")

        def publish(self, folder: Path, path: str) -> None:
            self.sent.append(path)

        def retain(self, keep: Keep) -> None: ...

        def digests(self) -> dict[int, str]:
            return {}

    rows = tmp_path / "metrics.jsonl"
    rows.write_text("1")
    sync = Uploads(Recording(), tmp_path, Keep(), print)  # type: ignore[arg-type]
    sync.push()
    rows.write_text("1234")
    save(tmp_path, 4)
    sync.push(at_most_every=3600.0)
    expected = ["metrics.jsonl of 1 bytes", "metrics.jsonl of 4 bytes", "checkpoints/step-00000004"]
    assert Recording.sent == expected
    Recording.sent.clear()
    sync = Uploads(Recording(), tmp_path, Keep(), print)  # type: ignore[arg-type]
    sync.there[4] = sync._digest(sync.storage.path(4)) or ""
    for size in (5_000_000, 5_000_001):
        rows.write_bytes(b"1" * size)
        save(tmp_path, size)
        sync.push(at_most_every=0.01)
    expected = ["metrics.jsonl of 5000000 bytes", "checkpoints/step-05000000", "checkpoints/step-05000001"]
    assert Recording.sent == expected, "which travels whole, and is not sent so soon again"
    sync.push()
    assert Recording.sent == [*expected, "metrics.jsonl of 5000001 bytes"], "but at the end"
