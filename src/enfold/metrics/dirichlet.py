"""Uncertainty of networks whose logits define a Dirichlet distribution over class probabilities, in float64.

    α_k = exp(z_k) + offset,   α_0 = Σ_k α_k,   p̄_k = α_k / α_0                             (1)
    E[ln π_k] = ψ(α_k) - ψ(α_0)                                                             (2)
    total      H[p̄]                                                                         (3)
    aleatoric  E[H[π]] = -Σ_k p̄_k (ψ(α_k + 1) - ψ(α_0 + 1))                                 (4)
    epistemic  H[p̄] - E[H[π]], the mutual information                                       (5)
    epkl       E[KL(π ‖ π')] = (C - 1) / α_0, the expected pairwise divergence              (6)
    mkl        E[KL(p̄ ‖ π)] = (6) - (5), the reverse mutual information of an ensemble      (7)

They equal the result of `decomposition` for an infinite ensemble of members drawn from the distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

EXTENT = 230.0  # logits are clipped so that α is within 1e±100: ψ(0) and ln Γ of the largest float64 are infinite


@dataclass(frozen=True)
class DirichletUncertainty:
    """Uncertainties of each example in nats, each of shape (...) and non-negative, and the precision α_0."""

    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    epkl: Tensor
    mkl: Tensor
    precision: Tensor


def concentrations(logits: Tensor, offset: float = 0.0) -> Tensor:
    """Return the concentrations α of equation (1) in float64, differentiable.

    Args:
        logits: Logits (..., C); they are clipped so that ln Γ and ψ are finite.
        offset: Added to every concentration.
    """
    return logits.double().clamp(-EXTENT, EXTENT).exp() + offset  # (1)


def expected_log_probs(alphas: Tensor) -> Tensor:
    """Return the expected log-probabilities of equation (2): (..., C) -> (..., C)."""
    return torch.digamma(alphas) - torch.digamma(alphas.sum(-1, keepdim=True))  # (2)


def differential_entropy(alphas: Tensor) -> Tensor:
    """Return the differential entropy of the Dirichlet distribution, which may be negative: (..., C) -> (...)."""
    return log_beta(alphas) - ((alphas - 1) * expected_log_probs(alphas)).sum(-1)


def log_beta(alphas: Tensor) -> Tensor:
    """Return ln B(α) = Σ_k ln Γ(α_k) - ln Γ(α_0), the log of the normalizer: (..., C) -> (...)."""
    return torch.lgamma(alphas).sum(-1) - torch.lgamma(alphas.sum(-1))


def dirichlet_uncertainty(alphas: Tensor, digamma: Callable[[Tensor], Tensor] = torch.digamma) -> DirichletUncertainty:
    """Return the uncertainties (3) to (7) of Dirichlet distributions with concentrations (..., C).

    Args:
        alphas: The concentrations.
        digamma: The function ψ.
    """
    alphas = alphas.double()
    precision = alphas.sum(-1)  # (...)
    mean = alphas / precision[..., None]
    total = torch.special.entr(mean).sum(-1)  # (3)
    moments = digamma(alphas + 1) - digamma(precision + 1)[..., None]
    aleatoric = -(mean * moments).sum(-1)  # (4)
    epistemic = (total - aleatoric).clamp(min=0.0)  # (5)
    epkl = (alphas.shape[-1] - 1) / precision  # (6)
    return DirichletUncertainty(
        total=total.clamp(min=0.0),
        aleatoric=aleatoric.clamp(min=0.0),
        epistemic=epistemic,
        epkl=epkl,
        mkl=(epkl - epistemic).clamp(min=0.0),  # (7)
        precision=precision,
    )
