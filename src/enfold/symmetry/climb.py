"""Climbing: orders of all groups that bring one state near to another, by steps of one nest of groups at a time.

A nest in its best order, the others fixed, is an assignment (see `gains`); a step that does not raise the inner product
is not taken, and the first round without one is the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from enfold.engines.skeleton import State
from enfold.seeds import generator
from enfold.symmetry.axes import Group, Symmetry
from enfold.symmetry.gains import Products, rise
from enfold.symmetry.nested import Nest, nests
from enfold.symmetry.permute import reordered
from enfold.symmetry.places import Places

ROUNDS = 100


def climb_orders(
    goal: State, held: State, symmetry: Symmetry, *, seed: int = 0, rounds: int = ROUNDS
) -> dict[str, Tensor]:
    """Orders, for `permute`, of all groups, from the higher one of two starts."""
    nested = nests(symmetry)
    climb = _Climb(goal, held, symmetry, nested)
    climb.place()
    if rise(goal, held, climb.held) <= 0:
        climb = _Climb(goal, held, symmetry, nested)
    climb.up(rounds, generator(seed, "match units"))
    return climb.places.orders(symmetry)


class _Climb:
    """A way up (1) from the orders that are given, one nest of groups at a time."""

    def __init__(self, goal: State, held: State, symmetry: Symmetry, nested: Sequence[Nest]) -> None:
        self.goal, self.held = goal, {name: tensor.clone() for name, tensor in held.items()}
        self.places, self.products = Places(symmetry), Products(goal, held, nested, climb_orders)

    def place(self) -> None:
        """The other start: nests are placed by what is known, first the one of which most weights are."""
        names, rest = self.products.names, set(range(len(self.products.names)))
        while rest:
            known = {one: names[one].difference(*(names[other] for other in rest - {one})) for one in sorted(rest)}
            index = max(known, key=lambda one: sum(self.goal[name].numel() for name in known[one]))
            rest.remove(index)
            self._take(index, self.products.best(self.held, index, known[index]).moves)

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
        certain = index not in self.products.beside[index] and step.gain > self.products.rounding[index]
        if not certain and self._rise(index, step.moves) <= step.noise:
            return False
        self._take(index, step.moves)
        return True

    def _rise(self, index: int, moves: Sequence[tuple[Group, Tensor]]) -> float:
        if self.products.simple[index]:
            return self.products.rise(self.held, index, moves[0][1])
        return rise(self.goal, self.held, _moved(self.held, moves))

    def _take(self, index: int, moves: Sequence[tuple[Group, Tensor]]) -> None:
        if self.products.simple[index]:
            self.products.move(self.held, index, moves[0][1])
        else:
            self.held = _moved(self.held, moves)
        for group, order in moves:
            self.places.move(group, order)


def _moved(state: State, moves: Sequence[tuple[Group, Tensor]]) -> State:
    """The tensors that are there, with groups in other orders."""
    present = ((group, tuple(axis for axis in group.axes if axis.name in state), order) for group, order in moves)
    return reordered(state, ((replace(group, axes=axes), order) for group, axes, order in present))
