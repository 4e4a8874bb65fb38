"""Multi-label classification against binary cross-entropy and scikit-learn."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    brier_score_loss,
    f1_score,
    log_loss,
)
from torchmetrics.functional.classification import binary_calibration_error

from enfold.errors import EnfoldError, UnsupportedOutput
from enfold.metrics import (
    MultilabelPredictions,
    average_precision,
    exact_match,
    f1,
    gibbs_label_nll,
    label_accuracy,
    label_brier,
    label_ece,
    label_nll,
    mean_average_precision,
    metrics_for,
    micro_average_precision,
    micro_f1,
)
from enfold.tasks.multilabel import Multilabel

KINDS = [torch.int64, torch.uint8, torch.bool, torch.float32]


def batch(M=3, B=40, L=5, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(M, B, L, generator=rng), (torch.rand(B, L, generator=rng) < 0.4).long()


def predictions(outputs, targets, **options):
    task = Multilabel(**options).resolve(outputs, targets)
    return task.predictions(task.flatten(outputs, targets))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_loss_is_the_binary_cross_entropy_of_all_labels(kind):
    outputs, targets = batch()
    task = Multilabel().resolve(outputs, targets.to(kind))
    assert task.num_labels == 5
    expected = [F.binary_cross_entropy_with_logits(one, targets.float()) for one in outputs]
    torch.testing.assert_close(task.loss(task.flatten(outputs, targets.to(kind))), torch.stack(expected))
    smooth = [F.binary_cross_entropy_with_logits(one, targets * 0.8 + 0.1) for one in outputs]
    torch.testing.assert_close(task.loss(task.flatten(outputs, targets), 0.2), torch.stack(smooth))


def test_unknown_labels_are_not_trained():
    outputs, targets = batch()
    unknown = torch.rand(targets.shape, generator=torch.Generator().manual_seed(1)) < 0.3
    expected = F.binary_cross_entropy_with_logits(outputs[1][~unknown], targets[~unknown].float())
    for task, given in [
        (Multilabel(), targets.masked_fill(unknown, -100)),
        (Multilabel(ignore_index=-1), targets.masked_fill(unknown, -1)),
        (Multilabel(ignore_nan=True), targets.float().masked_fill(unknown, torch.nan)),
    ]:
        found = task.resolve(outputs, given)
        torch.testing.assert_close(found.loss(found.flatten(outputs, given))[1], expected)
        with pytest.raises(EnfoldError, match="must have a label that is known"):
            found.flatten(outputs, given.masked_fill(torch.ones_like(unknown), given[unknown][0]))
    with pytest.raises(EnfoldError, match=r"targets must be 0 or 1.*nan.*ignore_nan=True"):
        Multilabel().flatten(outputs, targets.float().masked_fill(unknown, torch.nan))


def test_own_batches_weights_and_unknown_labels():
    outputs, _ = batch()
    targets = torch.stack([batch(seed=seed)[1] for seed in range(3)])
    targets[0, :5] = -100
    task = Multilabel(class_weights=(1.0, 3.0)).resolve(outputs, targets, own=True)
    found = task.loss(task.flatten(outputs, targets, own=True))
    for one, own, loss in zip(outputs, targets, found, strict=True):
        known = own >= 0
        weight = torch.where(own == 1, 3.0, 1.0)[known]
        each = F.binary_cross_entropy_with_logits(one[known], own[known].float(), reduction="none")
        torch.testing.assert_close(loss, (weight * each).sum() / weight.sum())


def test_predictions_have_the_shape_of_the_labels():
    outputs, _ = batch()
    found = Multilabel().predict(outputs)
    p = torch.sigmoid(outputs.double())
    mean = p.mean(0)

    def entropy(q):
        return -(q * q.log() + (1 - q) * (1 - q).log())

    torch.testing.assert_close(found.mean, mean.float())
    torch.testing.assert_close(found.members, p.float())
    torch.testing.assert_close(found.total, entropy(mean).float())
    torch.testing.assert_close(found.aleatoric, entropy(p).mean(0).float())
    torch.testing.assert_close(found.epistemic, (entropy(mean) - entropy(p).mean(0)).float(), atol=1e-6, rtol=1e-4)
    assert found.class_axis is None
    with pytest.raises(EnfoldError, match="classes"):
        _ = found.classes


def test_labels_of_positions():
    outputs, targets = torch.randn(2, 3, 4, 5, 6), torch.randint(2, (3, 4, 5, 6))
    task = Multilabel().resolve(outputs, targets)
    expected = [F.binary_cross_entropy_with_logits(one, targets.float()) for one in outputs]
    rows = task.flatten(outputs, targets)
    torch.testing.assert_close(task.loss(rows), torch.stack(expected))
    p = task.predictions(rows)
    for index, (probs, labels) in enumerate(p.by_label()):
        torch.testing.assert_close(probs.float(), torch.sigmoid(outputs).mean(0)[:, index].flatten())
        assert torch.equal(labels, targets[:, index].flatten())


def test_metrics_agree_with_scikit_learn():
    outputs, targets = batch(B=300)
    p = predictions(outputs, targets)
    probs, y = torch.sigmoid(outputs.double()).mean(0).numpy(), targets.numpy()
    labels = range(5)
    assert label_nll(p) == pytest.approx(np.mean([log_loss(y[:, k], probs[:, k]) for k in labels]), rel=1e-6)
    assert label_brier(p) == pytest.approx(np.mean([brier_score_loss(y[:, k], probs[:, k]) for k in labels]), rel=1e-6)
    assert mean_average_precision(p) == pytest.approx(average_precision_score(y, probs), rel=1e-9)
    assert micro_average_precision(p) == pytest.approx(average_precision_score(y, probs, average="micro"), rel=1e-9)
    assert exact_match(p) == pytest.approx(accuracy_score(y, probs > 0.5))
    assert label_accuracy(p) == pytest.approx((y == (probs > 0.5)).mean())
    assert f1(p) == pytest.approx(f1_score(y, probs > 0.5, average="macro"))
    assert micro_f1(p) == pytest.approx(f1_score(y, probs > 0.5, average="micro"))
    errors = [
        binary_calibration_error(torch.tensor(probs[:, k].copy()), targets[:, k].contiguous(), n_bins=15, norm="l1")
        for k in labels
    ]
    assert label_ece(p) == pytest.approx(torch.stack(errors).mean().item(), rel=1e-5)
    single = [F.binary_cross_entropy_with_logits(one, targets.float()).item() for one in outputs]
    assert gibbs_label_nll(p) == pytest.approx(sum(single) / 3, rel=1e-5)


def test_metrics_of_unknown_labels():
    outputs, targets = batch(B=300)
    unknown = torch.rand(targets.shape, generator=torch.Generator().manual_seed(1)) < 0.3
    p = predictions(outputs, targets.masked_fill(unknown, -100))
    probs, known = torch.sigmoid(outputs.double()).mean(0), ~unknown
    columns = [(targets[known[:, k], k].numpy(), probs[known[:, k], k].numpy()) for k in range(5)]
    assert mean_average_precision(p) == pytest.approx(np.mean([average_precision_score(y, q) for y, q in columns]))
    assert f1(p) == pytest.approx(np.mean([f1_score(y, q > 0.5) for y, q in columns]))
    assert label_nll(p) == pytest.approx(log_loss(targets[known].numpy(), probs[known].numpy()), rel=1e-6)
    correct = ((probs > 0.5) == targets) | unknown
    some = known.any(1)
    assert exact_match(p) == pytest.approx(correct.all(1)[some].double().mean().item())
    assert label_accuracy(p) == pytest.approx(((probs > 0.5) == targets)[known].double().mean().item())


def test_labels_without_positives_are_left_out():
    outputs, targets = batch(B=300)
    targets[:, 2] = 0
    outputs[..., 2] = -5.0
    p = predictions(outputs, targets)
    kept = [0, 1, 3, 4]
    probs, y = torch.sigmoid(outputs.double()).mean(0)[:, kept].numpy(), targets[:, kept].numpy()
    assert mean_average_precision(p) == pytest.approx(average_precision_score(y, probs))
    assert f1(p) == pytest.approx(f1_score(y, probs > 0.5, average="macro"))
    none = predictions(outputs, torch.zeros_like(targets))
    assert math.isnan(mean_average_precision(none))
    assert math.isnan(micro_average_precision(none))


def test_ties_are_one_threshold():
    scores, labels = torch.tensor([0.9, 0.5, 0.5, 0.5, 0.1]), torch.tensor([1, 0, 1, 1, 0])
    assert average_precision(scores, labels) == pytest.approx(average_precision_score(labels, scores))
    flipped = average_precision(scores.flip(0), labels.flip(0))
    assert flipped == average_precision(scores, labels)


def test_members_and_their_mean():
    outputs, targets = batch()
    p = predictions(outputs, targets)
    assert isinstance(p.mean(), MultilabelPredictions)
    assert p.member(1).num_labels == p.subset([0, 2]).num_labels == 5
    for name, metric in metrics_for(p).items():
        value = metric(p)
        assert math.isfinite(value), name
        assert metric(p.mean()) == pytest.approx(value, rel=1e-5) or name == "gibbs_nll"


def test_wrong_shapes_are_refused():
    for outputs, targets in [((2, 6, 4), (6,)), ((2, 6, 4), (6, 3)), ((2, 6), (6,))]:
        with pytest.raises(UnsupportedOutput, match="one logit per label"):
            Multilabel().resolve(torch.zeros(outputs), torch.zeros(targets).long())
    with pytest.raises(UnsupportedOutput, match="num_labels"):
        Multilabel(num_labels=3).resolve(torch.zeros(2, 6, 4), torch.zeros(6, 4).long())
    with pytest.raises(EnfoldError, match=r"targets must be 0 or 1.*got 2"):
        Multilabel().flatten(torch.zeros(2, 6, 4), torch.full((6, 4), 2))
    with pytest.raises(EnfoldError, match="class_weights"):
        Multilabel(class_weights=(1.0, 1.0, 1.0)).flatten(torch.zeros(2, 6, 4), torch.zeros(6, 4).long())
    task = Multilabel()
    with pytest.raises(EnfoldError, match="num_labels must be known"):
        task.predictions(task.flatten(torch.zeros(2, 6, 4), torch.zeros(6, 4).long()))
    log_probs = torch.zeros(1, 7, 2).log_softmax(-1)
    with pytest.raises(EnfoldError, match="num_labels=2"):
        MultilabelPredictions(log_probs, torch.zeros(7).long(), 2)
    with pytest.raises(EnfoldError, match="must contain known ones"):
        MultilabelPredictions(log_probs, torch.full((7,), -100), 7)
