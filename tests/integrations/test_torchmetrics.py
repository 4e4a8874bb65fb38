"""Metrics of ensembles in a MetricCollection of torchmetrics."""

import multiprocessing
import pickle
import sys

import pytest
import torch
from torch import nn

import enfold
from enfold import EnfoldError
from enfold.errors import MissingExtra
from enfold.metrics import TABLES, disagreement, metrics_for
from enfold.tasks import Regression

pytest.importorskip("torchmetrics")
import torchmetrics
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from enfold.integrations.torchmetrics import EnsembleMetric, MeanPredictionMetric, make_collection

pytestmark = pytest.mark.filterwarnings("ignore::enfold.metrics.FewExamplesWarning")


def batches(shape, classes, members=3, number=4, seed=0):
    rng = torch.Generator().manual_seed(seed)
    for size in range(5, 5 + number):  # of different sizes: a mean of means would be wrong
        outputs = 3 * torch.randn(members, size, *shape, generator=rng)
        yield outputs, torch.randint(classes, (size, *shape[1:]), generator=rng)


def joined(pairs):
    outputs, targets = zip(*pairs, strict=True)
    return torch.cat(outputs, dim=1), torch.cat(targets)


def expected(outputs, targets, task):
    task = task.resolve(outputs, targets)
    predictions = task.predictions(task.flatten(outputs, targets))
    return {name: metric(predictions) for name, metric in metrics_for(predictions).items()}


CASES = {
    "classification": lambda: list(batches((4,), 4)),
    "dense": lambda: list(batches((3, 2, 5), 3)),
    "multilabel": lambda: [(outputs, (outputs.mean(0) > 0.5).long()) for outputs, _ in batches((6,), 2)],
    "point": lambda: [(outputs, outputs.mean(0) + 0.1) for outputs, _ in batches((1,), 2)],
    "gaussian": lambda: [(outputs.abs() + 0.1, outputs.mean(0)[:, :1]) for outputs, _ in batches((2,), 2)],
}
TASKS = {
    "classification": "classification",
    "dense": "classification",
    "multilabel": "multilabel",
    "point": "regression",
    "gaussian": Regression(head="gaussian"),
}


@pytest.mark.parametrize("case", CASES)
def test_all_metrics_of_a_task_equal_those_of_the_whole_set(case):
    pairs = CASES[case]()
    wanted = expected(*joined(pairs), enfold.tasks.as_task(TASKS[case]))
    collection = make_collection(*wanted, task=TASKS[case])
    for outputs, targets in pairs:
        collection.update(outputs, targets)
    assert len(collection.compute_groups) == 1  # one state
    found = {name: float(value) for name, value in collection.compute().items()}
    assert found == pytest.approx(wanted, rel=1e-6, nan_ok=True)


def test_names_of_all_tasks_are_known():
    for name in {name for table in TABLES.values() for name in table}:
        EnsembleMetric(name)


def test_reset_removes_the_examples_and_forward_gives_the_batch():
    first, second = list(batches((4,), 4, number=2))
    metric = EnsembleMetric("nll")
    metric.update(*first)
    metric.reset()
    only = metric(*second)
    wanted = enfold.metrics.nll(enfold.Predictions.from_logits(*second))
    assert float(only) == pytest.approx(wanted, rel=1e-6)
    assert float(metric.compute()) == pytest.approx(wanted, rel=1e-6)
    assert metric.higher_is_better is False


def test_a_network_has_no_member_axis():
    (outputs, targets) = joined(batches((4,), 4))
    metric = EnsembleMetric("brier", members=False)
    metric.update(outputs[0], targets)
    assert float(metric.compute()) == pytest.approx(
        enfold.metrics.brier(enfold.Predictions.from_logits(outputs[0], targets)), rel=1e-6
    )


def test_functions_of_predictions_and_metrics_of_torchmetrics_are_in_one_collection():
    pairs = list(batches((4,), 4))
    outputs, targets = joined(pairs)
    collection = torchmetrics.MetricCollection(
        {
            "accuracy": EnsembleMetric("accuracy"),
            "disagreement": EnsembleMetric(disagreement),
            "top": MeanPredictionMetric(MulticlassAccuracy(4, average="micro")),
            "f1": MeanPredictionMetric(MulticlassF1Score(4)),
        },
        prefix="val_",
    )
    for batch in pairs:
        collection.update(*batch)
    found = collection.compute()
    assert float(found["val_accuracy"]) == pytest.approx(float(found["val_top"]))
    mean = outputs.softmax(-1).mean(0)
    assert float(found["val_f1"]) == pytest.approx(float(MulticlassF1Score(4)(mean, targets)))
    assert float(found["val_disagreement"]) == pytest.approx(
        disagreement(enfold.Predictions.from_logits(outputs, targets)), rel=1e-6
    )
    collection.reset()
    assert not collection["accuracy"].values


def test_metrics_are_cloned_and_pickled_with_their_state():
    metric = EnsembleMetric("ece")
    for batch in batches((4,), 4):
        metric.update(*batch)
    for twin in (metric.clone(), pickle.loads(pickle.dumps(metric))):  # noqa: S301
        assert float(twin.compute()) == float(metric.compute())


def test_the_outputs_of_an_ensemble_need_no_gradient():
    ensemble = enfold.DeepEnsemble(lambda: nn.Linear(3, 4), 2)
    metric = EnsembleMetric("accuracy")
    metric.update(ensemble(torch.randn(6, 3)), torch.randint(4, (6,)))
    assert not metric.values[0].requires_grad


def run_process(rank: int, file: str, results) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    collection = make_collection("nll", "ece", "accuracy")
    for batch in list(batches((4,), 4))[rank::2]:  # of different sizes
        collection.update(*batch)
    results.put({name: float(value) for name, value in collection.compute().items()})
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_compute_the_metrics_of_all_examples(tmp_path):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=run_process, args=(rank, tmp_path / "store", results)) for rank in range(2)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    wanted = expected(*joined(list(batches((4,), 4))), enfold.tasks.as_task(None))
    for each in found:
        assert each == pytest.approx({name: wanted[name] for name in each}, rel=1e-6)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: EnsembleMetric("accuracy_"), "accuracy"),
        (lambda: EnsembleMetric("nll").compute(), "update"),
        (lambda: EnsembleMetric("nll").update(torch.randn(6, 4), torch.zeros(6).long()), "preds"),
        (lambda: EnsembleMetric("nll", members=False).update(torch.randn(2, 6, 4), torch.zeros(6).long()), "preds"),
        (lambda: EnsembleMetric("nll").update("outputs", torch.zeros(6).long()), "preds"),
        (lambda: MeanPredictionMetric("accuracy"), "metric"),
        (make_collection, "names"),
    ],
)
@pytest.mark.filterwarnings("ignore:The ``compute`` method:UserWarning")
def test_wrong_use_is_refused_by_name(make, name):
    with pytest.raises(EnfoldError, match=name):
        make()


def test_a_metric_of_another_task_is_refused():
    metric = EnsembleMetric("rmse")
    metric.update(torch.randn(2, 6, 4), torch.zeros(6).long())
    with pytest.raises(EnfoldError, match="metric"):
        metric.compute()


def test_a_missing_package_is_named_with_its_install_line(monkeypatch):
    monkeypatch.delitem(sys.modules, "enfold.integrations.torchmetrics")
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    with pytest.raises(MissingExtra, match=r"enfold\[torchmetrics\]"):
        import enfold.integrations.torchmetrics  # noqa: F401
