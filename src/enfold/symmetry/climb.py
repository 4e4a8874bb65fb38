"""Climbing: orders of all groups that bring one state near to another, by steps of one nest of groups at a time.

A nest in its best order, the others fixed, is an assignment (see `gains`); a step that does not raise the inner product
is not taken, and the first round without one is the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from enfold.members import State
from enfold.seeds import generator
from enfold.symmetry.axes import Axis, Group, Symmetry
from enfold.symmetry.gains import Products, rise
from enfold.symmetry.nested import Nest, nests
from enfold.symmetry.permute import reordered

ROUNDS = 100


def climbed(goal: State, held: State, symmetry: Symmetry, *, seed: int = 0, rounds: int = ROUNDS) -> dict[str, Tensor]:
    """Orders, for `permute`, of all groups: the higher of two ends where units are in blocks."""
    nested = nests(symmetry)
    climb = _Climb(goal, held, symmetry, nested)
    climb.up(rounds, generator(seed, "match units"))
    if any(nest.inside or any(axis.outer > 1 for axis in nest.outer.axes) for nest in nested):
        other = _Climb(goal, held, symmetry, nested)
        other.place()
        other.up(rounds, generator(seed, "match units"))
        climb = max(climb, other, key=lambda one: rise(goal, held, one.held))
    return climb.places.orders(symmetry)


class _Climb:
    """A way up (1) from the orders that are given, one nest of groups at a time."""

    def __init__(self, goal: State, held: State, symmetry: Symmetry, nested: Sequence[Nest]) -> None:
        self.goal, self.held = goal, held
        self.places, self.products = _Places(symmetry), Products(goal, held, nested, climbed)

    def place(self) -> None:
        """Another start: nests are placed by what is known, first the one of which most weights are."""
        names, rest = self.products.names, set(range(len(self.products.names)))
        while rest:
            known = {one: names[one].difference(*(names[other] for other in rest - {one})) for one in sorted(rest)}
            index = max(known, key=lambda one: sum(self.goal[name].numel() for name in known[one]))
            rest.remove(index)
            moves = self.products.best(self.held, index, known[index]).moves
            self._take(index, moves, _moved(self.held, moves))

    def up(self, rounds: int, source: torch.Generator) -> None:
        """Steps of one nest after another, until none raises (1)."""
        settled = {index for index, names in enumerate(self.products.names) if not names}
        for _ in range(rounds):  # what is settled was at its best, and nothing beside it has moved since
            for index in torch.randperm(len(self.products.names), generator=source).tolist():
                if index not in settled:
                    settled.add(index)
                    if self._step(index):
                        settled -= self.products.beside[index]
            if len(settled) == len(self.products.names):
                break

    def _step(self, index: int) -> bool:
        """One nest in its best order, the others fixed; whether that raises (1)."""
        step = self.products.best(self.held, index, self.products.names[index])
        if step.gain <= step.noise:
            return False
        moved = _moved(self.held, step.moves)
        certain = index not in self.products.beside[index] and step.gain > self.products.rounding[index]
        if not certain and rise(self.goal, self.held, moved) <= step.noise:
            return False
        self._take(index, step.moves, moved)
        return True

    def _take(self, index: int, moves: Sequence[tuple[Group, Tensor]], moved: State) -> None:
        self.held = moved
        for group, order in moves:
            self.places.move(group, order)
        self.products.move(index, moves[0][1])


def _moved(state: State, moves: Sequence[tuple[Group, Tensor]]) -> State:
    """The tensors that are there, with groups in other orders."""
    present = ((group, tuple(axis for axis in group.axes if axis.name in state), order) for group, order in moves)
    return reordered(state, ((replace(group, axes=axes), order) for group, axes, order in present))


class _Places:
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
        found, here = {}, _Places(symmetry)
        for group in symmetry.groups:
            axis = group.axes[0]
            key = self._key(axis)
            ours, wanted = (axis.by_unit(places[key]).sort(1).values[:, 0] for places in (here.now, self.now))
            found[group.name] = (wanted.unsqueeze(1) == ours).long().argmax(1)
            here.move(group, found[group.name])
        return found


def _numbered(sizes: Sequence[int]) -> Tensor:
    return torch.arange(prod(sizes)).view(sizes)
