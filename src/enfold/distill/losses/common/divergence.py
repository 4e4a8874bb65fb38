"""The divergence of a student from a target, with the terms that do not depend on the student computed beforehand.

    D_s = τ² (1/B) Σ_b KL(t_b || p_sb(τ)),     p(τ) = softmax(z / τ)                                   (1)
        = τ² (1/B) Σ_b [Σ_k t_bk ln t_bk - Σ_k t_bk ln p_sbk(τ)]                                       (2)

The first sum of (2) depends on the teachers only. A target has it as its last column, behind t.
"""

from __future__ import annotations

import torch
from torch import Tensor


def as_target(log_probs: Tensor) -> Tensor:
    """Return t and, in a last column, Σ_k t_k ln t_k, from ln t: (..., C) -> (..., C + 1)."""
    probs = log_probs.exp()
    return torch.cat([probs, (probs * log_probs).sum(-1, keepdim=True)], dim=-1)


def divergence(logits: Tensor, target: Tensor, temperature: float) -> Tensor:
    """Return equation (1) for each student, (S,), from logits (S, B, C) and a target (B, C + 1) or (S, B, C + 1)."""
    log_probs = torch.log_softmax(logits if temperature == 1 else logits / temperature, dim=-1)
    kl = mean_kl(log_probs, target)
    return kl if temperature == 1 else temperature**2 * kl


def mean_kl(log_probs: Tensor, target: Tensor) -> Tensor:
    """Return the mean KL(t || p) over the batch, from ln p, (..., B, C)."""
    classes, size = log_probs.shape[-1], log_probs.shape[-2]
    probs, negentropy = target[..., :classes], target[..., classes]
    return negentropy.mean(-1) - (log_probs * probs).sum((-2, -1)) / size  # (2)
