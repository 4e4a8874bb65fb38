"""Scores of regression: errors of the mean, and of the predictive distribution.

With the mean μ̄ of the ensemble and the distribution function F = (1/M) Σ_m Φ((· - μ_m) / σ_m) of a mixture of M
Gaussians N(μ_m, σ_m²):

    mse       mean_n (μ̄_n - y_n)²,   rmse = √mse,   mae = mean_n |μ̄_n - y_n|                           (1)
    r2        1 - Σ_n (μ̄_n - y_n)² / Σ_n (y_n - ȳ)²                                                    (2)
    nll       -mean_n log (1/M) Σ_m N(y_n; μ_mn, σ_mn²)                                                (3)
    crps      mean_n [(1/M) Σ_m A(y - μ_m, σ_m²) - 1/(2M²) Σ_ij A(μ_i - μ_j, σ_i² + σ_j²)]             (4)
              with A(d, v) = 2 √v φ(d/√v) + d (2 Φ(d/√v) - 1); with points A(d, 0) = |d|
    coverage  mean_n 1[(1-c)/2 <= F_n(y_n) <= (1+c)/2]: targets in the central interval of probability c  (5)
    width     mean_n F_n⁻¹((1+c)/2) - F_n⁻¹((1-c)/2)                                                   (6)
    pinball   mean_nk max(τ_k (y_n - q_nk), (τ_k - 1) (y_n - q_nk))                                    (7)
    quantile error    mean_k |mean_n 1[y_n <= q_nk] - τ_k|                                             (8)

(3) to (6) are those of the mixture itself; for one network it is a Gaussian. Several targets of an example are scored
as separate targets, so that they should have the same scale.

(4) Gneiting, Raftery, "Strictly proper scoring rules, prediction, and estimation", JASA 2007; for mixtures: Grimit et
al., "The continuous ranked probability score for circular variables", QJRMS 2006. (8) Kuleshov, Fenner, Ermon,
"Accurate uncertainties for deep learning using calibrated regression", ICML 2018, arXiv 1807.00263, with absolute
differences. With weights w of the members, 1/M is w_m and 1/M² is w_i w_j.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.metrics.regression_predictions import (
    GaussianPredictions,
    PointPredictions,
    QuantilePredictions,
    RegressionPredictions,
)
from enfold.metrics.weights import mean_log_probs, weighted_mean

LEVELS = tuple(k / 20 for k in range(1, 20))  # 0.05 ... 0.95, for (8) of Gaussians
_HALVINGS = 60  # of the interval that contains a quantile of a mixture: to the precision of float64


def example_squared_error(p: RegressionPredictions) -> Tensor:
    """Return (μ̄ - y)² of every target (N,).

    Args:
        p: Predictions of the members.
    """
    return (weighted_mean(p.means, p.weights) - p.targets).square()


def mse(p: RegressionPredictions) -> float:
    """Return the mean squared error of the mean prediction, equation (1).

    Args:
        p: Predictions of the members.
    """
    return example_squared_error(p).mean().item()  # (1)


def rmse(p: RegressionPredictions) -> float:
    """Return the root of the mean squared error, equation (1).

    Args:
        p: Predictions of the members.
    """
    return math.sqrt(mse(p))


def mae(p: RegressionPredictions) -> float:
    """Return the mean absolute error of the mean prediction, equation (1).

    Args:
        p: Predictions of the members.
    """
    return (weighted_mean(p.means, p.weights) - p.targets).abs().mean().item()


def r2(p: RegressionPredictions) -> float:
    """Return the coefficient of determination, equation (2); NaN if all targets are equal.

    Args:
        p: Predictions of the members.
    """
    total = (p.targets - p.targets.mean()).square().sum()
    return (1 - example_squared_error(p).sum() / total).item() if bool(total > 0) else math.nan  # (2)


def gibbs_mse(p: RegressionPredictions) -> float:
    """Return the mean of the members' squared errors, which is at least `mse`.

    Args:
        p: Predictions of the members.
    """
    return (p.means - p.targets).square().mean().item()


def example_density_nll(p: GaussianPredictions) -> Tensor:
    """Return the negative log-density of every target under the mixture (N,).

    Args:
        p: Predictions of the members.
    """
    if p.weights is not None:
        return -mean_log_probs(-member_density_nll(p), p.weights)
    return math.log(p.num_members) - torch.logsumexp(-member_density_nll(p), dim=0)


def density_nll(p: GaussianPredictions) -> float:
    """Return the negative log-density of the targets under the mixture of the members, equation (3).

    Args:
        p: Predictions of the members.
    """
    return example_density_nll(p).mean().item()  # (3)


def gibbs_density_nll(p: GaussianPredictions) -> float:
    """Return the mean of the members' negative log-densities, which is at least `density_nll`.

    Args:
        p: Predictions of the members.
    """
    return member_density_nll(p).mean().item()


def moment_nll(p: GaussianPredictions) -> float:
    """Return the negative log-density of the targets under one Gaussian with the mean and variance of the ensemble.

    Args:
        p: Predictions of the members.
    """
    return gibbs_density_nll(p.mean())


def member_density_nll(p: GaussianPredictions) -> Tensor:
    """Return -log N(y; μ_m, σ_m²), (M, N)."""
    squared = (p.targets - p.means).square() / p.variances
    return (squared + p.variances.log() + math.log(2 * math.pi)) / 2


def example_crps(p: GaussianPredictions | PointPredictions) -> Tensor:
    """Return the continuous ranked probability score of every target (N,).

    Args:
        p: Predictions of the members.
    """
    variances = p.variances if isinstance(p, GaussianPredictions) else torch.zeros_like(p.means)
    spread = torch.zeros_like(p.targets)
    if p.weights is not None:
        for (i, first), (j, second) in product(enumerate(p.weights), repeat=2):
            spread += first * second * _absolute(p.means[i] - p.means[j], variances[i] + variances[j])
        return weighted_mean(_absolute(p.targets - p.means, variances), p.weights) - spread / 2  # (4)
    for i in range(p.num_members):
        for j in range(i):
            spread += 2 * _absolute(p.means[i] - p.means[j], variances[i] + variances[j])
        spread += _absolute(torch.zeros_like(p.targets), 2 * variances[i])
    return _absolute(p.targets - p.means, variances).mean(0) - spread / (2 * p.num_members**2)  # (4)


def crps(p: GaussianPredictions | PointPredictions) -> float:
    """Return the continuous ranked probability score, equation (4), in the unit of the targets.

    For point predictions, the members are a sample of the predictive distribution; one network has its mean absolute
    error.

    Args:
        p: Predictions of the members.
    """
    return example_crps(p).mean().item()


def _absolute(difference: Tensor, variance: Tensor) -> Tensor:
    """Return A(d, v), the mean absolute value of N(d, v)."""
    std = variance.sqrt()
    scaled = difference / std.clamp(min=1e-300)
    density = (-scaled.square() / 2).exp() / math.sqrt(2 * math.pi)
    inside: Tensor = torch.erf(scaled / math.sqrt(2))
    return 2 * std * density + difference * inside


def probability_below(p: GaussianPredictions, values: Tensor) -> Tensor:
    """Return F of every target at values (N,): the probability integral transform for the targets.

    Args:
        p: Predictions of the members.
        values: One value for each target, (N,).
    """
    below: Tensor = torch.special.ndtr((values - p.means) / p.variances.sqrt())
    return weighted_mean(below, p.weights)


def coverage(p: GaussianPredictions, level: float = 0.9) -> float:
    """Return the fraction of the targets in their central interval of this probability, equation (5).

    Args:
        p: Predictions of the members.
        level: Probability of the interval.
    """
    _check_level(level)
    below = probability_below(p, p.targets)
    return ((below - 0.5).abs() <= level / 2).double().mean().item()  # (5)


def coverage_90(p: GaussianPredictions) -> float:
    """Return the fraction of the targets in their 90 % interval.

    Args:
        p: Predictions of the members.
    """
    return coverage(p, 0.9)


def coverage_95(p: GaussianPredictions) -> float:
    """Return the fraction of the targets in their 95 % interval.

    Args:
        p: Predictions of the members.
    """
    return coverage(p, 0.95)


def interval(p: GaussianPredictions, level: float = 0.9) -> tuple[Tensor, Tensor]:
    """Return the ends of the central interval of this probability for every target, each (N,).

    Args:
        p: Predictions of the members.
        level: Probability of the interval.
    """
    _check_level(level)
    return mixture_quantile(p, (1 - level) / 2), mixture_quantile(p, (1 + level) / 2)


def width(p: GaussianPredictions, level: float = 0.9) -> float:
    """Return the mean width of the central interval, equation (6), in the unit of the targets.

    Args:
        p: Predictions of the members.
        level: Probability of the interval.
    """
    low, high = interval(p, level)
    return (high - low).mean().item()  # (6)


def width_90(p: GaussianPredictions) -> float:
    """Return the mean width of the 90 % interval.

    Args:
        p: Predictions of the members.
    """
    return width(p, 0.9)


def width_95(p: GaussianPredictions) -> float:
    """Return the mean width of the 95 % interval.

    Args:
        p: Predictions of the members.
    """
    return width(p, 0.95)


def mixture_quantile(p: GaussianPredictions, level: float) -> Tensor:
    """Return F⁻¹(level) of every target (N,), which is between the smallest and the largest quantile of a member.

    Args:
        p: Predictions of the members.
        level: Probability of the quantile.
    """
    z = float(torch.special.ndtri(torch.tensor(level, dtype=torch.float64)))
    each = p.means + z * p.variances.sqrt()
    low, high = each.min(0).values, each.max(0).values
    if p.num_members == 1:
        return low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        is_below = probability_below(p, middle) < level
        low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
    return (low + high) / 2


def quantile_error(p: GaussianPredictions | QuantilePredictions, levels: Sequence[float] = LEVELS) -> float:
    """Return the mean difference between the level of a quantile and the fraction of targets below it, equation (8).

    Args:
        p: Predictions.
        levels: Levels for Gaussians; quantile predictions have levels of their own.
    """
    if isinstance(p, QuantilePredictions):
        nominal = torch.tensor(p.levels, dtype=torch.float64)
        observed = (p.targets[:, None] <= p.mean().quantiles[0]).double().mean(0)
    else:
        nominal = torch.tensor(tuple(levels), dtype=torch.float64)
        below = probability_below(p, p.targets).sort().values
        observed = torch.searchsorted(below, nominal, right=True) / len(p)
    return (observed - nominal).abs().mean().item()  # (8)


def sharpness(p: RegressionPredictions) -> float:
    """Return the mean predictive standard deviation of the ensemble, in the unit of the targets.

    Args:
        p: Predictions of the members.
    """
    _, aleatoric, epistemic = p.moments()
    return (aleatoric + epistemic).sqrt().mean().item()


def example_pinball(p: QuantilePredictions) -> Tensor:
    """Return the pinball loss of the mean quantiles, mean over levels, of every target (N,).

    Args:
        p: Predictions of the members.
    """
    return _pinball(p.mean().quantiles[0], p.targets, p.levels).mean(-1)


def pinball(p: QuantilePredictions) -> float:
    """Return the pinball loss of the mean quantiles, equation (7).

    Args:
        p: Predictions of the members.
    """
    return example_pinball(p).mean().item()


def gibbs_pinball(p: QuantilePredictions) -> float:
    """Return the mean of the members' pinball losses, which is at least `pinball`.

    Args:
        p: Predictions of the members.
    """
    return _pinball(p.quantiles, p.targets, p.levels).mean().item()


def _pinball(quantiles: Tensor, targets: Tensor, levels: Sequence[float]) -> Tensor:
    """Return the pinball loss (7) of quantiles (..., N, Q)."""
    tau = torch.tensor(levels, dtype=torch.float64)
    error = targets[:, None] - quantiles
    return torch.maximum(tau * error, (tau - 1) * error)  # (7)


def outer_coverage(p: QuantilePredictions) -> float:
    """Return the fraction of the targets between the lowest and the highest quantile.

    Args:
        p: Predictions of the members.
    """
    quantiles = p.mean().quantiles[0]
    inside = (p.targets >= quantiles[:, 0]) & (p.targets <= quantiles[:, -1])
    return inside.double().mean().item()


def outer_width(p: QuantilePredictions) -> float:
    """Return the mean distance of the lowest and the highest quantile, in the unit of the targets.

    Args:
        p: Predictions of the members.
    """
    quantiles = p.mean().quantiles[0]
    return (quantiles[:, -1] - quantiles[:, 0]).mean().item()


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise EnfoldError(f"level must be between 0 and 1, got {level}: use for example level=0.9")
