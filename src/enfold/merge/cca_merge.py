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
where Λ is 0, as of units that never fire, U Vᵀ is not defined by (2): it is the rotation nearest to the permutation of
units that are most alike, or have the likest weights if they never move; nothing else known.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from enfold.data import Data
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError
from enfold.merge.common.activations import Moments, Watched
from enfold.merge.common.base import Merge
from enfold.merge.common.split import by_weights_first, orders_by_both
from enfold.merge.common.states import mean_of, require_reference, states_of, units_of
from enfold.symmetry import Group, Symmetry, soft

NONE = 1e-7  # of a correlation, which is at most 1: what rounding leaves


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

    def merged(self, members: Ensemble, data: Data, checkpoint: Path | None) -> State:
        """Equation (4)."""
        states = states_of(members)
        reference = require_reference(self.reference, len(states))
        symmetry = units_of(members.network(states[reference]), data, self.seed)
        states, seen = by_weights_first(
            states, symmetry, members, data, reference, self.watch, self.seed, examples=self.examples, mixed=True
        )
        covariances = {name: one.covariance() for name, one in seen.items()}
        for index in set(range(len(states))) - {reference}:
            orders = cache(partial(self._orders, states[reference], states[index], index, symmetry, members, seen))
            for name, one in seen.items():
                ours, theirs = (one.block(covariances[name], which, which) for which in (reference, index))
                between = one.block(covariances[name], reference, index)
                there, back = canonical_map(ours, between, theirs, self.gamma, lambda: orders()[name])  # noqa: B023
                states[index] = soft(states[index], symmetry[name], there, back)  # (4)
                states[index] |= _variances(states[reference], symmetry[name])
        return mean_of(states)

    def _orders(
        self, own: State, state: State, index: int, symmetry: Symmetry, members: Ensemble, seen: dict[str, Moments]
    ) -> dict[str, Tensor]:
        """A member's units in the order of the reference's, one to one."""
        alike = {name: one.block(one.correlation(), self.reference, index) for name, one in seen.items()}
        return orders_by_both(own, state, symmetry, alike, set(members.skeleton.parameters), self.seed)


def _variances(reference: State, group: Group) -> State:
    """Those of batch norms: T of (3) gives a member's units the reference's, and mixing them may leave one below 0."""
    return {axis.name: reference[axis.name] for axis in group.axes if axis.name.endswith("running_var")}


def canonical_map(
    xx: Tensor, xy: Tensor, yy: Tensor, gamma: float, order: Callable[[], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """T and T^-1 of equation (3), from covariances, all (d, d) in float64.

    Directions without a correlation are mapped as nearly as may be to where the `order` of y's units puts them.
    """
    ridge = gamma * float((xx.trace() + yy.trace()) / (2 * len(xx))) or 1.0
    (x_root, x_inverse), (y_root, y_inverse) = (_roots(s + ridge * torch.eye(len(s)).to(s)) for s in (xx, yy))  # (1)
    left, values, right = torch.linalg.svd(x_inverse @ xy @ y_inverse)  # (2)
    free = int((values <= NONE).sum())
    if free:  # U and V are any there
        places = order() if order is not None else torch.arange(len(xx))
        first, _, last = torch.linalg.svd(left[:, -free:].mT[:, places.argsort()] @ right[-free:].mT)
        left = torch.cat([left[:, :-free], left[:, -free:] @ first @ last], dim=1)
    turn = left @ right
    return x_root @ turn @ y_inverse, y_root @ turn.mT @ x_inverse  # (3)


def _roots(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The symmetric square root of a positive definite matrix, and its inverse."""
    values, axes = torch.linalg.eigh(matrix)
    root = values.clamp_min(float(values.max()) * 1e-15).sqrt()
    return (axes * root) @ axes.mT, (axes / root) @ axes.mT
