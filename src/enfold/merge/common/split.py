"""Split: groups that can be matched by what units do, and the others, which are matched by weights before."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from enfold.data import Data
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.merge.common.activations import Moments, Place, Watched, comparable, moments, watched
from enfold.merge.common.assign import best_order
from enfold.symmetry import Axis, Group, Symmetry, permute, weight_matching


def by_weights_first(
    states: Sequence[State],
    symmetry: Symmetry,
    members: Ensemble,
    data: Data,
    reference: int,
    watch: Watched,
    seed: int,
    *,
    examples: int,
    mixed: bool = False,
) -> tuple[list[State], dict[str, Moments]]:
    """The states with all groups matched by weights that activations cannot match, and what the others do.

    Blocks of units (heads) are matched by weights, since the units inside them may be in any order; so are groups that
    no layer shows, or only on samples that are in another order in each member or chosen by values, and, if units are
    to be `mixed`, those of a tensor that both produces and consumes them. What is beside them is put in the order of
    what it does while weights are compared, and back.
    """
    own = states[reference]
    places = _chosen(watched(members.network(own), symmetry, watch), symmetry, mixed)
    places = _in_any_order(places, [symmetry[name] for name in places], own, symmetry, members, data)
    seen = moments([members.network(state) for state in states], places, data, examples=examples, seed=seed)
    if all(group.name in seen for group in symmetry.groups):
        return list(states), seen
    places = {name: places[name] for name in seen}
    beside = _in_any_order(places, symmetry.groups, own, symmetry, members, data)
    others = replace(symmetry, groups=tuple(group for group in symmetry.groups if group.name not in beside))
    alike = {name: seen[name].correlation() for name in beside}
    learned = set(members.skeleton.parameters)
    matched = list(states)
    for index in set(range(len(states))) - {reference}:
        orders = {name: best_order(seen[name].block(each, reference, index)) for name, each in alike.items()}
        near = permute(states[index], symmetry, orders)
        orders = weight_matching(own, near, others, seed=seed, learned=learned)
        matched[index] = permute(states[index], others, orders)
    return matched, moments([members.network(state) for state in matched], places, data, examples=examples, seed=seed)


def orders_by_both(
    own: State, state: State, symmetry: Symmetry, alike: Mapping[str, Tensor], learned: Collection[str], seed: int
) -> dict[str, Tensor]:
    """Orders by what units do, (d, d) for each group, and by weights where that leaves several, as of still units.

    Likeness counts as one more tensor along a group does: <unit i of the identity, unit j> = likeness[i, j].
    """
    groups = [symmetry[name] for name in alike]
    names = {axis.name for group in groups for axis in group.axes if axis.name in learned}
    weight = 1e3 * sum(float(own[name].double().square().sum()) for name in names) / sum(g.size for g in groups)
    goal, held = dict(own), dict(state)
    for group in groups:
        goal[f"{group.name} likeness"] = weight * torch.eye(group.size, dtype=torch.float64)
        held[f"{group.name} likeness"] = alike[group.name].mT.double()
    more = [replace(g, axes=(*g.axes, Axis(f"{g.name} likeness", 0, g.size))) for g in groups]
    counted = {*learned, *(goal.keys() - own.keys())}
    return weight_matching(goal, held, replace(symmetry, groups=tuple(more)), seed=seed, learned=counted)


def _chosen(places: dict[str, list[Place]], symmetry: Symmetry, mixed: bool) -> dict[str, list[Place]]:
    """Without groups that are not for activations, whatever the layers show."""
    found = {}
    for name, some in places.items():
        group, outside = symmetry[name], [place for place in some if not symmetry.decided(place.layer)]
        tied = mixed and any(axis.role == "both" for axis in group.axes)
        if outside and not tied and not _holds_blocks(group, symmetry):
            found[name] = outside
    return found


def _in_any_order(
    places: dict[str, list[Place]],
    groups: Iterable[Group],
    state: State,
    symmetry: Symmetry,
    members: Ensemble,
    data: Data,
) -> dict[str, list[Place]]:
    """The places that show the same samples in whatever order these groups are."""
    orders = {group.name: torch.arange(group.size).roll(1) for group in groups}
    moved = members.network(permute(state, symmetry, orders))
    return comparable(members.network(state), moved, orders, places, data)


def overlap(one: Group, other: Group) -> bool:
    """Whether two groups order the same places of a tensor: blocks, and units inside them."""
    return one.name != other.name and any(_meet(axis, also) for axis in one.axes for also in other.axes)


def _meet(one: Axis, other: Axis) -> bool:
    if one.name != other.name or (one.span(other.axis) is None and other.span(one.axis) is None):
        return False
    spans = [(one.span(axis), other.span(axis)) for axis in {one.axis, other.axis, *(k for k, _, _ in one.within)}]
    return all(a is None or b is None or (a[0] < sum(b) and b[0] < sum(a)) for a, b in spans)


def _holds_blocks(group: Group, symmetry: Symmetry) -> bool:
    """Whether another group orders what is inside one of its units."""
    return any(overlap(group, other) and _per_unit(group, other) for other in symmetry.groups)


def _per_unit(group: Group, other: Group) -> bool:
    inner = {(axis.name, axis.axis): axis.inner for axis in group.axes}
    return any(
        length <= inner.get((axis.name, number), 0)
        for axis in other.axes
        for number, length in ((axis.axis, axis.size * axis.inner), *((k, length) for k, _, length in axis.within))
    )
