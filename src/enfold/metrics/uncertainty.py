"""Uncertainty in two parts: what every member is unsure of, and what the members are at odds about.

(1) total      H[p̄]
(2) aleatoric  (1/M) Σ_m H[p_m]
(3) epistemic  H[p̄] - (1/M) Σ_m H[p_m] = (1/M) Σ_m KL(p_m ‖ p̄), the mutual information
(4) rmi        (1/M) Σ_m KL(p̄ ‖ p_m), the reverse mutual information
(5) epkl       (1/M²) Σ_ij KL(p_i ‖ p_j) = (3) + (4), the expected pairwise divergence

A Dirichlet student has all five, as those of endlessly many members; another single network has (1) = (2) alone. How
much of an ensemble's uncertainty a network has kept is how well its own goes with (1) and (3) of the ensemble.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from enfold.errors import EnfoldError
from enfold.metrics.dirichlet import dirichlet_uncertainty
from enfold.metrics.distributions import entropy, expected, member_log_probs, several_members
from enfold.metrics.predictions import Predictions, mean_log_probs
from enfold.metrics.ranks import pearson, spearman


@dataclass(frozen=True)
class Uncertainty:
    """Uncertainties of each example in nats, each (N,), never negative; the last three are 0 for M = 1."""

    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    rmi: Tensor
    epkl: Tensor


def decomposition(p: Predictions) -> Uncertainty:
    """The uncertainties of each example; rmi and epkl are infinite where the members' supports differ."""
    members = member_log_probs(p)  # (M, N, C)
    mean = mean_log_probs(members)  # (N, C)
    total = entropy(mean)  # (1)
    aleatoric = entropy(members).mean(0)  # (2)
    cross = -expected(mean.exp(), members.mean(0))  # (1/M²) Σ_ij of the cross-entropy of p_j under p_i
    return Uncertainty(
        total=total.clamp(min=0.0),
        aleatoric=aleatoric.clamp(min=0.0),
        epistemic=(total - aleatoric).clamp(min=0.0),  # (3)
        rmi=(cross - total).clamp(min=0.0),  # (4)
        epkl=(cross - aleatoric).clamp(min=0.0),  # (5)
    )


def of_concentrations(alphas: Tensor) -> Uncertainty:
    """The uncertainties of a Dirichlet student with concentrations (N, C): (4) is E[KL(p̄ ‖ π)] of its distribution."""
    found = dirichlet_uncertainty(alphas.detach().to("cpu", torch.float64))
    return Uncertainty(found.total, found.aleatoric, found.epistemic, rmi=found.mkl, epkl=found.epkl)


@dataclass(frozen=True)
class Correlation:
    """Of two scores of the same examples; NaN where one of them never varies."""

    pearson: float
    spearman: float


@dataclass(frozen=True)
class Kept:
    """How a network's uncertainty goes with the ensemble's."""

    entropy: Correlation  # its entropy with the ensemble's
    mutual_information: Correlation  # its entropy with what the members are at odds about
    epistemic: Correlation  # its own epistemic part, if it has one, with the same


def kept(single: Predictions | Uncertainty, ensemble: Predictions) -> Kept:
    """How much of an ensemble's uncertainty one network keeps; `of_concentrations(...)` stands for a Dirichlet student.

    An entropy that goes with the ensemble's entropy tells hard examples from easy ones. One that also goes with the
    mutual information tells those that were not learnt from those that are ambiguous.
    """
    several_members(ensemble, "kept")
    if isinstance(single, Predictions) and not torch.equal(single.labels.cpu(), ensemble.labels.cpu()):
        raise EnfoldError(
            "kept compares uncertainties of the same examples, but the labels of the two predictions differ: "
            "predict one test set with both"
        )
    own = decomposition(single) if isinstance(single, Predictions) else single
    theirs = decomposition(ensemble)
    return Kept(
        entropy=_correlation(own.total, theirs.total),
        mutual_information=_correlation(own.total, theirs.epistemic),
        epistemic=_correlation(own.epistemic, theirs.epistemic),
    )


def _correlation(a: Tensor, b: Tensor) -> Correlation:
    return Correlation(pearson(a, b), spearman(a, b))
