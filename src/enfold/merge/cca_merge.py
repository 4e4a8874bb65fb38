"""CCA-Merge: members' hidden units are mapped to one member's by canonical correlation analysis.

    S_xx = E[x xᵀ] + γ I,  S_yy = E[y yᵀ] + γ I,  S_xy = E[x yᵀ]   x: reference, y: member, centred    (1)
    U Λ Vᵀ = S_xx^-½ S_xy S_yy^-½                                                                                  (2)
    T = S_xx^½ U Vᵀ S_yy^-½,   T^-1 = S_yy^½ V Uᵀ S_xx^-½     T y is y in the coordinates of x                     (3)
    W̃ = T_l W T_{l-1}^-1,   b̃ = T_l b,   θ̄ = (1/M) Σ_m θ̃_m,   T = I for the reference                            (4)

A unit may become a mixture of several, which one-to-one matching cannot express; non-linearities do not commute with T,
so that the mapped members no longer compute the same function.

S. Horoi, A. M. O. Camacho, E. Belilovsky, G. Wolf: Harmony in Diversity: Merging Neural Networks with Canonical
Correlation Analysis, ICML 2024, arXiv:2407.05385.

Differs from the paper: groups of units are found for any network; heads, and groups that no layer shows, or none on the
same samples in all members, are matched by weights, one to one; γ is relative to the mean variance of a group's units;
where Λ is 0, as for units that are never active, U Vᵀ is not defined by (2): it is then the rotation nearest to the
permutation by correlations, or by weights for constant units; nothing else known.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.data.convert import Examples
from enfold.data.unpack import Unpack
from enfold.engines.skeleton import State
from enfold.merge.common.activations import Moments, Side
from enfold.merge.common.inputs import Models, prepare_inputs, require_reference
from enfold.merge.common.merging import build_network, observe_members
from enfold.merge.common.split import match_by_activations_and_weights
from enfold.merge.common.states import mean_of
from enfold.merge.repair import RepairKind
from enfold.symmetry import Group, Symmetry, soft

NONE = 1e-7  # correlations, which are at most 1, below this are rounding


@checked
def cca_merge(
    models: Models,
    train: Examples,
    *,
    reference: Annotated[int, Field(ge=0)] = 0,
    gamma: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1,
    watch: Side = "inputs",
    examples: Annotated[int, Field(ge=1)] = 4096,
    repair: RepairKind = "reset",
    seed: int = 0,
    unpack: Unpack | None = None,
) -> nn.Module:
    """Return the mean of the members after mapping their units to one member's by canonical correlations.

    Args:
        models: An ensemble, or networks of one architecture; they are not modified.
        train: Training examples on which units are compared.
        reference: Index of the member in whose coordinates the others are averaged.
        gamma: Added to variances, relative to their mean; the larger, the nearer T is to a rotation.
        watch: Where units are observed: as "inputs" of the next layers, or as "outputs" of their own.
        examples: Maximum number of training examples.
        repair: Statistics of the merged network: "reset" measures batch norms again, "none" averages them, "repair",
            "rescale" and "closed_form" also correct hidden units as `enfold.merge.repair` does.
        seed: Seed of the order of the examples and of matching.
        unpack: Function that splits a batch into (inputs, target); None for the usual structures of batches.

    Returns:
        A network of the members' class in eval mode; a single member is returned unchanged.

    Raises:
        EnfoldError: If the networks cannot be matched, or examples are needed and missing.
    """
    inputs = prepare_inputs("cca_merge", models, train, needs_train=True, unpack=unpack)
    require_reference(reference, inputs.ensemble.num_members)
    if inputs.ensemble.num_members == 1:
        return inputs.ensemble.member(0).eval()
    symmetry, states, moments = observe_members(inputs, reference, watch, seed, examples)
    covariances = {name: one.covariance() for name, one in moments.items()}
    learned = set(inputs.ensemble.skeleton.parameters)
    for index in set(range(len(states))) - {reference}:
        match = partial(_match, states[reference], states[index], symmetry, learned, seed)
        orders = cache(partial(match, _blocks(moments, reference, index)))
        for name, one in moments.items():
            ours, theirs = (one.block(covariances[name], which, which) for which in (reference, index))
            between = one.block(covariances[name], reference, index)
            there, back = canonical_map(ours, between, theirs, gamma, lambda: orders()[name])  # noqa: B023
            states[index] = soft(states[index], symmetry[name], there, back)  # (4)
            states[index] |= _variances(states[reference], symmetry[name])
    return build_network(inputs, mean_of(states), repair, seed)


def _blocks(moments: dict[str, Moments], reference: int, index: int) -> Callable[[], dict[str, Tensor]]:
    """Return a function that computes the correlations of the reference's units with a member's, by group."""
    return lambda: {name: one.block(one.correlation(), reference, index) for name, one in moments.items()}


def _match(
    own: State,
    state: State,
    symmetry: Symmetry,
    learned: set[str],
    seed: int,
    correlations: Callable[[], dict[str, Tensor]],
) -> dict[str, Tensor]:
    """Return one-to-one orders of a member's units by correlations, and by weights for constant units."""
    return match_by_activations_and_weights(own, state, symmetry, correlations(), learned, seed)


def _variances(reference: State, group: Group) -> State:
    """Return the reference's batch-norm variances, which T of (3) gives a member's units; mixed ones may be below 0."""
    return {axis.name: reference[axis.name] for axis in group.axes if axis.name.endswith("running_var")}


def canonical_map(
    xx: Tensor, xy: Tensor, yy: Tensor, gamma: float, order: Callable[[], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return T and T^-1 of equation (3), from covariances, all (d, d) in float64.

    Directions without correlation are mapped by the rotation nearest to the `order` of y's units.

    Args:
        xx: Covariance of the units of x.
        xy: Covariance of the units of x and y.
        yy: Covariance of the units of y.
        gamma: The regularisation γ.
        order: Returns the order of the units of y that is used for directions without correlation.
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
    """Return the symmetric square root of a positive definite matrix, and its inverse."""
    values, axes = torch.linalg.eigh(matrix)
    root = values.clamp_min(float(values.max()) * 1e-15).sqrt()
    return (axes * root) @ axes.mT, (axes / root) @ axes.mT
