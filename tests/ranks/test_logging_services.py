"""Loggers by their own packages, on real processes: the same run there after a kill and a resume, without any key."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Project, losses
from conftest import rows as plain_rows

KEY, TOKEN = "0123456789abcdef0123456789abcdef01234567", "hf_this_is_for_nobody_to_see"


def environment(home: Path) -> dict[str, str]:
    """Nothing of this machine's user, and nothing left there."""
    own = ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "HF_HOME")
    return {**dict.fromkeys(own, str(home)), "NETRC": str(home / "netrc"), "WANDB_API_KEY": KEY}


@pytest.fixture(scope="module")
def killed_and_resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that was logged to all of them, killed, restarted and resumed; see logged_run.py."""
    there = tmp_path_factory.mktemp("logged")
    loggers = {
        "wandb": {"project": "tests", "mode": "offline", "tags": ["a"]},
        "mlflow": {"tracking_uri": "mlruns", "experiment": "tests", "tags": {"by": "me"}},
        "tensorboard": True,
    }
    settings = {
        "log": {"every": "1 step", "timeout": 60, **loggers},
        "launch": {"max_restarts": 1, "ray": {"runtime_env": {"env_vars": {"HF_TOKEN": TOKEN}}}},
    }
    script = Path(__file__).with_name("logged_run.py")
    started = Project(there).start_python(script, there / "run", json.dumps(settings), env=environment(there / "home"))
    finished = started.wait()
    assert finished.code == 0, finished.text
    came_to = json.loads(finished.out.splitlines()[-1])
    assert came_to["logged"] == came_to["plain"]
    assert (there / "run" / "was-killed").exists()
    return there


def offline_records(folder: Path) -> Iterator[Any]:
    """What wandb keeps of offline runs: a log of LevelDB's kind, with a header of seven bytes."""
    from wandb.proto import wandb_internal_pb2

    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        data, at, whole = file.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            _, length, kind = struct.unpack("<IHB", data[at : at + 7])
            whole += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # whole, or the last part
                record = wandb_internal_pb2.Record()
                record.ParseFromString(whole)
                whole = b""
                yield record


def files_with(text: str, folder: Path) -> list[str]:
    return [str(file) for file in folder.rglob("*") if file.is_file() and text.encode() in file.read_bytes()]


def test_wandb_offline_is_one_run_after_a_kill_and_a_resume(killed_and_resumed: Path) -> None:
    run = killed_and_resumed / "run"
    records = list(offline_records(run))
    assert len({each.run.run_id for each in records if each.HasField("run")}) == 1
    found = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in each.history.item}
        for each in records
        if each.HasField("history")
    ]
    steps = [row["_step"] for row in found]
    assert steps == list(range(1, 13))  # what the killed process took along was sent again, and nothing else
    rows = dict(zip(steps, found, strict=True))
    written = {row["step"]: row["loss"] for row in plain_rows(run) if "loss" in row}
    assert {step: row["loss"] for step, row in rows.items()} == written
    for step in (6, 12):
        row = rows[step]
        assert row["after"] == step // 6 - 1 and row["val/picture/_type"] == "image-file"
        assert row["answers/_type"] == "table-file" and row["story/_type"] == "html-file"
    assert [each.exit.exit_code for each in records if each.HasField("exit")][-1] == 0
    assert not any(each.HasField("environment") for each in records)
    for secret in (KEY, TOKEN):
        assert not files_with(secret, run / "wandb") + files_with(secret, run / "loggers")
    assert not files_with(KEY, run)


def test_mlflow_in_a_folder_is_one_run_after_a_kill_and_a_resume(killed_and_resumed: Path) -> None:
    place = killed_and_resumed / "mlruns"
    (remote,) = (each.parent for each in place.glob("*/*/meta.yaml"))
    points = [line.split() for line in (remote / "metrics" / "loss").read_text().splitlines()]
    assert [int(step) for _, _, step in points] == list(range(1, 13))
    assert [line.split()[2] for line in (remote / "metrics" / "after").read_text().splitlines()] == ["6", "12"]
    assert "status: 3" in (remote / "meta.yaml").read_text()  # finished
    assert (remote / "params" / "log.every").read_text() == "1 step"
    assert (remote / "tags" / "by").read_text() == "me"
    kept = sorted(str(each.relative_to(remote / "artifacts")) for each in (remote / "artifacts").rglob("*.*"))
    assert kept == sorted(f"samples/step-{step:08d}/{name}" for step in (6, 12)
                          for name in ("val/picture.png", "story.txt", "answers.json"))  # fmt: skip
    assert not files_with(TOKEN, place) + files_with(KEY, place)


# Without an answer


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that takes connections, and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken: list[socket.socket] = []

        def take() -> None:
            while True:
                try:
                    taken.append(server.accept()[0])
                except OSError:
                    return

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)
        for each in taken:
            each.close()


@pytest.mark.long
def test_services_that_do_not_answer_cost_their_limit_at_the_end(project: Project, silent: str) -> None:
    log = {"every": "1 step", "timeout": 1, "wandb": {"project": "x"}, "mlflow": {"tracking_uri": silent}}
    finished = project.run(
        "train", project.config(log=log), "--out", "runs", env={**environment(project.folder), "WANDB_BASE_URL": silent}
    )
    assert finished.code == 0, finished.text
    for name in ("wandb", "mlflow"):
        assert f"WARNING: log.{name}: start " in finished.out
    assert "it was ended there" not in finished.text  # no package keeps the process from ending
    assert "Traceback" not in finished.text
    assert sorted(losses(project.only_run())) == list(range(1, 15))


def test_what_cannot_work_is_told_before_anything_is_trained(project: Project) -> None:
    log = {"wandb": {"project": "x"}}
    refused = project.run("train", project.config(log=log), env={**environment(project.folder), "WANDB_API_KEY": ""})
    assert refused.code == 2 and "set WANDB_API_KEY" in refused.err and "mode: offline" in refused.err
    refused = project.run("train", project.config(log={"mine": {"type": "json:JSONDecoder"}}))
    assert refused.code == 2, refused.text
    assert "log.mine: json:JSONDecoder does not define start(self, about)" in refused.err
