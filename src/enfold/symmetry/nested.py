"""Nested groups: blocks of units (heads, experts) and the groups inside each block, which move along with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace

from torch import Tensor

from enfold.engines.skeleton import State
from enfold.symmetry.axes import Axis, Group, Symmetry


@dataclass(frozen=True)
class GroupTree:
    """A group and the groups inside its units: kinds of groups (of queries and keys, of values), with one per unit."""

    outer: Group
    inside: tuple[tuple[Group, ...], ...]
    each: Symmetry  # the groups inside one unit, relative to `unit`: one per kind

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups, the outer one first."""
        return (self.outer, *(group for kind in self.inside for group in kind))

    @property
    def coupled(self) -> bool:
        """True if kinds inside a unit act on the same weights, so that their orders depend on each other."""
        along = Counter(name for group in self.each for name in {axis.name for axis in group.axes})
        return any(number > 1 for number in along.values())

    def unit(self, state: State, number: int, names: Collection[str]) -> State:
        """Return one unit: its slice along each axis of the outer group, for these tensors.

        Args:
            state: The weights.
            number: The index of the unit.
            names: The names of the tensors.
        """
        present = [(str(k), axis) for k, axis in enumerate(self.outer.axes) if axis.name in names]
        return {key: _along(axis, state[axis.name], number) for key, axis in present}


def _along(axis: Axis, tensor: Tensor, unit: int) -> Tensor:
    """Return the tensor restricted to one unit along the axis, (..., outer x inner, ...)."""
    own = axis.units_first(tensor)[unit]
    return own.movedim((0, 1), (axis.axis, axis.axis + 1)).flatten(axis.axis, axis.axis + 1)


def group_trees(symmetry: Symmetry) -> list[GroupTree]:
    """Arrange the groups of a symmetry into trees, in the order of the symmetry.

    A group inside the units of two groups, neither of which contains the other, belongs to the first.
    """
    kinds = {group.name: _inside(group, symmetry) for group in symmetry.groups}
    inner = {group.name for some in kinds.values() for kind in some.values() for group in kind}
    found, taken = [], set[str]()
    for group in symmetry.groups:
        if group.name not in inner:
            own = {axes: kind for axes, kind in kinds[group.name].items() if kind[0].name not in taken}
            taken |= {one.name for kind in own.values() for one in kind}
            each = (Group(str(k), kind[0].size, axes) for k, (axes, kind) in enumerate(own.items()))
            found.append(GroupTree(group, tuple(own.values()), Symmetry(tuple(each), ())))
    return found


def _inside(outer: Group, symmetry: Symmetry) -> dict[tuple[Axis, ...], tuple[Group, ...]]:
    """Return the groups that are in exactly one unit each and exist in every unit, by their axes there."""
    kinds: dict[tuple[Axis, ...], dict[int, Group]] = {}
    for group in symmetry.groups:
        spots = [_spot(axis, outer) for axis in group.axes] if _spot(group.axes[0], outer) else []
        found = [spot for spot in spots if spot is not None]
        units = {unit for unit, _ in found}
        if group is not outer and len(found) == len(group.axes) and len(units) == 1:
            kinds.setdefault(tuple(axis for _, axis in found), {})[units.pop()] = group
    whole = {axes: kind for axes, kind in kinds.items() if len(kind) == outer.size}
    return {axes: tuple(kind[unit] for unit in range(outer.size)) for axes, kind in whole.items()}


def _spot(axis: Axis, outer: Group) -> tuple[int, Axis] | None:
    """Return the unit of the outer group in which an axis lies, and the axis relative to `GroupTree.unit`."""
    for number, over in enumerate(outer.axes):
        span = axis.span(over.axis) if axis.name == over.name else None
        if span is None or not all(_lies(axis.span(other), start, length) for other, start, length in over.within):
            continue
        repetition, place = divmod(span[0] - over.offset, over.size * over.inner)
        unit, start = divmod(place, over.inner)
        if 0 <= repetition < over.outer and start + span[1] <= over.inner:
            moved = {other: begin for other, begin, _ in over.within}
            moved[over.axis] = span[0] - repetition * over.inner - start
            within = tuple((other, begin - moved.get(other, 0), length) for other, begin, length in axis.within)
            offset = axis.offset - moved.get(axis.axis, 0)
            return unit, replace(axis, name=str(number), tied_to=None, offset=offset, within=within)
    return None


def _lies(span: tuple[int, int] | None, start: int, length: int) -> bool:
    return span is not None and start <= span[0] and sum(span) <= start + length
