"""Scaling of predictive standard deviations, fitted on validation data: what the temperature is for classes.

    Gaussians and quantiles   N(μ̄, s² (a + e)),   s² = mean_n (y_n - μ̄_n)² / (a_n + e_n)               (1)
    points                    N(μ̄, s² + e),       s² = argmin Σ_n [log(s² + e_n) + (y_n - μ̄_n)² / (s² + e_n)]  (2)

with mean μ̄, aleatoric variance a and epistemic variance e of the ensemble. Both have the lowest negative
log-likelihood of the validation targets; (2) adds the residual variance that point predictions lack, and is the mean
squared error for a single network.

(1) Laves et al., "Well-calibrated regression uncertainty in medical imaging with deep learning", MIDL 2020.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.metrics.regression_predictions import GaussianPredictions, PointPredictions, RegressionPredictions

SMALLEST = 1e-12  # of a variance, relative to that of the targets: exact predictions have no scale
_STARTS = 60  # values of s² among which the minimum of (2) is first searched, as it may have several


def fit_scale(validation: RegressionPredictions) -> float:
    """Return the scale s with the lowest negative log-likelihood, equation (1) or (2).

    Args:
        validation: Predictions on validation data.

    Returns:
        The factor on the standard deviation; for point predictions the standard deviation of the residuals.
    """
    mean, aleatoric, epistemic = validation.moments()
    residual = (validation.targets - mean).square()
    floor = SMALLEST * _scale_of(validation.targets)
    if isinstance(validation, PointPredictions):
        return math.sqrt(_fit_residual(residual, epistemic, floor))  # (2)
    return math.sqrt(max((residual / (aleatoric + epistemic).clamp(min=floor)).mean().item(), SMALLEST))  # (1)


def apply_scale(p: RegressionPredictions, scale: float) -> GaussianPredictions:
    """Return the Gaussian of the ensemble with its scale (M = 1), equation (1) or (2).

    Args:
        p: Predictions.
        scale: The scale s of `fit_scale`, fitted for the same kind of predictions.

    Raises:
        EnfoldError: If `scale` is not positive and finite.
    """
    if not 0 < scale < math.inf:
        raise EnfoldError(f"scale must be positive and finite, got {scale}: use 1 for no change")
    mean, aleatoric, epistemic = p.moments()
    if isinstance(p, PointPredictions):
        return GaussianPredictions(mean[None], p.targets, torch.full_like(mean, scale**2)[None], epistemic[None])
    floor = SMALLEST * _scale_of(p.targets)
    return GaussianPredictions(
        mean[None], p.targets, scale**2 * aleatoric.clamp(min=floor)[None], scale**2 * epistemic[None]
    )


def evaluate_scaled(
    metric: Callable[[GaussianPredictions], float], test: RegressionPredictions, validation: RegressionPredictions
) -> float:
    """Return a metric of the test predictions at the scale fitted on the validation predictions.

    Args:
        metric: The metric.
        test: Predictions on test data.
        validation: Predictions of the same members on other examples.

    Raises:
        EnfoldError: If the predictions have different members or kinds, or are of the same examples.
    """
    require_other_targets(test, validation)
    return metric(apply_scale(test, fit_scale(validation)))


def require_other_targets(test: RegressionPredictions, validation: RegressionPredictions) -> None:
    """Check that two predictions are those of the same members for other examples.

    Args:
        test: Predictions on test data.
        validation: Predictions on validation data.

    Raises:
        EnfoldError: If the predictions have different members or kinds, or are of the same examples.
    """
    if type(test) is not type(validation) or test.num_members != validation.num_members:
        raise EnfoldError(
            "test and validation must be predictions of the same members, got "
            f"{type(test).__name__} of {test.num_members} and {type(validation).__name__} of {validation.num_members}: "
            "use the same model for both"
        )
    if torch.equal(test.targets, validation.targets) and torch.equal(test.means, validation.means):
        raise EnfoldError(
            "validation must hold other examples than test, got the same predictions: pass predictions on held-out "
            "validation data"
        )


def _scale_of(targets: Tensor) -> float:
    """Return a variance for comparison: that of the targets, or 1 if they are equal."""
    return targets.var(correction=0).item() or 1.0


def _fit_residual(residual: Tensor, epistemic: Tensor, floor: float) -> float:
    """Return s² of equation (2), found by a search over log s²."""
    from scipy.optimize import minimize_scalar  # imported here: it takes half a second

    highest = max(residual.mean().item(), floor)
    if not bool((epistemic > 0).any()):
        return highest

    def objective(log_variance: float) -> float:
        variance = math.exp(log_variance) + epistemic
        return (variance.log() + residual / variance).mean().item()

    # The slope is positive where s² exceeds all squared residuals, so that the minimum is below their maximum.
    low, high = math.log(floor), math.log(max(residual.max().item(), 2 * floor))
    grid = torch.linspace(low, high, _STARTS, dtype=torch.float64).tolist()
    best = min(range(_STARTS), key=lambda index: objective(grid[index]))
    bounds = grid[max(best - 1, 0)], grid[min(best + 1, _STARTS - 1)]
    return math.exp(float(minimize_scalar(objective, bounds=bounds, method="bounded", options={"xatol": 1e-10}).x))
