"""Weights of the members of an ensemble, and the means that they define.

    mean       Σ_m w_m x_m,   w_m >= 0,   Σ_m w_m = 1                                                  (1)

None stands for equal weights, for which the means are those of an ensemble without weights, to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from enfold.errors import EnfoldError

Weights = tuple[float, ...] | None
"""Normalized weights of the members; None for equal weights."""


def as_weights(weights: Sequence[float] | Tensor | None, num_members: int) -> Weights:
    """Return normalized weights; None if they are equal.

    Args:
        weights: A weight of each member, not negative; None for equal weights.
        num_members: The number of members.

    Raises:
        EnfoldError: If the number of weights differs, one is negative or not finite, or all are 0.
    """
    if weights is None:
        return None
    remedy = "pass one number for each member, or None for equal weights"
    try:
        values = [float(each) for each in weights]
    except (TypeError, ValueError) as error:
        raise EnfoldError(f"weights must be numbers, got {repr(weights)[:60]}: {remedy}") from error
    if len(values) != num_members:
        raise EnfoldError(f"weights must be of {num_members} members, got {len(values)} weights: {remedy}")
    wrong = [value for value in values if not 0 <= value < math.inf]
    if wrong:
        raise EnfoldError(f"weights must be finite and not negative, got {wrong[0]}: {remedy}")
    total = math.fsum(values)
    if not 0 < total < math.inf:
        raise EnfoldError(f"weights must have a positive, finite sum, got {total}: {remedy}")
    return None if len(set(values)) == 1 else tuple(value / total for value in values)


def select_weights(weights: Weights, members: Sequence[int]) -> Weights:
    """Return the weights of some members, which sum to 1 again; equal ones if all of these have the weight 0."""
    chosen = () if weights is None else tuple(weights[index] for index in members)
    return as_weights(chosen, len(chosen)) if any(chosen) else None


def weighted_mean(values: Tensor, weights: Weights = None) -> Tensor:
    """Return equation (1) over the first axis: (M, ...) -> (...); members of weight 0 are left out."""
    if weights is None:
        return values.mean(0)
    used, factors = _select_positive(values, weights)
    found: Tensor = torch.tensordot(factors.to(values), used, dims=1)
    return found


def mean_log_probs(log_probs: Tensor, weights: Weights = None) -> Tensor:
    """Return log p̄ = log Σ_m w_m p_m, the log of the mean probability: (M, ..., C) -> (..., C)."""
    if weights is None:
        return torch.logsumexp(log_probs, dim=0) - math.log(log_probs.shape[0])
    used, factors = _select_positive(log_probs, weights)
    return torch.logsumexp(used + factors.log().to(log_probs).view(-1, *[1] * (used.ndim - 1)), dim=0)


def _select_positive(values: Tensor, weights: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Return the members of positive weight and their weights in float64."""
    if len(weights) != len(values):
        raise EnfoldError(
            f"weights must be of the members that are averaged, got {len(weights)} weights for {len(values)} members: "
            "average all members, or select the weights, too"
        )
    chosen = [index for index, weight in enumerate(weights) if weight > 0]
    factors = torch.tensor([weights[index] for index in chosen], dtype=torch.float64, device=values.device)
    return values if len(chosen) == len(values) else values[chosen], factors
