"""Nested groups: blocks of units (heads), and the groups of units inside each block, which move along with it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from enfold.symmetry.axes import Axis, Group, Symmetry


@dataclass(frozen=True)
class Nest:
    """A group and what is inside its units: kinds of them (of queries and keys, of values), with one group a unit."""

    outer: Group
    inside: tuple[tuple[Group, ...], ...] = ()

    @property
    def groups(self) -> tuple[Group, ...]:
        """All of them, the outer one first."""
        return (self.outer, *(group for kind in self.inside for group in kind))


def nests(symmetry: Symmetry) -> list[Nest]:
    """All groups as the symmetry lists them; a group inside the units of another is in that one's nest."""
    found = [Nest(group, _inside(group, symmetry)) for group in symmetry.groups]
    inner = {group.name for nest in found for group in nest.groups[1:]}
    return [nest for nest in found if nest.outer.name not in inner]


def _inside(outer: Group, symmetry: Symmetry) -> tuple[tuple[Group, ...], ...]:
    """Groups that lie in one unit each, and in every unit alike."""
    kinds: dict[tuple[Axis, ...], dict[int, Group]] = {}
    for group in symmetry.groups if any(axis.inner > 1 for axis in outer.axes) else ():
        spots = [spot for axis in group.axes if (spot := _spot(axis, outer)) is not None]
        units = {unit for unit, _ in spots}
        if group is not outer and len(spots) == len(group.axes) and len(units) == 1:
            kinds.setdefault(tuple(axis for _, axis in spots), {})[units.pop()] = group
    return tuple(tuple(kind[unit] for unit in range(outer.size)) for kind in kinds.values() if len(kind) == outer.size)


def _spot(axis: Axis, outer: Group) -> tuple[int, Axis] | None:
    """The unit of the outer group in which an axis lies, and the axis that is there in unit 0."""
    for over in outer.axes:
        repetition, place = divmod(axis.offset - over.offset, over.size * over.inner)
        unit, start = divmod(place, over.inner)
        along = (axis.name, axis.axis) == (over.name, over.axis) and 0 <= repetition < over.outer
        if along and start + axis.length <= over.inner:
            return unit, replace(axis, offset=axis.offset - unit * over.inner)
    return None
