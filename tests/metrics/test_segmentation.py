"""Overlap of regions against torchmetrics and loops."""

import math

import pytest
import torch
from torchmetrics.functional.classification import multiclass_jaccard_index
from torchmetrics.functional.segmentation import dice_score

from enfold.metrics import (
    METRICS,
    DensePredictions,
    accuracy,
    calibration,
    class_dice,
    class_iou,
    confusion,
    dice,
    distributions,
    mean_iou,
    metrics_for,
    segmentation,
)


def dense(M=3, N=500, C=5, seed=0):
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(C, (N,), generator=rng)
    logits = torch.randn(M, N, C, generator=rng) + 2 * torch.nn.functional.one_hot(labels, C)
    return DensePredictions.from_logits(logits, labels)


def test_overlap_agrees_with_torchmetrics():
    p = dense()
    predicted = p.log_probs.exp().mean(0).argmax(-1)
    expected = multiclass_jaccard_index(predicted, p.labels, num_classes=5, average="none")
    torch.testing.assert_close(class_iou(p).float(), expected)
    assert mean_iou(p) == pytest.approx(expected.mean().item(), rel=1e-6)
    expected = dice_score(predicted[None], p.labels[None], 5, average="none", input_format="index")[0]
    torch.testing.assert_close(class_dice(p).float(), expected)
    assert dice(p) == pytest.approx(expected.mean().item(), rel=1e-6)
    assert accuracy(p) == pytest.approx(confusion(p).diagonal().sum().item() / 500)


def test_confusion_in_a_loop(monkeypatch):
    p = dense(C=4)
    predicted = p.log_probs.exp().mean(0).argmax(-1)
    expected = torch.zeros(4, 4, dtype=torch.long)
    for label, guess in zip(p.labels, predicted, strict=True):
        expected[label, guess] += 1
    assert torch.equal(confusion(p), expected)
    monkeypatch.setattr(segmentation, "_AT_ONCE", 100)  # several blocks
    assert torch.equal(confusion(p), expected)


def test_classes_that_are_not_present_are_left_out():
    log_probs = torch.tensor([[0.9, 0.1, 0.0], [0.9, 0.1, 0.0], [0.2, 0.8, 0.0], [0.2, 0.8, 0.0]]).log().clamp(min=-50)
    p = DensePredictions.from_logits(log_probs, torch.tensor([0, 1, 1, 1]))
    assert class_iou(p).tolist()[:2] == [1 / 2, 2 / 3]
    assert math.isnan(class_iou(p)[2])
    assert mean_iou(p) == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert dice(p) == pytest.approx((2 / 3 + 4 / 5) / 2)


def test_dense_predictions_have_all_metrics_of_classes_and_the_overlap():
    p = dense()
    table = metrics_for(p)
    assert table.keys() == METRICS.keys() | {"miou", "dice"}
    assert {*p.headline, p.score, p.criterion} <= table.keys()
    for one in (p.mean(), p.member(0), p.subset([0, 2])):
        assert isinstance(one, DensePredictions)
    assert mean_iou(p.mean()) == pytest.approx(mean_iou(p))


def test_blocks_of_rows_do_not_change_a_metric(monkeypatch):
    p = dense()
    expected = {name: metric(p) for name, metric in metrics_for(p).items()}
    monkeypatch.setattr(distributions, "AT_ONCE", 400)
    monkeypatch.setattr(calibration, "AT_ONCE", 1200)
    assert {name: metric(p) for name, metric in metrics_for(p).items()} == pytest.approx(expected, rel=1e-14)
