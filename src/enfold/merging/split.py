"""Split: groups that can be matched by what units do, and the others, which are matched by weights before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from enfold.data import Data
from enfold.members import Members, State
from enfold.merging.activations import Place, Watched, moments, shown, watched
from enfold.merging.assign import best_order
from enfold.symmetry import Axis, Group, Symmetry, permute, weight_matching


def by_weights_first(
    states: Sequence[State],
    symmetry: Symmetry,
    members: Members,
    data: Data,
    reference: int,
    watch: Watched,
    seed: int,
    *,
    examples: int,
    mixed: bool = False,
) -> tuple[list[State], dict[str, list[Place]]]:
    """The states with all groups matched by weights that activations cannot match, and where the others are seen.

    Blocks of units (heads) are matched by weights, since the units inside them may be in any order; so are groups that
    no layer shows and, if units are to be `mixed`, those of a tensor that both produces and consumes them. What is
    beside them is put in the order of what it does while weights are compared, and back.
    """
    network = members.network(states[reference])
    places = shown(network, watched(network, symmetry, watch), data)
    seen = [group for group in symmetry.groups if group.name in places and not _holds_blocks(group, symmetry)]
    if mixed:
        seen = [group for group in seen if all(axis.role != "both" for axis in group.axes)]
    found = {group.name: places[group.name] for group in seen}
    rest = [group for group in symmetry.groups if group not in seen]
    if not rest:
        return list(states), found
    beside = {group.name: found[group.name] for group in seen if not any(overlap(group, other) for other in rest)}
    others = replace(symmetry, groups=tuple(group for group in symmetry.groups if group.name not in beside))
    likes = moments([members.network(state) for state in states], beside, data, examples=examples, seed=seed)
    alike = {name: one.correlation() for name, one in likes.items()}
    learned = set(members.skeleton.parameters)
    matched = list(states)
    for index in set(range(len(states))) - {reference}:
        orders = {name: best_order(likes[name].block(each, reference, index)) for name, each in alike.items()}
        near = permute(states[index], symmetry, orders)
        orders = weight_matching(states[reference], near, others, seed=seed, learned=learned)
        matched[index] = permute(states[index], others, orders)
    return matched, found


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
