"""Calibrators undo what was done to calibrated predictions, and are never judged by what they were fitted on."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from enfold.errors import EnfoldError
from enfold.metrics import (
    MatrixScaler,
    TemperatureScaler,
    VectorScaler,
    accuracy,
    apply_temperature,
    ece,
    fit_temperature,
    nll,
)
from enfold.metrics.predictions import Predictions, mean_log_probs

SCALERS = (TemperatureScaler, VectorScaler, MatrixScaler)


def drawn(seed, N=3000, C=4, M=1):
    """Calibrated logits: labels are drawn from their softmax; members differ by a little noise."""
    draw = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(N, C, generator=draw, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(-1), 1, generator=draw)[:, 0]
    return logits + 0.5 * torch.randn(M, N, C, generator=draw, dtype=torch.float64) * (M > 1), labels


@pytest.mark.parametrize("scaler", SCALERS)
def test_overconfidence_is_undone(scaler):
    validation, test = ((3 * logits, labels) for logits, labels in (drawn(0), drawn(1)))
    fitted = scaler().fit(Predictions.from_logits(*validation))
    before, after = Predictions.from_logits(*test), fitted(Predictions.from_logits(*test))
    assert nll(after) < nll(before) - 0.1
    assert ece(after) < 0.03 < ece(before)
    if scaler is not MatrixScaler:
        assert fitted.weight.diagonal(dim1=1, dim2=2).mean().item() == pytest.approx(1 / 3, rel=0.1)


def test_each_map_fits_at_least_as_well_as_a_narrower_one():
    logits, labels = drawn(0)
    p = Predictions.from_logits(
        logits * torch.tensor([1.0, 2.0, 0.5, 1.0]) + torch.tensor([0.0, 1.0, 0.0, 0.0]), labels
    )
    losses = [nll(scaler().fit(p).apply(p)) for scaler in SCALERS]
    assert nll(p) > losses[0] > losses[1] > losses[2] - 1e-4
    assert losses[1] < losses[0] - 0.01


def test_the_matrix_is_logistic_regression_of_log_probabilities():
    logits, labels = drawn(2, N=600, C=3)
    p = Predictions.from_logits(2 * logits, labels)
    reference = LogisticRegression(C=np.inf, tol=1e-10, max_iter=5000).fit(p.log_probs[0].numpy(), labels.numpy())
    found = MatrixScaler(penalty=0).fit(p).apply(p).log_probs[0].exp().numpy()
    np.testing.assert_allclose(found, reference.predict_proba(p.log_probs[0].numpy()), atol=2e-5)


def test_where_the_members_are_averaged():
    logits, labels = drawn(0, M=3)
    others, other_labels = drawn(1, M=3)
    validation, p = Predictions.from_logits(3 * logits, labels), Predictions.from_logits(3 * others, other_labels)
    pooled = TemperatureScaler().fit(validation)
    torch.testing.assert_close(pooled(p).log_probs, apply_temperature(p, fit_temperature(validation)).log_probs)

    alone = TemperatureScaler("members").fit(validation)
    assert alone(p).num_members == 3
    temperatures = [fit_temperature(validation.member(m)) for m in range(3)]
    torch.testing.assert_close(alone(p).member(1).log_probs, apply_temperature(p.member(1), temperatures[1]).log_probs)

    mean = TemperatureScaler("logit_mean").fit(validation)
    by_logits = Predictions.from_logits(3 * logits.mean(0), labels)
    assert 1 / mean.weight[0, 0, 0].item() == pytest.approx(fit_temperature(by_logits))
    assert fit_temperature(alone.apply(validation)) < 0.95  # a mean of calibrated members is under-confident
    assert fit_temperature(pooled.apply(validation)) == pytest.approx(1)


def test_a_temperature_leaves_the_classes():
    logits, labels = drawn(3, M=2)
    p = Predictions.from_logits(logits, labels)
    for fit_on in ("ensemble", "logit_mean"):
        scaled = TemperatureScaler(fit_on).fit(p).apply(p)
        before = p.mean() if fit_on == "ensemble" else Predictions.from_logits(logits.mean(0), labels)
        assert accuracy(scaled) == accuracy(before)


def test_classes_of_probability_zero_stay_finite():
    log_probs = torch.tensor([[0.7, 0.3, 0.0], [0.2, 0.8, 0.0], [0.5, 0.5, 0.0], [0.1, 0.9, 0.0]]).log()[None]
    p = Predictions(log_probs, torch.tensor([0, 1, 1, 0]))
    fitted = MatrixScaler().fit(p)
    assert fitted.apply(p).log_probs.isfinite().all()
    assert mean_log_probs(fitted.apply(p).log_probs)[:, 2].max() < -50


@pytest.mark.parametrize("scaler", SCALERS)
def test_the_test_set_is_no_calibration_set(scaler):
    p = Predictions.from_logits(*drawn(0, N=200))
    fitted = scaler().fit(p)
    copy = Predictions(p.log_probs.clone(), p.labels.clone())
    for same in (p, copy, Predictions(p.log_probs[:, 100:], p.labels[100:])):
        with pytest.raises(EnfoldError, match="other examples"):
            fitted(same)
    other = Predictions.from_logits(*drawn(1, N=200))
    assert len(fitted(other)) == 200


def test_invalid_options_are_refused():
    p = Predictions.from_logits(*drawn(0, N=50))
    with pytest.raises(EnfoldError, match="fit_on"):
        TemperatureScaler("mean").fit(p)
    with pytest.raises(EnfoldError, match=r"penalty .* -1"):
        MatrixScaler(penalty=-1).fit(p)
    with pytest.raises(EnfoldError, match="members and classes"):
        VectorScaler().fit(p)(Predictions.from_logits(*drawn(0, C=3)))
