import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from enfold.errors import EnfoldError
from enfold.metrics import accuracy, apply_temperature, brier, ece, evaluate_calibrated, fit_temperature, nll
from enfold.metrics.predictions import Predictions
from enfold.metrics.temperature import HOTTEST

prop = settings(deadline=None, derandomize=True, max_examples=25)


def sampled(N=2000, M=1, C=5, seed=0, temperature=1.0):
    """Labels drawn from softmax(z), predictions softmax(z T): too sure by the factor T; noisy members."""
    rng = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(N, C, generator=rng, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(-1), 1, generator=rng)[:, 0]
    noise = 0.5 * torch.randn(M, N, C, generator=rng, dtype=torch.float64) if M > 1 else 0.0
    return Predictions.from_logits((logits[None] + noise) * temperature, labels)


@pytest.mark.parametrize("temperature", [0.01, 0.3, 1.0, 2.5, 100.0])
def test_finds_the_planted_temperature(temperature):
    assert fit_temperature(sampled(N=20_000, temperature=temperature)) == pytest.approx(temperature, rel=0.05)


@pytest.mark.parametrize("factor", [0.5, 2.0, 0.001, 1000.0])
def test_scaling_the_logits_scales_the_temperature(factor):
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 300, 4, generator=rng, dtype=torch.float64)
    labels = torch.multinomial(logits[0].softmax(-1), 1, generator=rng)[:, 0]
    once = fit_temperature(Predictions.from_logits(logits, labels))
    scaled = fit_temperature(Predictions.from_logits(logits * factor, labels))
    assert scaled == pytest.approx(once * factor, rel=1e-6)


def test_agrees_with_a_direct_minimisation():
    p = sampled(N=500, M=4, temperature=3.0)
    direct = minimize_scalar(
        lambda log_t: nll(apply_temperature(p, math.exp(log_t))),
        bounds=(-3, 3),
        method="bounded",
        options={"xatol": 1e-9},
    )
    assert fit_temperature(p) == pytest.approx(math.exp(direct.x), rel=1e-6)


def test_averages_before_tempering():
    p = sampled(M=3)
    hot = apply_temperature(p, 2.0)
    assert hot.num_members == 1
    mean = p.log_probs.exp().mean(0)
    torch.testing.assert_close(hot.log_probs[0].exp(), mean.sqrt() / mean.sqrt().sum(-1, keepdim=True))


def test_a_temperature_of_one_changes_nothing():
    p = sampled(M=3)
    torch.testing.assert_close(apply_temperature(p, 1.0).log_probs, p.mean().log_probs)


@prop
@given(p=st.from_type(Predictions), temperature=st.floats(0.05, 20))
def test_accuracy_does_not_depend_on_the_temperature(p, temperature):
    assert accuracy(apply_temperature(p, temperature)) == accuracy(p)


@prop
@given(p=st.from_type(Predictions))
def test_no_other_temperature_fits_better(p):
    assume(math.isfinite(nll(p)))
    best = fit_temperature(p)
    fitted = nll(apply_temperature(p, best))
    assert fitted <= nll(p) + 1e-12
    mean = p.mean().log_probs[0]
    if (mean.gather(1, p.labels[:, None])[:, 0] < mean.max(1).values - 1e-3).any():  # else T = 1 is kept
        for other in (0.9 * best, min(1.1 * best, HOTTEST), 0.1, 10.0):
            assert fitted <= nll(apply_temperature(p, other)) + 1e-9


def test_without_an_error_nothing_is_tempered():
    right = Predictions.from_logits(torch.tensor([[[2.0, 0.0], [0.0, 1.0]]]), torch.tensor([0, 1]))
    uniform = Predictions.from_logits(torch.zeros(3, 4, 7), torch.tensor([0, 1, 2, 6]))
    certain = Predictions(torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]).log(), torch.tensor([0, 1]))
    tied = Predictions.from_logits(torch.tensor([[[2.0, 2.0, 0.0]], [[2.0, 2.0, 1.0]]]), torch.tensor([1]))
    assert [fit_temperature(p) for p in (right, uniform, certain, tied)] == [1.0, 1.0, 1.0, 1.0]


def test_ties_up_to_rounding_are_ties():
    probs = torch.tensor([[0.3, 0.6, 0.1], [0.6, 0.1, 0.3], [0.1, 0.3, 0.6]], dtype=torch.float64)
    for label in range(3):  # p̄ is uniform up to the last bit
        assert fit_temperature(Predictions(probs.log()[:, None], torch.tensor([label]))) == 1.0


def test_predictions_worse_than_chance_become_uniform():
    p = Predictions.from_logits(torch.tensor([[[3.0, 0.0], [0.0, 2.0]]]), torch.tensor([1, 0]))
    assert nll(apply_temperature(p, fit_temperature(p))) == pytest.approx(math.log(2), abs=1e-5)


def test_classes_of_probability_zero_are_preserved():
    probs = torch.tensor([[[0.9, 0.1, 0.0], [0.6, 0.4, 0.0], [0.8, 0.2, 0.0]]], dtype=torch.float64)
    p = Predictions(probs.log(), torch.tensor([0, 1, 0]))
    T = fit_temperature(p)
    assert math.isfinite(T)
    assert (apply_temperature(p, T).log_probs[..., 2] == -math.inf).all()


def test_a_label_of_probability_zero_remains_infinite():
    p = Predictions(torch.tensor([[[1.0, 0.0], [0.5, 0.5]]]).log(), torch.tensor([1, 0]))
    with pytest.raises(EnfoldError, match=r"validation .*got 1"):
        fit_temperature(p)


def test_calibrated_metrics_use_the_validation_temperature():
    validation, test = sampled(seed=0, temperature=4.0), sampled(seed=1, temperature=4.0)
    at_fitted = apply_temperature(test, fit_temperature(validation))
    for metric in (nll, ece, brier):
        assert evaluate_calibrated(metric, test, validation) == metric(at_fitted)
        assert evaluate_calibrated(metric, test, validation) < metric(test)
    assert evaluate_calibrated(accuracy, test, validation) == accuracy(test)


def test_validation_must_not_be_test():
    p = sampled(N=60, M=2)
    halves = [Predictions(p.log_probs[:, half], p.labels[half]) for half in (slice(30), slice(30, 60))]
    for same in (
        p,
        Predictions(p.log_probs, p.labels),
        Predictions(p.log_probs.clone(), p.labels.clone()),
        Predictions(p.log_probs.float().double(), p.labels),
        halves[0],
        halves[1],
        Predictions(p.log_probs[:, 20:50], p.labels[20:50].clone()),
    ):
        with pytest.raises(EnfoldError, match="validation"):
            evaluate_calibrated(nll, p, same)
    assert math.isfinite(evaluate_calibrated(nll, halves[0], halves[1]))  # disjoint slices of one tensor


def test_validation_must_come_from_the_same_ensemble():
    with pytest.raises(EnfoldError, match="members and classes"):
        evaluate_calibrated(nll, sampled(M=2), sampled(M=3, seed=1))


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_a_bad_temperature_is_refused(temperature):
    with pytest.raises(EnfoldError, match="temperature"):
        apply_temperature(sampled(N=3), temperature)
