"""What is measured of whole sets, and hooks, on several ranks: as one process and scikit-learn have it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import set_tasks
import torch
from sklearn.metrics import confusion_matrix, f1_score, log_loss, roc_auc_score

from conftest import TASK_FILE, Project, last_weights, rows, summary

pytest.importorskip("torchmetrics", reason="pip install 'lockstep-train[metrics]'")
FILE = Path(set_tasks.__file__)


def expected(run: Path, data: Any) -> dict[str, Any]:
    model = set_tasks.Measured().model()
    model.load_state_dict(last_weights(run))
    inputs, labels = data.tensors
    with torch.no_grad():
        scores = model(inputs)
    loss = log_loss(labels, scores.double().softmax(1), labels=range(4))
    return {
        "loss": loss,
        "norm": float(scores.norm(dim=1).mean()),
        "first": float(inputs[:, 0].mean()),
        "f1": f1_score(labels, scores.argmax(1), average="macro"),
        "auroc": roc_auc_score(labels, scores.softmax(1), multi_class="ovr"),
        "auc": roc_auc_score(labels == 0, scores[:, 0]),
        "confusion": confusion_matrix(labels, scores.argmax(1), labels=range(4)).astype(float).tolist(),
        "perplexity": float(torch.tensor(loss).exp()),
        "order": scores[:, 0].tolist(),
    }


@pytest.mark.parametrize(
    ("processes", "settings"),
    [
        (3, {}),
        pytest.param(2, {}, marks=pytest.mark.long),
        pytest.param(3, {"validate": {"batch_size": 7, "on": "rank0"}}, marks=pytest.mark.long),
        pytest.param(2, {"strategy": {"type": "fsdp", "mesh": {"data": -1}}}, marks=pytest.mark.long),
        pytest.param(4, {"strategy": {"type": "tensor", "mesh": {"data": 2, "model": 2},
                         "shard": {"0.weight": ["model", None]}}}, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_metrics_of_whole_sets_are_those_of_one_process(
    processes: int, settings: dict[str, Any], project: Project
) -> None:
    """The last of the ranks stops the run, and a metric of a whole set is what the best are kept by."""
    run = project.train(**{
        "task": str(FILE) + ":Measured", "processes": processes, "data": {}, "validate": {"batch_size": 7},
        "callbacks": [{"type": f"{FILE}:StopOnLast", "step": 8}], "train": {"epochs": 9, "batch_size": 12},
        "checkpoint": {"keep": {"metric": "val/many/f1", "mode": "max"}},
        "early_stop": {"criteria": [{"metric": "val/few/auc", "mode": "max"}], "patience": 50}, **settings,
    })  # fmt: skip
    found = summary(run)
    assert found["reason"] == f"rank {processes - 1} has enough (callback StopOnLast)"
    assert (found["step"], found["best"]["metric"]) == (8, "val/many/f1")
    task = set_tasks.Measured()
    sets = {**{f"val/{name}": data for name, data in task.val_data().items()}, "test": task.test_data()}
    written = {name: value for row in rows(run) for name, value in row.items() if row["step"] == 8}
    for prefix, data in sets.items():
        for name, value in expected(run, data).items():
            found = torch.tensor(written[f"{prefix}/{name}"])
            torch.testing.assert_close(found, torch.tensor(value, dtype=found.dtype), rtol=2e-5, atol=1e-6)
    kept = summary(run)["metrics"]
    assert {"val/many/f1", "test/f1"} <= kept.keys()
    assert not [name for name in kept if name.endswith("confusion")], "matrices are in metrics.jsonl alone"


def test_a_hook_of_one_rank_that_raises_is_named(project: Project) -> None:
    config = project.config(callbacks=[{"type": f"{FILE}:FailOnOne", "rank": 1}])
    finished = project.run("train", config)
    assert finished.code == 5
    assert "callback FailOnOne.after_epoch failed after step 7 on rank 1: ZeroDivisionError: nothing to divide by" in (
        finished.err
    )
    assert 'raise ZeroDivisionError("nothing to divide by")' in finished.err


def test_the_state_of_a_hook_survives_a_kill_bit_for_bit(project: Project) -> None:
    """Checkpoints are every three steps; rank 1 is killed in the midst between two of them."""

    def average(name: str, **task: Any) -> Any:
        file = project.folder / f"{name}.json"
        project.train(
            out=name, task={"type": f"{TASK_FILE}:Tiny", "dropout": 0.2, **task}, launch={"max_restarts": 1},
            checkpoint={"every": "3 steps"}, callbacks=[{"type": f"{FILE}:Average", "file": str(file)}],
        )  # fmt: skip
        return json.loads(file.read_text())

    whole = average("whole")
    killed = average(
        "killed", fail_at={"how": "kill", "rank": 1, "step": 9, "once": str(project.folder / "killed-once")}
    )
    assert (project.folder / "killed-once").exists()
    assert whole[0] == whole[1] and whole[0]["steps"] == 14
    assert killed == whole
