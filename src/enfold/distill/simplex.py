"""The point of a capped simplex with the least quadratic form, which is how a common direction of descent is found.

    min ½ aᵀ G a   subject to   Σ_m a_m = 1,   0 ≤ a_m ≤ C                                   (1)

An active-set method, exact up to rounding: on the face of the weights strictly between their bounds the minimum is a
linear system; where a weight is in the way it is put to its bound; at the face's minimum a pair of weights is moved
that may move and has the largest difference of slopes, until there is none (the conditions of Karush, Kuhn and
Tucker). Every such move lowers the objective, so no face comes twice. It starts from equal weights and moves no
further than it must: where G leaves weights open they stay as equal as the start.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from enfold.errors import EnfoldError

Array = npt.NDArray[np.float64]

# For a G whose largest entry is 1. A direction of less curvature than FLAT and more slope than SLOPE has its minimum 10
# or more away, which is outside of the simplex; one of less of both is left alone.
FLAT, SLOPE = 1e-13, 1e-12
TOLERANCE = 1e-11  # of the difference of two weights' slopes
ROUNDS = 1000  # far more than faces that are ever visited; rounding must not make it endless


def capped_simplex_weights(gram: Tensor, cap: float) -> Tensor:
    """The weights (M,) of equation (1) in float64, for a positive semi-definite G (M, M) and C = `cap`."""
    _check(gram, cap)
    matrix = gram.detach().cpu().double().numpy()
    size = len(matrix)
    weights = np.full(size, 1 / size)
    scale = float(np.abs(matrix).max())
    if scale > 0 and cap * size > 1 + TOLERANCE:
        weights = _solved(matrix / scale, weights, float(cap))
    return torch.from_numpy(weights).to(gram.device)


def _solved(gram: Array, weights: Array, cap: float) -> Array:
    for _ in range(ROUNDS):
        while _moved_on_face(gram, weights, cap):
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


def _moved_on_face(gram: Array, weights: Array, cap: float) -> bool:
    """Go to the minimum of the weights between their bounds; True if one of them met its bound on the way."""
    free = np.flatnonzero((weights > 0) & (weights < cap))
    if len(free) < 2:
        return False
    step, endless = _step(gram[np.ix_(free, free)], (gram @ weights)[free])
    room = np.where(step > 0, cap - weights[free], weights[free])
    with np.errstate(divide="ignore", invalid="ignore"):
        lengths = np.where(step == 0, np.inf, room / np.abs(step))
    first = int(lengths.argmin())
    if lengths[first] > 1 and not endless:
        weights[free] += step
        return False
    weights[free] = np.clip(weights[free] + lengths[first] * step, 0.0, cap)
    weights[free[first]] = cap if step[first] > 0 else 0.0
    return True


def _step(gram: Array, slope: Array) -> tuple[Array, bool]:
    """The shortest step to the minimum with the same sum, or, where there is none, a direction in which to go."""
    centred = gram - gram.mean(0)
    values, axes = np.linalg.eigh(centred - centred.mean(1, keepdims=True))
    along = axes.T @ (slope - slope.mean())
    flat = values <= FLAT
    if np.linalg.norm(along[flat]) > SLOPE:
        step, endless = -axes[:, flat] @ along[flat], True
    else:
        step, endless = -axes[:, ~flat] @ (along[~flat] / values[~flat]), False
    return step - step.mean(), endless  # what rounding does to the sum


def _check(gram: Tensor, cap: float) -> None:
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1] or not len(gram):
        raise EnfoldError(
            f"a quadratic form of M weights is a matrix (M, M), got {tuple(gram.shape)}: pass G[i, j] = g_i · g_j"
        )
    if not bool(torch.isfinite(gram).all()):
        raise EnfoldError("a quadratic form must be finite, got NaN or infinity: look for a diverged gradient")
    require_cap(cap, len(gram))


def require_cap(cap: float, size: int, name: str = "cap") -> None:
    """`size` weights that sum to 1 need room to do so."""
    if not (cap <= 1 and cap * size >= 1 - TOLERANCE):
        raise EnfoldError(
            f"the {name} on {size} weights that sum to 1 must be in [1/{size}, 1], got {cap}: the smallest is "
            f"{1 / size:.4g}, which makes them all equal"
        )
