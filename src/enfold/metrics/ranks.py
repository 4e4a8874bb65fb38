"""Ranks and correlations, with ties."""

from __future__ import annotations

import torch
from torch import Tensor

from enfold.errors import EnfoldError


def average_ranks(values: Tensor) -> Tensor:
    """Return the rank of each value from 1 to N in float64; equal values get the mean of their ranks."""
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    ranks: Tensor = counts.cumsum(0) - (counts - 1).double() / 2
    return ranks[inverse]


def pearson(a: Tensor, b: Tensor) -> float:
    """Return the Pearson correlation of two scores of the same examples (N,); NaN if one of them is constant."""
    a, b = _as_float64(a, b)
    a, b = (a - a.mean(), b - b.mean()) if len(a) else (a, b)
    spread = (a.square().sum() * b.square().sum()).sqrt()
    return float((a * b).sum() / spread) if float(spread) > 0 else float("nan")


def spearman(a: Tensor, b: Tensor) -> float:
    """Return the Spearman rank correlation of two scores of the same examples (N,)."""
    a, b = _as_float64(a, b)
    return pearson(average_ranks(a), average_ranks(b))


def _as_float64(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    if a.ndim != 1 or a.shape != b.shape:
        raise EnfoldError(
            f"a and b must be scores of the same examples, got shapes {tuple(a.shape)} and {tuple(b.shape)}: "
            "pass two tensors of shape (N,)"
        )
    return a.detach().to("cpu", torch.float64), b.detach().to("cpu", torch.float64)
