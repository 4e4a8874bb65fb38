"""Places: where each place of each axis came from, so that moves one after the other become one order a group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from enfold.symmetry.axes import Group, Symmetry


def inverse(orders: Mapping[str, Tensor], symmetry: Symmetry) -> dict[str, Tensor]:
    """Orders, for `permute`, that undo these; units inside blocks are not where they were when the blocks are back."""
    places = Places(symmetry)
    for group in symmetry.groups:
        if group.name in orders:
            places.move(group, orders[group.name])
    places.now = {key: came.argsort() for key, came in places.now.items()}
    return places.orders(symmetry)


class Places:
    """Where each place of each axis came from: moves inside and of blocks are put into one order a group by it."""

    def __init__(self, symmetry: Symmetry) -> None:
        self.now = self._start(symmetry)

    @staticmethod
    def _start(symmetry: Symmetry) -> dict[tuple[str, int], Tensor]:
        ends: dict[tuple[str, int], int] = {}
        for group in symmetry.groups:
            for axis in group.axes:
                key = (axis.name, axis.axis)
                ends[key] = max(ends.get(key, 0), axis.offset + axis.length)
        return {key: torch.arange(end) for key, end in ends.items()}

    def move(self, group: Group, order: Tensor) -> None:
        """Units in another order."""
        for axis in group.axes:
            key, flat = (axis.name, axis.axis), replace(axis, axis=0)
            self.now[key] = flat.with_units(self.now[key], flat.units_first(self.now[key])[order])

    def orders(self, symmetry: Symmetry) -> dict[str, Tensor]:
        """What `permute` needs to get here; a group of blocks comes before the groups inside its blocks."""
        found, here = {}, Places(symmetry)
        for group in symmetry.groups:
            axis = replace(group.axes[0], axis=0)
            key = (axis.name, group.axes[0].axis)
            ours, wanted = (axis.by_unit(places[key]).sort(1).values[:, 0] for places in (here.now, self.now))
            found[group.name] = (wanted.unsqueeze(1) == ours).long().argmax(1)
            here.move(group, found[group.name])
        return found
