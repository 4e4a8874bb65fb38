"""Selective prediction: the error rate after rejecting the most uncertain examples.

Examples are accepted in the order of their uncertainty, the most certain first. Ties are in random order, over which
the expectation is computed, so that the result does not depend on the order of the examples.

    risk(i) = errors among the first i / i,    coverage(i) = i / N                          (1)
    AURC = (1/N) Σ_i risk(i)                                                                (2)
    excess AURC = (2) - (2) of the order with all correct predictions first                 (3)
    PRR = (area of a random order - area) / (area of a random order - area of the best)     (4)

where an area in (4) is that under (errors among the first i) / N over coverage: an oracle predicts the rejected ones.

(1) to (3): Geifman, Uziel, El-Yaniv, "Bias-reduced uncertainty estimation for deep neural classifiers", ICLR 2019,
arXiv 1805.08206. (4): Malinin et al., "Uncertainty estimation in autoregressive structured prediction", ICLR 2021,
arXiv 2002.07650.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.metrics.ood import auroc, max_probability_score
from enfold.metrics.predictions import Predictions
from enfold.metrics.scores import example_correct


@dataclass(frozen=True)
class RiskCoverage:
    """The risk-coverage curve: error rate of the accepted examples by the fraction that is accepted.

    Args:
        coverage: Fractions of the examples that are accepted.
        risk: Error rate of the accepted examples.
    """

    coverage: Tensor  # (N,) from 1/N to 1
    risk: Tensor  # (N,)


def risk_coverage(p: Predictions, uncertainty: Tensor | None = None) -> RiskCoverage:
    """Return the risk-coverage curve, equation (1).

    Args:
        p: Predictions of the ensemble.
        uncertainty: Uncertainty (N,) that orders the examples; the default is 1 - max p̄.

    Raises:
        EnfoldError: If `uncertainty` has another shape or contains NaN.
    """
    errors, _ = _accepted_errors(p, uncertainty)
    accepted = torch.arange(1, len(errors) + 1, dtype=torch.float64)
    return RiskCoverage(accepted / len(errors), errors / accepted)  # (1)


def aurc(p: Predictions, uncertainty: Tensor | None = None) -> float:
    """Return the area under the risk-coverage curve (2); lower is better.

    Args:
        p: Predictions of the members.
        uncertainty: Uncertainty (N,) that orders the examples; the default is 1 - max p̄.
    """
    return risk_coverage(p, uncertainty).risk.mean().item()  # (2)


def excess_aurc(p: Predictions, uncertainty: Tensor | None = None) -> float:
    """Return the AURC minus that of the best order for this accuracy (3).

    Args:
        p: Predictions of the members.
        uncertainty: Uncertainty (N,) that orders the examples; the default is 1 - max p̄.
    """
    errors, wrong = _accepted_errors(p, uncertainty)
    accepted = torch.arange(1, len(errors) + 1, dtype=torch.float64)
    best = (accepted - (len(errors) - wrong)).clamp(min=0.0)
    return max(0.0, ((errors - best) / accepted).mean().item())  # (3)


def prr(p: Predictions, uncertainty: Tensor | None = None) -> float:
    """Return the prediction rejection ratio (4): 1 for the best order, 0 for a random one.

    It equals 2 AUROC - 1 for the detection of errors. NaN if all or no predictions are correct.

    Args:
        p: Predictions of the members.
        uncertainty: Uncertainty (N,) that orders the examples; the default is 1 - max p̄.
    """
    errors, wrong = _accepted_errors(p, uncertainty)
    N = len(errors)
    if wrong in (0, N):
        return math.nan
    rate = wrong / N
    area = (errors.sum().item() - wrong / 2) / N**2  # trapezoids from 0 to `wrong`
    return (rate / 2 - area) / (rate / 2 - rate**2 / 2)  # (4)


def misclassification_auroc(p: Predictions, uncertainty: Tensor | None = None) -> float:
    """Return the AUROC of detecting errors by the uncertainty; NaN if all or no predictions are correct.

    Args:
        p: Predictions of the members.
        uncertainty: Uncertainty (N,) that orders the examples; the default is 1 - max p̄.
    """
    unsure, correct = _uncertainty(p, uncertainty), example_correct(p).bool()
    if bool(correct.all()) or not bool(correct.any()):
        return math.nan
    return auroc(unsure[correct], unsure[~correct])


def selective(p: Predictions, uncertainty: Tensor | None = None) -> dict[str, float]:
    """Return AURC, excess AURC, PRR and the misclassification AUROC by name.

    Args:
        p: Predictions of the members.
        uncertainty: Uncertainty (N,) that orders the examples; the default is 1 - max p̄.
    """
    uncertainty = _uncertainty(p, uncertainty)
    return {
        "aurc": aurc(p, uncertainty),
        "excess_aurc": excess_aurc(p, uncertainty),
        "prr": prr(p, uncertainty),
        "misclassification_auroc": misclassification_auroc(p, uncertainty),
    }


def aurc_estimator(p: Predictions) -> Callable[[Tensor], Tensor]:
    """Return the estimator of the AURC in bootstrap replicates: counts (R, N) -> (R,).

    Draws of equal uncertainty form a block in random order. With E errors among the n accepted before a block of size w
    with e errors, the block adds
    Σ_i (E + (i - n) e/w) / i = e + (E - n e/w) (H(n + w) - H(n)), i = n + 1 ... n + w, H the harmonic numbers.
    """
    wrong = 1.0 - example_correct(p)
    _, block, sizes = _uncertainty(p, None).unique(return_inverse=True, return_counts=True)
    order = torch.argsort(block, stable=True)
    ends = sizes.cumsum(0) - 1
    harmonic = torch.zeros(1, dtype=torch.float64)

    def estimate(counts: Tensor) -> Tensor:
        nonlocal harmonic
        totals = counts.sum(1)  # (R,)
        most = int(totals.max())
        if len(harmonic) <= most:
            steps = torch.arange(1, most + 1, dtype=torch.float64).reciprocal()
            harmonic = torch.cat([steps.new_zeros(1), steps.cumsum(0)])
        drawn = counts[:, order]
        accepted, errors = drawn.cumsum(1)[:, ends], (drawn * wrong[order]).cumsum(1)[:, ends]  # (R, blocks)
        before = torch.nn.functional.pad(accepted, (1, 0))[:, :-1]
        errors_before = torch.nn.functional.pad(errors, (1, 0))[:, :-1]
        size, own = accepted - before, errors - errors_before
        rate = torch.where(size > 0, own / size.clamp(min=1), 0.0)
        grown = harmonic[accepted.long()] - harmonic[before.long()]
        return (own + (errors_before - before * rate) * grown).sum(1) / totals

    return estimate


def _accepted_errors(p: Predictions, uncertainty: Tensor | None) -> tuple[Tensor, int]:
    """Return the expected errors among the first 1 ... N examples (N,), the most certain first, and all errors."""
    unsure, wrong = _uncertainty(p, uncertainty), 1.0 - example_correct(p)
    _, block, sizes = unsure.unique(return_inverse=True, return_counts=True)
    rate = torch.zeros(len(sizes), dtype=torch.float64).index_add_(0, block, wrong) / sizes
    return rate.repeat_interleave(sizes).cumsum(0), int(wrong.sum())


def _uncertainty(p: Predictions, given: Tensor | None) -> Tensor:
    if given is None:
        return max_probability_score(p)
    if given.shape != (len(p),) or bool(given.isnan().any()):
        raise EnfoldError(
            f"uncertainty must have shape ({len(p)},) and no NaN, got shape {tuple(given.shape)}: "
            "pass for example decomposition(p).total"
        )
    return given.detach().to("cpu", torch.float64)
