"""Uncertainty in two parts: what every member is unsure of, and what the members are at odds about.

(1) total      H[p̄]
(2) aleatoric  (1/M) Σ_m H[p_m]
(3) epistemic  H[p̄] - (1/M) Σ_m H[p_m] = (1/M) Σ_m KL(p_m ‖ p̄), the mutual information
(4) rmi        (1/M) Σ_m KL(p̄ ‖ p_m), the reverse mutual information
(5) epkl       (1/M²) Σ_ij KL(p_i ‖ p_j) = (3) + (4), the expected pairwise divergence
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from enfold.metrics.distributions import entropy, expected, member_log_probs
from enfold.predictions import Predictions, mean_log_probs


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
