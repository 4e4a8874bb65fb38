"""Decomposition of predictive uncertainty into aleatoric and epistemic uncertainty.

(1) total      H[p̄]
(2) aleatoric  (1/M) Σ_m H[p_m]
(3) epistemic  H[p̄] - (1/M) Σ_m H[p_m] = (1/M) Σ_m KL(p_m ‖ p̄), the mutual information
(4) rmi        (1/M) Σ_m KL(p̄ ‖ p_m), the reverse mutual information
(5) epkl       (1/M²) Σ_ij KL(p_i ‖ p_j) = (3) + (4), the expected pairwise divergence

With weights of the members, means are weighted. A Dirichlet student has all five, those of an infinite ensemble; for
other single networks (1) = (2) and the rest is 0.
The uncertainty that a single network preserves is measured by its correlation with (1) and (3) of the ensemble.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.metrics.dirichlet import dirichlet_uncertainty
from enfold.metrics.distributions import entropy, expectation, member_log_probs, require_members
from enfold.metrics.predictions import Predictions, mean_log_probs
from enfold.metrics.ranks import pearson, spearman
from enfold.metrics.weights import weighted_mean


@dataclass(frozen=True)
class Uncertainty:
    """Uncertainties of each example in nats, each of shape (N,) and non-negative; the last three are 0 for M = 1.

    Args:
        total: Entropy of the mean prediction.
        aleatoric: Mean entropy of the members.
        epistemic: Mutual information of prediction and member.
        rmi: Reverse mutual information.
        epkl: Expected pairwise KL divergence.
    """

    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    rmi: Tensor
    epkl: Tensor


def decomposition(p: Predictions) -> Uncertainty:
    """Return the uncertainties of each example; rmi and epkl are infinite where the members' supports differ.

    Args:
        p: Predictions of the members.
    """
    members = member_log_probs(p)  # (M, N, C)
    mean = mean_log_probs(members, p.weights)  # (N, C)
    total = entropy(mean)  # (1)
    aleatoric = weighted_mean(entropy(members), p.weights)  # (2)
    cross = -expectation(
        mean.exp(), weighted_mean(members, p.weights)
    )  # (1/M²) Σ_ij of the cross-entropy of p_j under p_i
    return Uncertainty(
        total=total.clamp(min=0.0),
        aleatoric=aleatoric.clamp(min=0.0),
        epistemic=(total - aleatoric).clamp(min=0.0),  # (3)
        rmi=(cross - total).clamp(min=0.0),  # (4)
        epkl=(cross - aleatoric).clamp(min=0.0),  # (5)
    )


def of_concentrations(alphas: Tensor) -> Uncertainty:
    """Return the uncertainties of a Dirichlet student with concentrations (N, C).

    Args:
        alphas: Concentrations, (N, C).
    """
    u = dirichlet_uncertainty(alphas.detach().to("cpu", torch.float64))
    return Uncertainty(u.total, u.aleatoric, u.epistemic, rmi=u.mkl, epkl=u.epkl)


@dataclass(frozen=True)
class Correlation:
    """The correlation of two scores of the same examples; NaN if one of them is constant."""

    pearson: float
    spearman: float


@dataclass(frozen=True)
class UncertaintyCorrelation:
    """Correlations of a single network's uncertainty with the ensemble's.

    Args:
        entropy: Correlation with the ensemble's entropy.
        mutual_information: Correlation with the ensemble's mutual information.
        epistemic: Correlation of the epistemic parts.
    """

    entropy: Correlation  # entropy of the network with entropy of the ensemble
    mutual_information: Correlation  # entropy of the network with mutual information of the ensemble
    epistemic: Correlation  # epistemic uncertainty of the network with mutual information of the ensemble


def uncertainty_correlation(single: Predictions | Uncertainty, ensemble: Predictions) -> UncertaintyCorrelation:
    """Return how well the uncertainty of a single network correlates with the ensemble's.

    An entropy that correlates with the ensemble's entropy separates hard examples from easy ones. One that also
    correlates with the mutual information separates unfamiliar examples from ambiguous ones.

    Args:
        single: Predictions of the network, or `of_concentrations(...)` for a Dirichlet student.
        ensemble: Predictions of the ensemble on the same examples.

    Raises:
        EnfoldError: If the examples differ or the ensemble has only one member.
    """
    require_members(ensemble, "uncertainty_correlation")
    if isinstance(single, Predictions) and not torch.equal(single.labels.cpu(), ensemble.labels.cpu()):
        raise EnfoldError(
            "single and ensemble must be predictions of the same examples, got different labels: "
            "predict the same test set with both"
        )
    own = decomposition(single) if isinstance(single, Predictions) else single
    reference = decomposition(ensemble)
    return UncertaintyCorrelation(
        entropy=_correlation(own.total, reference.total),
        mutual_information=_correlation(own.total, reference.epistemic),
        epistemic=_correlation(own.epistemic, reference.epistemic),
    )


def _correlation(a: Tensor, b: Tensor) -> Correlation:
    return Correlation(pearson(a, b), spearman(a, b))
