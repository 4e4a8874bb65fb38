"""The divergence that students are trained by: what does not change with the student is computed once, before training.

    D_s = τ² (1/B) Σ_b KL(t_b || p_sb(τ)),     p(τ) = softmax(z / τ)                         (1)
        = τ² (1/B) Σ_b [Σ_k t_bk ln t_bk - Σ_k t_bk ln p_sbk(τ)]                             (2)

The first sum of (2) is the teachers' alone. A target holds it in a last column beside t.
"""

from __future__ import annotations

import torch
from torch import Tensor


def as_target(log_probs: Tensor) -> Tensor:
    """t and, in a last column, Σ_k t_k ln t_k: ln t, (..., C) -> (..., C + 1)."""
    probs = log_probs.exp()
    return torch.cat([probs, (probs * log_probs).sum(-1, keepdim=True)], dim=-1)


def divergence(logits: Tensor, target: Tensor, temperature: float) -> Tensor:
    """Equation (1) of each student, (S,), from logits (S, B, C) and a target (B, C + 1) or (S, B, C + 1)."""
    soft = torch.log_softmax(logits if temperature == 1 else logits / temperature, dim=-1)
    apart = divergence_from(soft, target)
    return apart if temperature == 1 else temperature**2 * apart


def divergence_from(log_probs: Tensor, target: Tensor) -> Tensor:
    """The mean KL(t || p) over the batch, from ln p, (..., B, C)."""
    classes, size = log_probs.shape[-1], log_probs.shape[-2]
    own, known = target[..., :classes], target[..., classes]
    return known.mean(-1) - (log_probs * own).sum((-2, -1)) / size  # (2)
