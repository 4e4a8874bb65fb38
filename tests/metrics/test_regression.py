"""Scores of regression against scikit-learn, scipy, numerical integration and sampling."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, optimize, stats
from sklearn.metrics import mean_absolute_error, mean_pinball_loss, mean_squared_error, r2_score

from enfold.errors import EnfoldError
from enfold.metrics import (
    TABLES,
    GaussianPredictions,
    PointPredictions,
    QuantilePredictions,
    apply_scale,
    coverage,
    crps,
    density_nll,
    evaluate_scaled,
    example_crps,
    example_density_nll,
    example_pinball,
    example_squared_error,
    fit_scale,
    gain_interval,
    gibbs_density_nll,
    gibbs_mse,
    gibbs_pinball,
    interval,
    mae,
    mean_member,
    metrics_for,
    mixture_quantile,
    moment_nll,
    mse,
    outer_coverage,
    outer_width,
    per_member,
    pinball,
    probability_below,
    quantile_error,
    r2,
    rmse,
    sharpness,
    width,
)

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def gaussians(M=3, N=50, seed=0, epistemic=False):
    g = rng(seed)
    own = torch.rand(M, N, generator=g, dtype=torch.float64) if epistemic else None
    return GaussianPredictions(
        torch.randn(M, N, generator=g, dtype=torch.float64),
        torch.randn(N, generator=g, dtype=torch.float64),
        torch.rand(M, N, generator=g, dtype=torch.float64) + 0.05,
        own,
    )


def points(M=4, N=50, seed=0):
    p = gaussians(M, N, seed)
    return PointPredictions(p.means, p.targets)


def quantiles(M=3, N=50, seed=0):
    g = rng(seed)
    values = torch.randn(M, N, len(LEVELS), generator=g, dtype=torch.float64).sort(-1).values
    return QuantilePredictions(values, torch.randn(N, generator=g, dtype=torch.float64), LEVELS)


EVERY = [gaussians(), gaussians(epistemic=True), gaussians(1), points(), points(1), quantiles(), quantiles(1)]


def mixture_cdf(p, n):
    std = p.variances.sqrt()
    return lambda y: stats.norm.cdf(y, p.means[:, n].numpy(), std[:, n].numpy()).mean()


# Errors of the mean


@pytest.mark.parametrize("p", EVERY)
def test_errors_agree_with_scikit_learn(p):
    y, mean = p.targets.numpy(), p.means.mean(0).numpy()
    assert mse(p) == pytest.approx(mean_squared_error(y, mean))
    assert rmse(p) == pytest.approx(math.sqrt(mean_squared_error(y, mean)))
    assert mae(p) == pytest.approx(mean_absolute_error(y, mean))
    assert r2(p) == pytest.approx(r2_score(y, mean))
    each = [mean_squared_error(y, one.numpy()) for one in p.means]
    assert gibbs_mse(p) == pytest.approx(sum(each) / len(each))
    assert mean_member(mse, p) == pytest.approx(gibbs_mse(p))
    assert example_squared_error(p).shape == (len(p),)


def test_constant_targets_have_no_r2():
    assert math.isnan(r2(PointPredictions(torch.zeros(1, 3), torch.ones(3))))


# Likelihood


def test_the_density_of_one_gaussian_and_of_mixtures():
    p = gaussians(epistemic=True)
    log = stats.norm.logpdf(p.targets.numpy(), p.means.numpy(), np.sqrt(p.variances.numpy()))
    assert gibbs_density_nll(p) == pytest.approx(-log.mean())
    assert density_nll(p) == pytest.approx(-np.log(np.exp(log).mean(0)).mean())
    torch.testing.assert_close(per_member(density_nll, p), -torch.from_numpy(log).mean(1))
    mean, a, e = p.moments()
    expected = stats.norm.logpdf(p.targets.numpy(), mean.numpy(), (a + e).sqrt().numpy())
    assert moment_nll(p) == pytest.approx(-expected.mean())
    assert density_nll(p.mean()) == pytest.approx(moment_nll(p))
    assert moment_nll(p.member(1)) == pytest.approx(density_nll(p.member(1)))
    assert density_nll(p) <= gibbs_density_nll(p)


def test_a_member_that_is_certain_and_far_away_is_no_overflow():
    p = GaussianPredictions(torch.tensor([[0.0], [100.0]]), torch.zeros(1), torch.tensor([[1.0], [1e-6]]))
    assert density_nll(p) == pytest.approx(math.log(2) + 0.5 * math.log(2 * math.pi), rel=1e-5)


# CRPS


@pytest.mark.parametrize("M", [1, 2, 4])
def test_crps_is_the_integral_of_the_squared_distance_of_the_distributions(M):
    p = gaussians(M, N=6, epistemic=True)
    for n, found in enumerate(example_crps(p).tolist()):
        below, y = mixture_cdf(p, n), float(p.targets[n])
        left = integrate.quad(lambda t, below=below: below(t) ** 2, -15, y, limit=200)[0]
        right = integrate.quad(lambda t, below=below: (1 - below(t)) ** 2, y, 15, limit=200)[0]
        assert found == pytest.approx(left + right, rel=1e-5)


def test_crps_of_one_gaussian_has_a_closed_form():
    p = gaussians(1)
    std = p.variances[0].sqrt().numpy()
    z = (p.targets - p.means[0]).numpy() / std
    expected = std * (z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z) - 1 / math.sqrt(math.pi))
    np.testing.assert_allclose(example_crps(p).numpy(), expected, rtol=1e-9)


def test_crps_of_points_is_the_energy_score():
    p = points()
    x, y = p.means, p.targets
    expected = (x - y).abs().mean(0) - (x[:, None] - x[None]).abs().mean((0, 1)) / 2
    torch.testing.assert_close(example_crps(p), expected)
    assert crps(p.member(0)) == pytest.approx(mae(p.member(0)))


def test_crps_of_narrow_gaussians_is_that_of_points():
    p = points()
    narrow = GaussianPredictions(p.means, p.targets, torch.full_like(p.means, 1e-16))
    torch.testing.assert_close(example_crps(narrow), example_crps(p), rtol=1e-6, atol=1e-7)


# Intervals and quantiles


@pytest.mark.parametrize("M", [1, 3])
def test_quantiles_of_mixtures_are_roots_of_the_distribution(M):
    p = gaussians(M, N=5, epistemic=True)
    for level in (0.001, 0.05, 0.5, 0.975):
        found = mixture_quantile(p, level)
        for n, value in enumerate(found.tolist()):
            below = mixture_cdf(p, n)
            root = optimize.brentq(lambda t, below=below, level=level: below(t) - level, -20, 20, xtol=1e-13)
            assert value == pytest.approx(root, abs=1e-9)
        torch.testing.assert_close(probability_below(p, found), torch.full_like(found, level))


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95])
def test_coverage_and_width_are_those_of_the_interval(level):
    p = gaussians(N=400)
    low, high = interval(p, level)
    inside = (low <= p.targets) & (p.targets <= high)
    assert coverage(p, level) == pytest.approx(inside.double().mean().item())
    assert width(p, level) == pytest.approx((high - low).mean().item())
    assert metrics_for(p)["coverage_90"](p) == coverage(p, 0.9)
    assert metrics_for(p)["width_95"](p) == width(p, 0.95)


def test_a_calibrated_mixture():
    """Targets drawn from the mixture itself are covered as often as the level says."""
    M, N = 3, 40_000
    p = gaussians(M, N)
    chosen, noise = torch.randint(M, (N,), generator=rng(1)), torch.randn(N, generator=rng(2), dtype=torch.float64)
    drawn = p.means[chosen, torch.arange(N)] + noise * p.variances[chosen, torch.arange(N)].sqrt()
    p = GaussianPredictions(p.means, drawn, p.aleatoric)
    assert coverage(p, 0.9) == pytest.approx(0.9, abs=0.01)
    assert quantile_error(p) < 0.005
    too_sure = GaussianPredictions(p.means.mean(0, keepdim=True), drawn, p.aleatoric[:1] / 4)
    assert coverage(too_sure, 0.9) < 0.7
    assert quantile_error(too_sure) > 0.05


def test_the_error_of_quantiles_counts_targets_below_them():
    p = gaussians(N=200)
    levels = (0.1, 0.4, 0.9)
    gaps = [abs((p.targets <= mixture_quantile(p, level)).double().mean().item() - level) for level in levels]
    assert quantile_error(p, levels) == pytest.approx(sum(gaps) / 3)
    q = quantiles(N=200)
    mean = q.quantiles.mean(0)
    gaps = [abs((q.targets <= mean[:, k]).double().mean().item() - level) for k, level in enumerate(LEVELS)]
    assert quantile_error(q) == pytest.approx(sum(gaps) / len(LEVELS))


def test_pinball_agrees_with_scikit_learn():
    q = quantiles()
    y, mean = q.targets.numpy(), q.quantiles.mean(0).numpy()
    expected = [mean_pinball_loss(y, mean[:, k], alpha=level) for k, level in enumerate(LEVELS)]
    assert pinball(q) == pytest.approx(np.mean(expected))
    assert example_pinball(q).mean().item() == pytest.approx(pinball(q))
    assert gibbs_pinball(q) == pytest.approx(mean_member(pinball, q))
    assert pinball(q) <= gibbs_pinball(q)
    inside = (mean[:, 0] <= y) & (y <= mean[:, -1])
    assert outer_coverage(q) == pytest.approx(inside.mean())
    assert outer_width(q) == pytest.approx((mean[:, -1] - mean[:, 0]).mean())


@given(st.floats(-5, 5), st.floats(0.1, 10), st.sets(st.integers(1, 99), min_size=2, max_size=8))
def test_quantiles_of_a_normal_distribution_give_its_moments(mean, std, percent):
    levels = tuple(sorted(level / 100 for level in percent))
    values = torch.tensor(stats.norm.ppf(levels, mean, std))[None, None]
    p = QuantilePredictions(values, torch.zeros(1), levels)
    found, aleatoric, epistemic = p.moments()
    assert found.item() == pytest.approx(mean, abs=1e-6)
    assert aleatoric.item() == pytest.approx(std**2, rel=1e-6)
    assert epistemic.item() == 0


def test_one_level_and_crossing_quantiles_have_no_spread():
    one = QuantilePredictions(torch.ones(1, 3, 1), torch.zeros(3), (0.9,))
    assert not one.aleatoric_variances.any()
    assert one.means.tolist() == [[1.0, 1.0, 1.0]]
    crossing = QuantilePredictions(torch.tensor([[[3.0, 2.0, 1.0]]]), torch.zeros(1), (0.1, 0.5, 0.9))
    assert sharpness(crossing) == 0


# Members and their mean


@pytest.mark.parametrize("p", EVERY)
def test_every_metric_of_every_kind_is_finite(p):
    assert type(p) in TABLES
    table = metrics_for(p)
    for kind in (p, p.mean(), p.member(0), p.subset([0])):
        assert type(kind) is type(p)
        for name, metric in table.items():
            assert math.isfinite(metric(kind)), name
    assert {*p.headline, p.criterion, p.score} <= table.keys()
    assert not table[p.criterion].higher_is_better


@pytest.mark.parametrize("p", [gaussians(), gaussians(epistemic=True), points(), quantiles()])
def test_the_mean_has_the_moments_of_the_ensemble(p):
    mean, aleatoric, epistemic = p.moments()
    own = p.mean().moments()
    torch.testing.assert_close(own[0], mean)
    if isinstance(p, GaussianPredictions):
        torch.testing.assert_close(own[1], aleatoric)
        torch.testing.assert_close(own[2], epistemic)
    assert rmse(p.mean()) == pytest.approx(rmse(p))


def test_the_interval_of_the_gain():
    low, high = gain_interval(gaussians(N=500), example_density_nll)
    assert low < high < 0


# Scales


@pytest.mark.parametrize("p", [gaussians(epistemic=True), gaussians(1), quantiles()])
def test_the_scale_minimises_the_likelihood(p):
    found = fit_scale(p)
    best = density_nll(apply_scale(p, found))
    for other in (0.5 * found, 0.99 * found, 1.01 * found, 2 * found):
        assert density_nll(apply_scale(p, other)) > best
    mean, a, e = p.moments()
    assert found**2 == pytest.approx(((p.targets - mean) ** 2 / (a + e)).mean().item())


@pytest.mark.parametrize("M", [1, 4])
@pytest.mark.parametrize("spread", [0.1, 1.0])
def test_the_residual_of_points_minimises_the_likelihood(M, spread):
    p = points(M)
    p = PointPredictions(spread * p.means, p.targets)
    found = fit_scale(p)
    best = density_nll(apply_scale(p, found))
    for other in torch.logspace(-4, 2, 200).tolist():
        assert density_nll(apply_scale(p, other)) >= best - 1e-9
    if M == 1:
        assert found == pytest.approx(rmse(p))
    scaled = apply_scale(p, found)
    mean, _, epistemic = p.moments()
    torch.testing.assert_close(scaled.epistemic[0], epistemic)
    torch.testing.assert_close(scaled.aleatoric[0], torch.full_like(mean, found**2))


def test_scaled_scores_need_other_examples_of_the_same_members():
    test, validation = gaussians(seed=1), gaussians(seed=2)
    found = evaluate_scaled(density_nll, test, validation)
    assert found == pytest.approx(density_nll(apply_scale(test, fit_scale(validation))))
    with pytest.raises(EnfoldError, match="validation must hold other examples"):
        evaluate_scaled(density_nll, test, gaussians(seed=1))
    for other in (gaussians(2), points(3)):
        with pytest.raises(EnfoldError, match="the same members"):
            evaluate_scaled(density_nll, test, other)
    for scale in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(EnfoldError, match="scale must be positive"):
            apply_scale(test, scale)


def test_exact_predictions_have_a_finite_scale():
    y = torch.randn(20, generator=rng())
    for p in (PointPredictions(y[None], y), GaussianPredictions(y[None], y, torch.ones(1, 20))):
        assert 0 < fit_scale(p) < 1e-3
        assert math.isfinite(density_nll(apply_scale(p, fit_scale(p))))


# Refusals


def test_what_predictions_refuse():
    ones = torch.ones(2, 3)
    with pytest.raises(EnfoldError, match=r"means must have shape \(M, N\)"):
        PointPredictions(torch.ones(3), torch.ones(3))
    with pytest.raises(EnfoldError, match=r"targets must have shape \(3,\)"):
        PointPredictions(ones, torch.ones(2))
    with pytest.raises(EnfoldError, match="at least one member and target"):
        PointPredictions(torch.ones(2, 0), torch.ones(0))
    with pytest.raises(EnfoldError, match=r"means must be finite, got nan at index \(1, 2\)"):
        PointPredictions(torch.tensor([[1.0, 1, 1], [1, 1, torch.nan]]), torch.ones(3))
    with pytest.raises(EnfoldError, match="targets must be finite, got inf at index 1"):
        PointPredictions(ones, torch.tensor([1.0, torch.inf, 1.0]))
    with pytest.raises(EnfoldError, match="aleatoric must not be negative, got -1"):
        GaussianPredictions(ones, torch.ones(3), -ones)
    with pytest.raises(EnfoldError, match="aleatoric must have the shape"):
        GaussianPredictions(ones, torch.ones(3), torch.ones(2, 4))
    with pytest.raises(EnfoldError, match="epistemic must have the shape"):
        GaussianPredictions(ones, torch.ones(3), ones, torch.ones(3))
    with pytest.raises(EnfoldError, match="must be positive, got 0"):
        GaussianPredictions(ones, torch.ones(3), 0 * ones)
    with pytest.raises(EnfoldError, match="quantiles must have shape"):
        QuantilePredictions(torch.ones(2, 3, 4), torch.ones(3), LEVELS)
    with pytest.raises(EnfoldError, match="level must be between"):
        coverage(gaussians(), 1.0)


def test_values_are_float64_and_detached():
    p = GaussianPredictions(torch.ones(2, 3, requires_grad=True), torch.ones(3).half(), torch.ones(2, 3))
    for values in (p.means, p.targets, p.aleatoric):
        assert values.dtype == torch.float64
        assert not values.requires_grad
