"""Assignment: which unit goes where, so that the sum of likenesses is largest."""

from __future__ import annotations

import torch
from torch import Tensor


def best_order(likeness: Tensor) -> Tensor:
    """The order with the largest sum of likeness[k, order[k]]; units that are all alike stay where they are."""
    from scipy.optimize import linear_sum_assignment

    scale = float(likeness.abs().max())
    stay = torch.eye(len(likeness), dtype=likeness.dtype) * 1e-9 * scale  # ties, as of units that never fire
    found = linear_sum_assignment((likeness.cpu() + stay).numpy(), maximize=True)[1]
    return torch.as_tensor(found)
