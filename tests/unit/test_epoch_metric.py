"""Metrics of whole sets: the same on any number of ranks, as one process and scikit-learn compute them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, f1_score, roc_auc_score
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep
from lockstep.checkpoint.codec import from_bytes, to_bytes
from lockstep.data.batches import GlobalBatches
from lockstep.data.loader import Loader
from lockstep.errors import ConfigError
from lockstep.evaluation.means import measure_sums
from lockstep.runtime.cpu import CpuRuntime
from lockstep.tasks.measure import epoch_metrics_of_task

torchmetrics = pytest.importorskip("torchmetrics", reason="pip install 'lockstep-train[metrics]'")
CLASSES, COUNT = 4, 53


def teacher(count: int = COUNT) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(count, CLASSES, generator=generator)
    return scores, (scores + 2 * torch.randn(count, CLASSES, generator=generator)).argmax(1)


class Scored(lockstep.Task):
    """A task whose model passes on the scores that are its data."""

    def model(self) -> nn.Module:
        return nn.Identity()

    def train_data(self) -> Dataset[Any]:
        return TensorDataset(*teacher(), torch.arange(COUNT))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).mean()

    def outputs(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        scores, labels, numbers = batch
        return {"preds": model(scores), "target": labels, "number": numbers, "name": [f"n{each}" for each in numbers]}


def measured(task: lockstep.Task, batch_size: int, world_size: int, fill: bool = False) -> dict[str, Any]:
    """As all ranks together compute it: what each has travels to the first as it does between processes."""
    runtime, parts = CpuRuntime(), []
    data, model = task.train_data(), task.model()
    for rank in range(world_size):
        whole = epoch_metrics_of_task(task, runtime)
        assert whole is not None
        collected = whole.begin()
        plan = GlobalBatches(COUNT, batch_size, rank, world_size, shuffle=False, fill=fill)
        measure_sums(
            lambda batch: {}, Loader(data, plan).epoch(0), lambda batch: batch,
            collect=lambda micro, batch, into=collected: into.take(micro, task.outputs(model, batch)),  # type: ignore
        )  # fmt: skip
        parts.append(from_bytes(to_bytes(collected.part())))
    whole = epoch_metrics_of_task(task, runtime)
    assert whole is not None
    return whole.computed(parts)


SPREAD = [(1, 53, False), (1, 8, False), (2, 8, False), (3, 10, False), (4, 7, True), (3, 16, True), (7, 50, False)]


@pytest.mark.parametrize(("world_size", "batch_size", "fill"), SPREAD)
def test_whole_set_is_given_every_example_once_and_in_order(world_size: int, batch_size: int, fill: bool) -> None:
    scores, labels = teacher()

    class Task(Scored):
        def epoch_metrics(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
            assert outputs["number"].tolist() == list(range(COUNT))
            assert outputs["name"] == [f"n{each}" for each in range(COUNT)]
            assert torch.equal(outputs["preds"], scores)
            probabilities = outputs["preds"].softmax(1)
            return {"auc": roc_auc_score(outputs["target"], probabilities, multi_class="ovr"), "matrix": np.eye(2)}

    expected = roc_auc_score(labels, scores.softmax(1), multi_class="ovr")
    assert measured(Task(), batch_size, world_size, fill) == {"auc": expected, "matrix": [[1.0, 0.0], [0.0, 1.0]]}


class Many(Scored):
    def outputs(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        scores, labels, numbers = batch
        chosen = model(scores)
        return {
            "preds": chosen, "target": labels, "value": chosen[:, 0], "first": chosen[:, 0], "second": chosen[:, 1],
            "group": numbers // 10,
        }  # fmt: skip

    def torchmetrics(self) -> dict[str, Any]:
        from torchmetrics import classification as c
        from torchmetrics.wrappers import ClasswiseWrapper

        f1 = c.MulticlassF1Score(CLASSES, average="macro")
        return {
            "f1": f1,
            "auroc": c.MulticlassAUROC(CLASSES),
            "binned": c.MulticlassAUROC(CLASSES, thresholds=20),
            "confusion": c.MulticlassConfusionMatrix(CLASSES),
            "each": ClasswiseWrapper(c.MulticlassRecall(CLASSES, average=None)),
            "both": c.MulticlassAccuracy(CLASSES) + c.MulticlassF1Score(CLASSES),
            "mean": torchmetrics.MeanMetric(),
            "largest": torchmetrics.MaxMetric(),
            "pearson": torchmetrics.PearsonCorrCoef(),
            "spearman": torchmetrics.SpearmanCorrCoef(),
            "r2": torchmetrics.R2Score(),
            "retrieval": torchmetrics.retrieval.RetrievalMAP(),
        }

    def update_metrics(self, metrics: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        apart = {name: metrics[name] for name in ("pearson", "spearman", "r2")}
        rest = {name: each for name, each in metrics.items() if name not in (*apart, "retrieval")}
        super().update_metrics(rest, outputs)
        for each in apart.values():
            each.update(outputs["first"], outputs["second"])
        metrics["retrieval"].update(outputs["first"], outputs["second"] > 0, indexes=outputs["group"])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("world_size", "batch_size", "fill"), SPREAD)
def test_torchmetrics_are_those_of_one_process(world_size: int, batch_size: int, fill: bool) -> None:
    scores, labels = teacher()
    found = measured(Many(), batch_size, world_size, fill)
    assert found["f1"] == pytest.approx(f1_score(labels, scores.argmax(1), average="macro"), rel=1e-6)
    assert found["auroc"] == pytest.approx(roc_auc_score(labels, scores.softmax(1), multi_class="ovr"), rel=1e-6)
    assert found["confusion"] == confusion_matrix(labels, scores.argmax(1)).astype(float).tolist()
    assert [name for name in found if name.startswith("each/")] == [f"each/multiclassrecall_{n}" for n in range(4)]
    outputs = Many().outputs(nn.Identity(), (scores, labels, torch.arange(COUNT)))
    Many().update_metrics(alone := Many().torchmetrics(), outputs)
    for name, metric in alone.items():
        if name not in ("each", "confusion"):
            assert found[name] == pytest.approx(float(metric.compute()), rel=1e-5), name


class Last(torchmetrics.Metric):
    """A state that nobody says how to combine, and a value that it cannot be had from."""

    def __init__(self, reduce: str | None) -> None:
        super().__init__()
        self.add_state("last", torch.tensor(0.0), dist_reduce_fx=reduce)

    def update(self, value: Tensor) -> None:
        self.last = value.mean()

    def compute(self) -> Tensor:
        return self.last.sum()


def tried(task: lockstep.Task, rows: int = 12) -> dict[str, Any] | None:
    whole = epoch_metrics_of_task(task, CpuRuntime())
    assert whole is not None
    scores, labels = teacher(rows)
    return whole.tried(task.outputs(nn.Identity(), (scores, labels, torch.arange(rows))))


@pytest.mark.parametrize("reduce", [None, "mean", "sum"])
def test_a_metric_that_cannot_be_combined_is_refused_by_name(reduce: str | None) -> None:
    class Task(Many):
        def torchmetrics(self) -> dict[str, Any]:
            return {"latest": Last(reduce), "mean": torchmetrics.MeanMetric()}

        update_metrics = lockstep.Task.update_metrics

    with pytest.raises(ConfigError) as refused:
        tried(Task())
    text = str(refused.value)
    assert text.startswith("task: torchmetrics()['latest']: a Last cannot be combined over ranks: a few examples give ")
    assert ("dist_reduce_fx is None for its last. " in text) == (reduce is None)
    assert text.endswith("or compute it in epoch_metrics(outputs), which is given all examples at once")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("rows", [1, 2, 12])
def test_metrics_that_can_be_combined_pass_the_trial_on_however_few_examples(rows: int) -> None:
    found = tried(Many(), rows)
    assert found is None or {"f1", "confusion", "pearson"} <= found.keys()
    assert rows < 12 or found is not None


def test_what_has_no_value_for_a_batch_is_left_to_the_first_validation(caplog: pytest.LogCaptureFixture) -> None:
    class Task(Scored):
        def epoch_metrics(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
            raise ValueError("only one class is present")

    caplog.set_level("INFO")
    assert tried(Task()) is None
    assert "no value for the first 12 examples (ValueError: only one class is present)" in caplog.text


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"preds": torch.zeros(())}, r"outputs\(\)\['preds'\] has shape \[\] for a batch of 8 examples: return a row"),
        ({"preds": torch.zeros(7, 2)}, r"has shape \[7, 2\] for a batch of 8 examples"),
        ({"names": ["a"]}, r"outputs\(\)\['names'\] has 1 entries for a batch of 8 examples"),
        ({"preds": 1.0}, r"outputs\(\)\['preds'\] is a float: return a tensor, or a list"),
        (torch.zeros(8), r"outputs\(\) must return a mapping by name, got a Tensor"),
    ],
)
def test_outputs_without_a_row_for_each_example_are_refused(given: Any, told: str) -> None:
    class Task(Scored):
        def outputs(self, model: nn.Module, batch: Any) -> Any:
            return given

        def epoch_metrics(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
            return {}

    with pytest.raises(ConfigError, match=told):
        measured(Task(), 8, 1)


def test_what_is_no_metric_is_refused_before_training() -> None:
    class NotOne(Scored):
        def torchmetrics(self) -> Any:
            return {"f1": f1_score}

    class Nested(Scored):
        def torchmetrics(self) -> Any:
            return {"all": torchmetrics.MetricCollection([torchmetrics.MeanMetric()])}

    class WithoutOutputs(lockstep.Task):
        model = train_data = lambda self: None  # type: ignore[assignment,return-value]

        def epoch_metrics(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
            return {}

    class Twice(Many):
        def epoch_metrics(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
            return {"f1": 1.0}

    for task, told in [
        (NotOne(), r"NotOne.torchmetrics\(\)\['f1'\] is a function, not a torchmetrics.Metric"),
        (Nested(), r"\['all'\] is a MetricCollection.*: return the collection by itself"),
        (WithoutOutputs(), r"WithoutOutputs defines epoch_metrics, but not outputs\(self, model, batch\)"),
    ]:
        with pytest.raises(ConfigError, match=told):
            epoch_metrics_of_task(task, CpuRuntime())
    with pytest.raises(ConfigError, match="metric 'f1' is there twice"):
        tried(Twice())


def test_a_collection_is_taken_apart_into_its_metrics() -> None:
    class Task(Scored):
        def torchmetrics(self) -> Any:
            from torchmetrics.classification import MulticlassF1Score, MulticlassRecall

            return torchmetrics.MetricCollection([MulticlassF1Score(CLASSES), MulticlassRecall(CLASSES)], prefix="my_")

    assert measured(Task(), 10, 3) == pytest.approx(measured(Task(), 53, 1), rel=1e-6)
    assert set(measured(Task(), 10, 2)) == {"my_MulticlassF1Score", "my_MulticlassRecall"}


def test_half_precision_is_widened_before_it_is_added_up() -> None:
    class Task(Scored):
        def outputs(self, model: nn.Module, batch: Any) -> dict[str, Any]:
            return {"value": torch.full((len(batch[0]),), 1.0).bfloat16()}

        def torchmetrics(self) -> Any:
            return {"total": torchmetrics.SumMetric()}

    assert measured(Task(), 53, 1) == {"total": 53.0}
