"""The point of a capped simplex with the smallest quadratic form, which gives a common direction of descent.

    min ½ aᵀ G a   subject to   Σ_m a_m = 1,   0 ≤ a_m ≤ C                                   (1)

An active-set method, exact up to rounding: on the face of the weights strictly between their bounds the minimum is a
linear system; a weight that reaches its bound on the way is fixed there; at the minimum of a face the pair of free
weights with the largest difference of slopes is moved, until there is none (the Karush-Kuhn-Tucker conditions). Every
such move lowers the objective, so no face is visited twice. The start is equal weights and every move is the shortest:
where G does not determine the weights they stay as equal as at the start.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from enfold.errors import EnfoldError

Array = npt.NDArray[np.float64]

# For a G whose largest entry is 1. A direction of less curvature than FLAT and more slope than SLOPE has its minimum
# beyond the simplex, at a distance of 10 or more; a direction with less of both is not used.
FLAT, SLOPE = 1e-13, 1e-12
TOLERANCE = 1e-11  # of the difference of two slopes
ROUNDS = 1000  # far more than the faces that are visited; guards against an endless loop by rounding


def capped_simplex_weights(gram: Tensor, cap: float) -> Tensor:
    """Return the weights (M,) of equation (1) in float64, for a positive semi-definite G (M, M) and C = `cap`."""
    _check(gram, cap)
    matrix = gram.detach().cpu().double().numpy()
    size = len(matrix)
    weights = np.full(size, 1 / size)
    scale = float(np.abs(matrix).max())
    if scale > 0 and cap * size > 1 + TOLERANCE:
        weights = _solve(matrix / scale, weights, float(cap))
    return torch.from_numpy(weights).to(gram.device)


def _solve(gram: Array, weights: Array, cap: float) -> Array:
    for _ in range(ROUNDS):
        while _move_on_face(gram, weights, cap):
            pass
        slope = gram @ weights
        falls = int(np.where(weights > 0, slope, -np.inf).argmax())
        rises = int(np.where(weights < cap, slope, np.inf).argmin())
        difference = slope[falls] - slope[rises]
        if difference <= TOLERANCE:
            break
        curvature = gram[falls, falls] + gram[rises, rises] - 2 * gram[falls, rises]
        longest = min(weights[falls], cap - weights[rises])
        step = min(longest, difference / curvature) if curvature > 0 else longest
        weights[falls] = 0.0 if step == weights[falls] else weights[falls] - step
        weights[rises] = cap if step == cap - weights[rises] else weights[rises] + step
    return weights


def _move_on_face(gram: Array, weights: Array, cap: float) -> bool:
    """Move to the minimum of the weights between their bounds; return whether one reached its bound on the way."""
    free = np.flatnonzero((weights > 0) & (weights < cap))
    if len(free) < 2:
        return False
    step, endless = _step(gram[np.ix_(free, free)], (gram @ weights)[free])
    margin = np.where(step > 0, cap - weights[free], weights[free])
    with np.errstate(divide="ignore", invalid="ignore"):
        lengths = np.where(step == 0, np.inf, margin / np.abs(step))
    first = int(lengths.argmin())
    if lengths[first] > 1 and not endless:
        weights[free] += step
        return False
    weights[free] = np.clip(weights[free] + lengths[first] * step, 0.0, cap)
    weights[free[first]] = cap if step[first] > 0 else 0.0
    return True


def _step(gram: Array, slope: Array) -> tuple[Array, bool]:
    """Return the shortest step to the minimum with the same sum, or a direction without one, and whether it is that."""
    centred = gram - gram.mean(0)
    values, axes = np.linalg.eigh(centred - centred.mean(1, keepdims=True))
    along = axes.T @ (slope - slope.mean())
    flat = values <= FLAT
    if np.linalg.norm(along[flat]) > SLOPE:
        step, endless = -axes[:, flat] @ along[flat], True
    else:
        step, endless = -axes[:, ~flat] @ (along[~flat] / values[~flat]), False
    return step - step.mean(), endless  # corrects the rounding of the sum


def _check(gram: Tensor, cap: float) -> None:
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1] or not len(gram):
        raise EnfoldError(f"gram must be a matrix (M, M), got {tuple(gram.shape)}: pass G[i, j] = g_i · g_j")
    if not bool(torch.isfinite(gram).all()):
        raise EnfoldError("gram must be finite, got NaN or infinity: lower the learning rate")
    require_cap(cap, len(gram))


def require_cap(cap: float, size: int, name: str = "cap") -> None:
    """Raise an error unless `size` weights of at most `cap` can sum to 1."""
    if not (cap <= 1 and cap * size >= 1 - TOLERANCE):
        raise EnfoldError(
            f"{name} must be in [1/{size}, 1] for {size} weights that sum to 1, got {cap}: use {1 / size:.4g} for "
            "equal weights"
        )
