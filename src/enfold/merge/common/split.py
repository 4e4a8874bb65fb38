"""Groups that activations can match, and the others, which are matched by weights before."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from enfold.engines.skeleton import State
from enfold.merge.common.activations import Moments, Place, Side, comparable_places, find_places, measure_moments
from enfold.merge.common.alignment import Alignment
from enfold.merge.common.assign import best_order
from enfold.symmetry import Axis, Group, Symmetry, match_weights, permute


def match_unobserved(
    alignment: Alignment, reference: int, watch: Side, seed: int, *, examples: int, mixed: bool = False
) -> tuple[list[State], dict[str, Moments]]:
    """Match by weights all groups that activations cannot match, and return the states and the others' moments.

    Blocks of units (heads) are matched by weights, since the units inside them may be in any order; so are groups that
    no layer shows, or only on samples whose order differs between members or depends on values, and, if units are to be
    `mixed`, groups of a tensor that both produces and consumes them. The other groups are put in the order of their
    activations while weights are compared, and back.

    Args:
        alignment: The members.
        reference: Index of the member to which others are matched.
        watch: Where units are observed.
        seed: Seed of the order of the examples and of matching.
        examples: Maximum number of training examples.
        mixed: Whether units will be combined by matrices other than permutations.
    """
    states, symmetry, ensemble, data = alignment.states, alignment.symmetry, alignment.ensemble, alignment.data
    own = states[reference]
    places = _select_places(find_places(ensemble.network(own), symmetry, watch), symmetry, mixed)
    places = _order_independent(places, [symmetry[name] for name in places], alignment, own)
    moments = measure_moments([ensemble.network(state) for state in states], places, data, examples=examples, seed=seed)
    if all(group.name in moments for group in symmetry.groups):
        return list(states), moments
    places = {name: places[name] for name in moments}
    observed = _order_independent(places, symmetry.groups, alignment, own)
    others = replace(symmetry, groups=tuple(group for group in symmetry.groups if group.name not in observed))
    correlations = {name: moments[name].correlation() for name in observed}
    matched = list(states)
    for index in set(range(len(states))) - {reference}:
        orders = {name: best_order(moments[name].block(each, reference, index)) for name, each in correlations.items()}
        near = permute(states[index], symmetry, orders)
        orders = match_weights(own, near, others, seed=seed, learned=alignment.parameters)
        matched[index] = permute(states[index], others, orders)
    networks = [ensemble.network(state) for state in matched]
    return matched, measure_moments(networks, places, data, examples=examples, seed=seed)


def match_by_activations_and_weights(
    own: State, state: State, symmetry: Symmetry, likeness: Mapping[str, Tensor], learned: Collection[str], seed: int
) -> dict[str, Tensor]:
    """Return orders by the likeness of units, (d, d) for each group, and by weights where several orders are equally
    good, as for constant units.

    Likeness is added as a further tensor along each group: <unit i of the identity, unit j> = likeness[i, j].

    Args:
        own: The state of the reference.
        state: The state to match.
        symmetry: The groups of units.
        likeness: The similarity of units by group.
        learned: The names of the tensors that are compared.
        seed: The seed.
    """
    groups = [symmetry[name] for name in likeness]
    names = {axis.name for group in groups for axis in group.axes if axis.name in learned}
    weight = 1e3 * sum(float(own[name].double().square().sum()) for name in names) / sum(g.size for g in groups)
    goal, held = dict(own), dict(state)
    for group in groups:
        goal[f"{group.name} likeness"] = weight * torch.eye(group.size, dtype=torch.float64)
        held[f"{group.name} likeness"] = likeness[group.name].mT.double()
    more = [replace(g, axes=(*g.axes, Axis(f"{g.name} likeness", 0, g.size))) for g in groups]
    counted = {*learned, *(goal.keys() - own.keys())}
    return match_weights(goal, held, replace(symmetry, groups=tuple(more)), seed=seed, learned=counted)


def _select_places(places: dict[str, list[Place]], symmetry: Symmetry, mixed: bool) -> dict[str, list[Place]]:
    """Remove groups that activations cannot match, even if layers show them."""
    found = {}
    for name, some in places.items():
        group, decided = symmetry[name], [place for place in some if not symmetry.depends_on_values(place.layer)]
        tied = mixed and any(axis.role == "both" for axis in group.axes)
        if decided and not tied and not _has_blocks(group, symmetry):
            found[name] = decided
    return found


def _order_independent(
    places: dict[str, list[Place]], groups: Iterable[Group], alignment: Alignment, state: State
) -> dict[str, list[Place]]:
    """Return the places that show the same samples for any order of these groups."""
    orders = {group.name: torch.arange(group.size).roll(1) for group in groups}
    network = alignment.ensemble.network
    moved = network(permute(state, alignment.symmetry, orders))
    return comparable_places(network(state), moved, orders, places, alignment.data)


def overlap(one: Group, other: Group) -> bool:
    """Return whether two groups permute the same elements of a tensor: blocks, and units inside them."""
    return one.name != other.name and any(_meet(axis, also) for axis in one.axes for also in other.axes)


def _meet(one: Axis, other: Axis) -> bool:
    if one.name != other.name or (one.span(other.axis) is None and other.span(one.axis) is None):
        return False
    spans = [(one.span(axis), other.span(axis)) for axis in {one.axis, other.axis, *(k for k, _, _ in one.within)}]
    return all(a is None or b is None or (a[0] < sum(b) and b[0] < sum(a)) for a, b in spans)


def _has_blocks(group: Group, symmetry: Symmetry) -> bool:
    """Return whether another group permutes the elements inside one of its units."""
    return any(overlap(group, other) and _per_unit(group, other) for other in symmetry.groups)


def _per_unit(group: Group, other: Group) -> bool:
    inner = {(axis.name, axis.axis): axis.inner for axis in group.axes}
    return any(
        length <= inner.get((axis.name, number), 0)
        for axis in other.axes
        for number, length in ((axis.axis, axis.size * axis.inner), *((k, length) for k, _, length in axis.within))
    )
