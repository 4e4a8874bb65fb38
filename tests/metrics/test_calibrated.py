"""Calibrated scores of every kind of predictions, and the scores of evaluate.py that do not depend on the task."""

import math

import pytest
import torch
import torch.nn.functional as F
from scipy import optimize

from enfold.errors import EnfoldError
from enfold.evaluate import Row, _gain, mean_member_score, recovered_fraction, score, shown
from enfold.metrics import (
    DensePredictions,
    GaussianPredictions,
    MultilabelPredictions,
    PointPredictions,
    Predictions,
    QuantilePredictions,
    apply_scale,
    apply_temperature,
    calibrated_scores,
    crps,
    density_nll,
    fit_scale,
    fit_temperature,
    label_nll,
    metrics_for,
    nll,
    rmse,
)


def of_classes(kind=Predictions, seed=0, N=300, sure=3.0):
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (N,), generator=rng)
    logits = sure * (torch.randn(3, N, 4, generator=rng) + F.one_hot(labels, 4))
    return kind.from_logits(logits, labels)


def of_labels(seed=0, N=100, sure=3.0):
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (3 * N,), generator=rng)
    logits = sure * (torch.randn(2, 3 * N, generator=rng) + 2 * labels - 1)
    both = torch.stack([torch.zeros_like(logits), logits], -1).log_softmax(-1)
    return MultilabelPredictions(both, labels.masked_fill(torch.arange(3 * N) % 7 == 0, -100), 3)


def of_numbers(kind, seed=0, N=200):
    rng = torch.Generator().manual_seed(seed)
    targets = torch.randn(N, generator=rng)
    means = targets + torch.randn(3, N, generator=rng)
    if kind is PointPredictions:
        return PointPredictions(means, targets)
    if kind is GaussianPredictions:
        return GaussianPredictions(means, targets, torch.full_like(means, 0.2))
    return QuantilePredictions(torch.stack([means - 0.1, means, means + 0.1], -1), targets, (0.1, 0.5, 0.9))


MAKE = [
    of_classes,
    lambda seed=0: of_classes(DensePredictions, seed),
    of_labels,
    lambda seed=0: of_numbers(PointPredictions, seed),
    lambda seed=0: of_numbers(GaussianPredictions, seed),
    lambda seed=0: of_numbers(QuantilePredictions, seed),
]


@pytest.mark.parametrize("make", MAKE)
def test_scores_are_the_metrics_of_the_kind(make):
    test, validation = make(seed=1), make(seed=2)
    plain, full = score(test), score(test, validation)
    assert plain == {name: metric(test) for name, metric in metrics_for(test).items()}
    is_number = "rmse" in plain
    added = {"scale", "cnll", "ccrps", "ccoverage_90"} if is_number else {"temperature", "cnll", "cece", "cbrier"}
    assert full.keys() - plain.keys() == added
    assert all(math.isfinite(value) for value in full.values())
    mean = mean_member_score(test, validation)
    assert mean.keys() == full.keys()
    assert mean[test.criterion] == pytest.approx(plain[f"gibbs_{test.criterion}"])


def test_the_temperature_of_labels_is_fitted_on_those_that_are_known():
    test, validation = of_labels(1), of_labels(2)
    found = calibrated_scores(test, validation)
    known = validation.known()
    log_odds = known.log_probs.double().exp().mean(0).log() @ torch.tensor([-1.0, 1.0]).double()

    def loss(log_temperature):
        return F.binary_cross_entropy_with_logits(log_odds / math.exp(log_temperature), known.labels.double()).item()

    expected = math.exp(optimize.minimize_scalar(loss, bracket=(0, 1)).x)
    assert found["temperature"] == pytest.approx(expected, rel=1e-4)
    scaled = apply_temperature(test, found["temperature"])
    assert isinstance(scaled, MultilabelPredictions)
    assert found["cnll"] == label_nll(scaled)
    assert found["cnll"] < label_nll(test)


@pytest.mark.parametrize("kind", [Predictions, DensePredictions])
def test_calibrated_scores_of_classes(kind):
    test, validation = of_classes(kind, 1), of_classes(kind, 2)
    found = calibrated_scores(test, validation)
    assert found["temperature"] == fit_temperature(validation)
    assert found["cnll"] == pytest.approx(nll(apply_temperature(test, found["temperature"])))
    assert type(apply_temperature(test, 2.0)) is kind


@pytest.mark.parametrize("kind", [PointPredictions, GaussianPredictions, QuantilePredictions])
def test_calibrated_scores_of_numbers(kind):
    test, validation = of_numbers(kind, 1), of_numbers(kind, 2)
    found = calibrated_scores(test, validation)
    scaled = apply_scale(test, fit_scale(validation))
    assert found == {
        "scale": fit_scale(validation),
        "cnll": density_nll(scaled),
        "ccrps": crps(scaled),
        "ccoverage_90": metrics_for(scaled)["coverage_90"](scaled),
    }
    assert found["ccoverage_90"] == pytest.approx(0.9, abs=0.07)


def test_predictions_of_two_tasks_are_refused():
    with pytest.raises(EnfoldError, match="predictions of one task"):
        calibrated_scores(of_classes(), of_numbers(PointPredictions))
    for make in MAKE:
        with pytest.raises(EnfoldError, match="other examples"):
            calibrated_scores(make(seed=1), make(seed=1))


@pytest.mark.parametrize("make", MAKE)
def test_the_gain_recovered_in_the_criterion(make):
    """1 for the ensemble, 0 for a mean member, whatever the task."""
    p = make(seed=1)
    assert _gain(score(p), p, p.criterion) == pytest.approx(1)
    members = [_gain(score(p.member(m)), p, p.criterion) for m in range(p.num_members)]
    assert sum(members) / len(members) == pytest.approx(0, abs=1e-6)
    assert recovered_fraction(score(p), mean_member_score(p), score(p), p.criterion) == pytest.approx(1)


def test_the_gain_of_a_point_student_is_that_in_squared_error():
    ensemble, student = of_numbers(GaussianPredictions), of_numbers(PointPredictions).mean()
    assert _gain(score(student), ensemble, student.criterion) == pytest.approx(1)  # the same mean
    with pytest.raises(EnfoldError, match="reference must be an ensemble for the same task"):
        _gain(score(student), of_classes(), student.criterion)


def test_a_row_of_a_regression():
    p = of_numbers(GaussianPredictions)
    scores = score(p)
    row = Row("five networks", scores, 0.5, p.headline)
    assert str(row) == (
        f"five networks: rmse {scores['rmse']:.4f}  nll {scores['nll']:.4f}  crps {scores['crps']:.4f}  "
        f"coverage_90 {100 * scores['coverage_90']:.2f} %  gain recovered 50 %"
    )
    assert shown("miou", 0.5) == "50.00 %"
    assert shown("rmse", rmse(p)) == f"{rmse(p):.4f}"
