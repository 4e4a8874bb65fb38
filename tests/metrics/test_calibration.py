import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.functional.classification import multiclass_calibration_error

from enfold.errors import EnfoldError
from enfold.metrics import (
    FewExamplesWarning,
    ace,
    adaptive_ece,
    classwise_ece,
    debiased_ece,
    ece,
    mce,
    reliability,
    tace,
)
from enfold.metrics.predictions import Predictions

prop = settings(deadline=None, derandomize=True, max_examples=25)


def of_confidence(confidence, correct, dtype=torch.float64):
    """Two classes, the first always predicted: confidences of 0.5 and above, and whether each is right."""
    first = torch.tensor(confidence, dtype=torch.float64)
    log_probs = torch.stack([first, 1 - first], dim=-1).log().to(dtype)
    return Predictions(log_probs[None], 1 - torch.tensor(correct).long())


def calibrated_sampler(N, C=5, seed=0, scale=1.5):
    """Labels drawn from the very probabilities that are predicted."""
    rng = torch.Generator().manual_seed(seed)
    log_probs = (scale * torch.randn(N, C, generator=rng, dtype=torch.float64)).log_softmax(-1)
    return Predictions(log_probs[None], torch.multinomial(log_probs.exp(), 1, generator=rng)[:, 0])


def random_predictions(N=500, C=6, seed=0):
    rng = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(3, N, C, generator=rng, dtype=torch.float64)
    return Predictions.from_logits(logits, torch.randint(C, (N,), generator=rng))


def slow_ece(confidence, hits, uppers):
    """A loop over bins (lo, hi], the first one with its lower end."""
    total, lo = 0.0, -math.inf
    for hi in uppers:
        inside = (confidence > lo) & (confidence <= hi)
        if inside.any():
            total += inside.sum() * abs(hits[inside].mean() - confidence[inside].mean())
        lo = max(lo, hi)
    return total / len(confidence)


def equal_width(bins):
    return [(b + 1) / bins + 1e-6 for b in range(bins)]


def equal_mass(confidence, bins):
    ordered = np.sort(confidence)
    return [ordered[math.ceil(len(ordered) * b / bins) - 1] for b in range(1, bins + 1)]


def top_label(p):
    probs = p.log_probs.exp().mean(0).numpy()
    return probs.max(1), (probs.argmax(1) == p.labels.numpy()).astype(float)


def test_three_examples_by_hand():
    p = of_confidence([0.9, 0.8, 0.55], [True, False, True])
    r = reliability(p, bins=5)
    assert r.counts.tolist() == [0, 0, 1, 1, 1]  # 0.8 lies in (0.6, 0.8]
    assert r.accuracy.tolist() == [0, 0, 1, 0, 1]
    torch.testing.assert_close(r.confidence, torch.tensor([0, 0, 0.55, 0.8, 0.9], dtype=torch.float64))
    assert ece(p, bins=5) == pytest.approx((0.45 + 0.8 + 0.1) / 3)
    assert mce(p, bins=5) == pytest.approx(0.8)
    assert ece(p, bins=1) == pytest.approx(abs(2 / 3 - 2.25 / 3))
    assert adaptive_ece(p, bins=2) == pytest.approx((abs(1 - 1.35) + 0.1) / 3)  # {0.55, 0.8}, {0.9}


def test_classwise_by_hand():
    p = of_confidence([0.9, 0.6], [True, False])  # class 0: 0.9 hit, 0.6 miss; class 1: 0.1 miss, 0.4 hit
    assert classwise_ece(p, bins=2) == pytest.approx((abs(1 - 1.5) / 2 + abs(1 - 0.5) / 2) / 2)
    assert classwise_ece(p, bins=10) == pytest.approx((0.1 + 0.6 + 0.1 + 0.6) / 4)
    assert ace(p, bins=2) == pytest.approx((0.1 + 0.6 + 0.1 + 0.6) / 4)
    assert tace(p, bins=2, threshold=0.5) == pytest.approx(((0.1 + 0.6) / 2 + 0) / 2)
    assert tace(p, bins=2, threshold=0.3) == pytest.approx(((0.1 + 0.6) / 2 + 0.6) / 2)


@pytest.mark.parametrize("bins", [1, 10, 15, 33])
@pytest.mark.parametrize("seed", [0, 1])
def test_agrees_with_torchmetrics(bins, seed):
    p = random_predictions(seed=seed)
    probs = p.log_probs.exp().mean(0)
    for metric, norm in ((ece, "l1"), (mce, "max")):
        expected = multiclass_calibration_error(probs, p.labels, num_classes=6, n_bins=bins, norm=norm)
        assert metric(p, bins) == pytest.approx(expected.item(), abs=2e-6)


@pytest.mark.parametrize("bins", [1, 7, 15])
def test_agrees_with_a_loop(bins):
    p = random_predictions(seed=2)
    confidence, hits = top_label(p)
    assert ece(p, bins) == pytest.approx(slow_ece(confidence, hits, equal_width(bins)), rel=1e-9)
    assert adaptive_ece(p, bins) == pytest.approx(slow_ece(confidence, hits, equal_mass(confidence, bins)), rel=1e-9)


@pytest.mark.parametrize("bins", [1, 7, 15])
def test_classwise_agrees_with_a_loop(bins):
    p = random_predictions(seed=3)
    probs, labels = p.log_probs.exp().mean(0).numpy(), p.labels.numpy()
    columns = [(probs[:, k], (labels == k).astype(float)) for k in range(6)]
    assert classwise_ece(p, bins) == pytest.approx(
        np.mean([slow_ece(c, h, equal_width(bins)) for c, h in columns]), rel=1e-9
    )
    assert ace(p, bins) == pytest.approx(np.mean([slow_ece(c, h, equal_mass(c, bins)) for c, h in columns]), rel=1e-9)
    kept = [(c[c > 0.05], h[c > 0.05]) for c, h in columns]
    assert tace(p, bins, threshold=0.05) == pytest.approx(
        np.mean([slow_ece(c, h, equal_mass(c, bins)) for c, h in kept]), rel=1e-9
    )


@pytest.mark.parametrize("bins", [1, 2, 15, 100])
def test_certainty_is_in_the_last_bin(bins):
    r = reliability(of_confidence([1.0, 1.0, 0.5], [True, False, True]), bins)
    assert len(r.counts) == bins
    assert len(r.edges) == bins + 1
    assert r.counts.sum() == 3
    assert r.counts[-1] == (2 if bins > 1 else 3)


def test_rounding_above_one_makes_no_further_bin():
    logits = torch.tensor([[[40.0, 0.0, 0.0]], [[40.0, 0.1, 0.2]], [[39.0, 0.3, 0.1]]])
    r = reliability(Predictions.from_logits(logits, torch.tensor([0])), 15)
    assert r.counts.tolist() == [0] * 14 + [1]
    assert r.confidence.max() <= 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bins", [10, 15, 20])
def test_a_confidence_on_an_edge_is_in_the_lower_bin(bins, dtype):
    edges = range(bins // 2 + 1, bins)
    r = reliability(of_confidence([k / bins for k in edges], [True] * len(edges), dtype), bins)
    assert r.counts.tolist() == [0] * (bins // 2) + [1] * len(edges) + [0]


def test_equal_mass_is_equal():
    r = reliability(random_predictions(N=105), 10, "mass")
    assert set(r.counts.tolist()) == {10, 11}
    assert (r.edges.diff() > 0).all()


def test_equal_confidences_share_a_bin():
    p = of_confidence([0.7] * 6 + [0.9] * 2, [True] * 8)
    assert reliability(p, 4, "mass").counts.tolist() == [6, 0, 0, 2]


def test_empty_bins_are_zero():
    r = reliability(of_confidence([0.9], [False]), 15)
    for values in (r.accuracy, r.confidence, r.gap, r.weights):
        assert values.isfinite().all()
    assert r.gap.nonzero().flatten().tolist() == [13]
    assert r.gap[13] == pytest.approx(0.9)


@pytest.mark.slow
def test_a_calibrated_sampler_has_no_error_in_the_limit():
    for metric in (ece, adaptive_ece, classwise_ece, ace, tace):
        few, many = (metric(calibrated_sampler(N)) for N in (300, 100_000))
        assert many < 0.01 < few
    assert debiased_ece(calibrated_sampler(100_000)) < 0.005


def test_debiasing_removes_most_of_the_bias():
    samples = [calibrated_sampler(300, seed=seed) for seed in range(30)]
    plain = sum(ece(p) for p in samples) / 30
    debiased = sum(debiased_ece(p) for p in samples) / 30
    assert debiased < 0.6 * plain


def test_debiased_is_the_closed_form_of_the_sampled_one():
    p = random_predictions(N=300)
    r = reliability(p)
    spread = (r.accuracy * (1 - r.accuracy) / r.counts.clamp(min=1)).sqrt()
    draws = r.accuracy + spread * torch.randn(
        20_000, 15, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    sampled = ((draws - r.confidence).abs() * r.weights).sum(1).mean().item()
    assert debiased_ece(p) == pytest.approx(2 * ece(p) - sampled, abs=1e-3)


def test_perfect_predictor_has_no_error():
    labels = torch.tensor([0, 1, 2, 1])
    p = Predictions(torch.nn.functional.one_hot(labels, 3).float().log()[None], labels)
    for metric in (ece, adaptive_ece, classwise_ece, ace, tace, mce, debiased_ece):
        assert metric(p) == 0.0


@prop
@given(p=st.from_type(Predictions), bins=st.integers(1, 20))
def test_ranges(p, bins):
    for scheme in ("width", "mass"):
        r = reliability(p, bins, scheme)
        assert r.counts.sum() == len(p)
        assert r.edges[0] == 0
        assert r.edges[-1] == 1
        assert (r.edges.diff() >= 0).all()
        assert (r.counts[r.confidence > 0] > 0).all()
        lower, upper = r.edges[:-1] - 1e-12, r.edges[1:] + 2e-6
        assert ((lower <= r.confidence) & (r.confidence <= upper))[r.counts > 0].all()
    for metric in (ece, adaptive_ece, classwise_ece, ace, tace, debiased_ece):
        assert 0 <= metric(p, bins) <= 1
    assert ece(p, bins) <= mce(p, bins) + 1e-12 <= 1 + 1e-12


@prop
@given(p=st.from_type(Predictions), bins=st.integers(1, 6), seed=st.integers(0, 100))
def test_order_of_examples_does_not_matter(p, bins, seed):
    order = torch.randperm(len(p), generator=torch.Generator().manual_seed(seed))
    q = Predictions(p.log_probs[:, order], p.labels[order])
    for metric in (ece, adaptive_ece, classwise_ece, ace, tace, mce, debiased_ece):
        assert metric(q, bins) == pytest.approx(metric(p, bins), abs=1e-12)


@prop
@given(p=st.from_type(Predictions))
def test_one_bin_is_the_gap_of_the_means(p):
    confidence, hits = top_label(Predictions(p.log_probs.double().log_softmax(-1), p.labels))
    assert ece(p, 1) == pytest.approx(abs(confidence.mean() - hits.mean()), abs=1e-12)
    assert adaptive_ece(p, 1) == pytest.approx(ece(p, 1), abs=1e-15)


def test_invalid_options_are_refused():
    p = random_predictions()
    with pytest.raises(EnfoldError, match="bins"):
        ece(p, bins=0)
    with pytest.raises(EnfoldError, match="scheme"):
        reliability(p, scheme="equal")


def test_few_examples_warn():
    logits = torch.randn(120, 3, generator=torch.Generator().manual_seed(0))
    p = Predictions.from_logits(logits, torch.zeros(120, dtype=torch.long))
    few = Predictions(p.log_probs[:, :99], p.labels[:99])
    for metric in (ece, adaptive_ece, classwise_ece, debiased_ece, mce, reliability):
        with pytest.warns(FewExamplesWarning, match="at least 100 examples, got 99"):
            metric(few)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ece(p)
        ece(few, bins=14)
