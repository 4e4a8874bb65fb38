"""CCA-Merge: members' hidden units are turned into one member's by the linear maps of canonical correlations.

    S_xx = E[x xᵀ] + γ I,  S_yy alike,  S_xy = E[x yᵀ]       x: units of the reference, y: of a member, centred    (1)
    U Λ Vᵀ = S_xx^-½ S_xy S_yy^-½                                                                                  (2)
    T = S_xx^½ U Vᵀ S_yy^-½,   T^-1 = S_yy^½ V Uᵀ S_xx^-½     T y is y in the coordinates of x                     (3)
    W̃ = T_l W T_{l-1}^-1,   b̃ = T_l b,   θ̄ = (1/M) Σ_m θ̃_m,   T = I for the reference                            (4)

A unit may become a mixture of several, which one-to-one matching cannot express; non-linearities do not commute with
T, so that members are no longer what they were before the mean is taken.

S. Horoi, A. M. O. Camacho, E. Belilovsky, G. Wolf: Harmony in Diversity: Merging Neural Networks with Canonical
Correlation Analysis, ICML 2024, arXiv:2407.05385.

Differs from the paper: groups of units are found for any network; heads and groups that no layer shows, or none on the
same samples in all members, are matched by weights, one to one; γ is relative to the mean variance of a group's units;
nothing else known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from enfold.data import Data
from enfold.errors import EnfoldError
from enfold.members import Members, State
from enfold.merging.activations import Watched
from enfold.merging.base import Merge
from enfold.merging.split import by_weights_first
from enfold.merging.states import mean_of, require_reference, states_of, units_of
from enfold.symmetry import Group, soft


@dataclass(frozen=True)
class CCAMerge(Merge):
    """The mean of the members after their units were mapped to one member's by canonical correlations."""

    reference: int = 0  # the member in whose coordinates the others are averaged
    gamma: float = 0.1  # added to variances, as a part of their mean; the more, the nearer T is to a rotation
    watch: Watched = "inputs"  # units as inputs of the next layers, or as outputs of their own
    examples: int = 4096  # of the training part, at most

    purpose: ClassVar[str] = "CCA-Merge"
    least: ClassVar[dict[str, float]] = {"reference": 0, "examples": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.gamma < math.inf:
            raise EnfoldError(f"gamma must be above 0, got {self.gamma}: 0.1 is usual; units that never fire need it")

    def merged(self, members: Members, data: Data, checkpoint: Path | None) -> State:
        """Equation (4)."""
        states = states_of(members)
        reference = require_reference(self.reference, len(states))
        symmetry = units_of(members.network(states[reference]), data, self.seed)
        states, seen = by_weights_first(
            states, symmetry, members, data, reference, self.watch, self.seed, examples=self.examples, mixed=True
        )
        for name, one in seen.items():
            covariance = one.covariance()
            for index in set(range(len(states))) - {reference}:
                ours, theirs = (one.block(covariance, which, which) for which in (reference, index))
                between = one.block(covariance, reference, index)
                there, back = canonical_map(ours, between, theirs, self.gamma)
                states[index] = soft(states[index], symmetry[name], there, back)  # (4)
                states[index] |= _variances(states[reference], symmetry[name])
        return mean_of(states)


def _variances(reference: State, group: Group) -> State:
    """Those of batch norms: T of (3) gives a member's units the reference's, and mixing them may leave one below 0."""
    return {axis.name: reference[axis.name] for axis in group.axes if axis.name.endswith("running_var")}


def canonical_map(xx: Tensor, xy: Tensor, yy: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """T and T^-1 of equation (3), from covariances, all (d, d) in float64."""
    ridge = gamma * float((xx.trace() + yy.trace()) / (2 * len(xx))) or 1.0
    (x_root, x_inverse), (y_root, y_inverse) = (_roots(s + ridge * torch.eye(len(s)).to(s)) for s in (xx, yy))  # (1)
    left, _, right = torch.linalg.svd(x_inverse @ xy @ y_inverse)  # (2)
    turn = left @ right
    return x_root @ turn @ y_inverse, y_root @ turn.mT @ x_inverse  # (3)


def _roots(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The symmetric square root of a positive definite matrix, and its inverse."""
    values, axes = torch.linalg.eigh(matrix)
    root = values.clamp_min(float(values.max()) * 1e-15).sqrt()
    return (axes * root) @ axes.mT, (axes / root) @ axes.mT
