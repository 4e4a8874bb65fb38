"""Coordinate ascent: permute one group (with the groups inside it) at a time to align one state with another.

The best order of a group with the others fixed is a linear assignment (see `assignment`); a step that does not increase
the inner product is rejected, and the first round without a step ends the search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from enfold.engines.skeleton import State
from enfold.seeds import generator
from enfold.symmetry.assignment import GainMatrices, increase
from enfold.symmetry.axes import Group, Symmetry
from enfold.symmetry.nested import GroupTree, group_trees
from enfold.symmetry.permute import OrderTracker, apply_orders

ROUNDS = 100


def ascend(goal: State, held: State, symmetry: Symmetry, *, seed: int = 0, rounds: int = ROUNDS) -> dict[str, Tensor]:
    """Return orders for `permute` that align `held` with `goal`, from the better of two initialisations.

    Args:
        goal: The state to match.
        held: The state that is permuted.
        symmetry: The groups of units.
        seed: The seed.
        rounds: The maximum number of rounds.
    """
    nested = group_trees(symmetry)
    ascent = _Ascent(goal, held, symmetry, nested)
    ascent.place()
    if increase(goal, held, ascent.held) <= 0:
        ascent = _Ascent(goal, held, symmetry, nested)
    ascent.up(rounds, generator(seed, "match units"))
    return ascent.places.orders(symmetry)


class _Ascent:
    """Coordinate ascent from given orders, one group tree at a time."""

    def __init__(self, goal: State, held: State, symmetry: Symmetry, nested: Sequence[GroupTree]) -> None:
        self.goal, self.held = goal, {name: tensor.clone() for name, tensor in held.items()}
        self.places, self.products = OrderTracker(symmetry), GainMatrices(goal, held, nested, ascend)

    def place(self) -> None:
        """Initialise greedily: order trees by weights whose other groups are placed already, the largest set first."""
        names, rest = self.products.names, set(range(len(self.products.names)))
        while rest:
            known = {one: names[one].difference(*(names[other] for other in rest - {one})) for one in sorted(rest)}
            index = max(known, key=lambda one: sum(self.goal[name].numel() for name in known[one]))
            rest.remove(index)
            self._take(index, self.products.best(self.held, index, known[index]).moves)

    def up(self, rounds: int, source: torch.Generator) -> None:
        """Optimise one tree after another until none improves."""
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
        """Put one tree into its best order with the others fixed, and return whether that is an improvement."""
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
            return self.products.increase(self.held, index, moves[0][1])
        return increase(self.goal, self.held, _permute(self.held, moves))

    def _take(self, index: int, moves: Sequence[tuple[Group, Tensor]]) -> None:
        if self.products.simple[index]:
            self.products.move(self.held, index, moves[0][1])
        else:
            self.held = _permute(self.held, moves)
        for group, order in moves:
            self.places.move(group, order)


def _permute(state: State, moves: Sequence[tuple[Group, Tensor]]) -> State:
    """Return the state with groups permuted, ignoring tensors that it does not contain."""
    present = ((group, tuple(axis for axis in group.axes if axis.name in state), order) for group, order in moves)
    return apply_orders(state, ((replace(group, axes=axes), order) for group, axes, order in present))
