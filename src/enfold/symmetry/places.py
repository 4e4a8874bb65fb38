"""Places: where each place of each axis came from, so that moves one after the other become one order a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from enfold.symmetry.axes import Axis, Group, Symmetry


def inverse(orders: Mapping[str, Tensor], symmetry: Symmetry) -> dict[str, Tensor]:
    """Orders, for `permute`, that undo these; units inside blocks are not where they were when the blocks are back."""
    places = Places(symmetry)
    for group in symmetry.groups:
        if group.name in orders:
            places.move(group, orders[group.name])
    places.now = {key: came.flatten().argsort().view(came.shape) for key, came in places.now.items()}
    return places.orders(symmetry)


class Places:
    """Where each place of each axis came from: moves inside and of blocks are put into one order a group by it.

    Axes of a tensor of which one is moved within parts of the other are followed together.
    """

    def __init__(self, symmetry: Symmetry) -> None:
        self.together: dict[str, list[set[int]]] = {}
        ends: dict[tuple[str, int], int] = {}
        for axis in (axis for group in symmetry.groups for axis in group.axes):
            own, apart = {axis.axis, *(other for other, _, _ in axis.within)}, []
            for known in self.together.get(axis.name, []):
                if own & known:
                    own |= known
                else:
                    apart.append(known)
            self.together[axis.name] = [*apart, own]
            for other in own:
                ends[axis.name, other] = max(ends.get((axis.name, other), 0), sum(axis.span(other) or (0,)))
        self.now = {
            (name, min(axes)): _numbered([ends[name, k] if k in axes else 1 for k in range(max(axes) + 1)])
            for name, sets in self.together.items()
            for axes in sets
        }

    def _key(self, axis: Axis) -> tuple[str, int]:
        return axis.name, min(next(axes for axes in self.together[axis.name] if axis.axis in axes))

    def move(self, group: Group, order: Tensor) -> None:
        """Units in another order."""
        for axis in group.axes:
            now = self.now[self._key(axis)]
            self.now[self._key(axis)] = axis.with_units(now, axis.units_first(now)[order])

    def orders(self, symmetry: Symmetry) -> dict[str, Tensor]:
        """What `permute` needs to get here; a group of blocks comes before the groups inside its blocks."""
        found, here = {}, Places(symmetry)
        for group in symmetry.groups:
            axis = group.axes[0]
            key = self._key(axis)
            ours, wanted = (axis.by_unit(places[key]).sort(1).values[:, 0] for places in (here.now, self.now))
            found[group.name] = (wanted.unsqueeze(1) == ours).long().argmax(1)
            here.move(group, found[group.name])
        return found


def _numbered(sizes: Sequence[int]) -> Tensor:
    return torch.arange(prod(sizes)).view(sizes)
