"""Principal axes of a few points in parameter space, computed from their K x K Gram matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from enfold.engines.skeleton import State


def stack_states(states: list[State]) -> State:
    """Return the states stacked by parameter, (K, ...)."""
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def principal_axes(points: State, rank: int, *, scaled: bool = False) -> Tensor:
    """Return at most `rank` principal axes, each as its weights on the centred points X: (K, r).

    u_i = X^T a_i / √λ_i with X X^T a_i = λ_i a_i has unit norm; with `scaled` its norm is the standard
    deviation along the axis. K points have at most K - 1 axes; those without extent are left out.
    """
    centred = [(tensor - tensor.mean(0)).flatten(1).cpu().double() for tensor in points.values()]
    values, vectors = torch.linalg.eigh(torch.stack([X @ X.T for X in centred]).sum(0))  # (K,) ascending, (K, K)
    values, vectors = values.flip(0)[:rank], vectors.flip(1)[:, :rank]
    there = values > 1e-12 * values[0]
    lengths = values / len(vectors) if scaled else torch.ones_like(values)
    axes: Tensor = vectors[:, there] * (lengths / values)[there].sqrt()
    return axes


def combine_points(points: State, weights: Tensor) -> State:
    """Return the mean of the points plus weights (M, K) times the centred points, (M, ...) for each parameter."""
    means = {name: tensor.mean(0) for name, tensor in points.items()}
    return {n: means[n] + torch.tensordot(weights.to(t), t - means[n], dims=1) for n, t in points.items()}
