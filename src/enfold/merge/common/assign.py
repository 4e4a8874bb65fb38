"""Linear assignment of units by likeness."""

from __future__ import annotations

import torch
from torch import Tensor


def best_order(likeness: Tensor) -> Tensor:
    """Return the order with the largest sum of likeness[k, order[k]]; units that are all identical remain in place."""
    from scipy.optimize import linear_sum_assignment

    scale = float(likeness.abs().max())
    stay = (
        torch.eye(len(likeness), dtype=likeness.dtype) * 1e-9 * scale
    )  # breaks ties, such as those of units that are never active
    found = linear_sum_assignment((likeness.cpu() + stay).numpy(), maximize=True)[1]
    return torch.as_tensor(found)
