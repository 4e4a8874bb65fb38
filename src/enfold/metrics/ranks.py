"""Ranks and correlations that do not depend on the order of equal values."""

from __future__ import annotations

import torch
from torch import Tensor

from enfold.errors import EnfoldError


def average_ranks(values: Tensor) -> Tensor:
    """The rank of each value from 1 to N, in float64; equal values share the mean of their ranks."""
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    ranks: Tensor = counts.cumsum(0) - (counts - 1).double() / 2
    return ranks[inverse]


def pearson(a: Tensor, b: Tensor) -> float:
    """The linear correlation of two scores of the same examples (N,); NaN where one of them never varies."""
    a, b = _paired(a, b)
    a, b = (a - a.mean(), b - b.mean()) if len(a) else (a, b)
    spread = (a.square().sum() * b.square().sum()).sqrt()
    return float((a * b).sum() / spread) if float(spread) > 0 else float("nan")


def spearman(a: Tensor, b: Tensor) -> float:
    """The correlation of the ranks: 1 if two scores put the examples into one order, whatever their scales."""
    a, b = _paired(a, b)
    return pearson(average_ranks(a), average_ranks(b))


def _paired(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    if a.ndim != 1 or a.shape != b.shape:
        raise EnfoldError(
            f"a correlation needs two scores of the same examples, got the shapes {tuple(a.shape)} and "
            f"{tuple(b.shape)}: pass two tensors of one shape (N,)"
        )
    return a.detach().to("cpu", torch.float64), b.detach().to("cpu", torch.float64)
