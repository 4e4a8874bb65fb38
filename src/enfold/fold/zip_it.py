"""ZipIt!: the M d units of all members are merged two by two, also inside one member, until d are left.

    C = correlations of all M d units of a group; the pair with the largest is merged, again and again               (1)
    likeness of a merged unit to another = a · min of the two's, with a from the M-th on                             (2)
    Merge (d, M d): the mean of what is in a unit;   Unmerge (M d, d): 1 where a unit came from                      (3)
    W* = Merge_l · blockdiag(W_1 .. W_M) · Unmerge_{l-1},   (1/M) Σ where nothing is merged (the logits)             (4)

Members trained on different things keep features that no other member has, because like units of one member make room.

G. Stoica, D. Bolya, J. Bjorner, P. Ramesh, T. Hearn, J. Hoffman: ZipIt! Merging Models from Different Tasks without
Training, ICLR 2024, arXiv:2305.03053.

Differs from the paper: all layers are zipped, so that one network of the members' class is left; units that stay at one
value are alike; among pairs that are equally alike, those of one place are taken first; where budgets leave no pair,
any is taken; a unit is discounted (2) once it holds M, which for two members is as in the paper, so that one unit of
each may come together; groups of units are found for any network; heads and groups that no layer shows, or none on the
same samples in all members, are matched by weights; a budget below one merge allows none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from enfold.data import Data
from enfold.errors import EnfoldError
from enfold.members import Members, State
from enfold.merging.activations import Watched
from enfold.merging.base import Merge
from enfold.merging.split import by_weights_first
from enfold.merging.states import mean_of, states_of, units_of
from enfold.symmetry import Axis, soft

SAME_PLACE = 1e-9  # added to the likeness of two members' units of one place
LAST = -1e3  # the likeness of units that are merged only where nothing else is left


@dataclass(frozen=True)
class ZipIt(Merge):
    """One network of the most alike units of all members, merged within and across them."""

    discount: float = 0.3  # a: the likeness of a merged unit; below 1, chains of merges are rare
    budget: float = 0.125  # b: how many of a member's units may go into another of its own, as a part of d (M-1)/M
    watch: Watched = "inputs"  # units as inputs of the next layers, or as outputs of their own
    examples: int = 4096  # of the training part, at most

    purpose: ClassVar[str] = "ZipIt"
    least: ClassVar[dict[str, float]] = {"examples": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("discount", "budget"):
            if not 0 <= getattr(self, name) <= 1:
                raise EnfoldError(f"{name} must be in [0, 1], got {getattr(self, name)}: 0.3 and 0.125 are usual")

    def merged(self, members: Members, data: Data, checkpoint: Path | None) -> State:
        """Equation (4)."""
        states = states_of(members)
        symmetry = units_of(members.network(states[0]), data, self.seed)
        states, seen = by_weights_first(
            states, symmetry, members, data, 0, self.watch, self.seed, examples=self.examples, mixed=True
        )
        made: list[Axis] = []  # what members are put together in by Merge, and not by the mean
        for name, one in seen.items():
            unmerge = zipped(one.correlation(), len(states), self.discount, self.budget)  # (M d, d)
            merge = (unmerge / unmerge.sum(0)).mT  # (3)
            for index, state in enumerate(states):
                rows = slice(index * one.size, (index + 1) * one.size)
                states[index] = soft(state, symmetry[name], merge[:, rows], unmerge[rows])
            made += [axis for axis in symmetry[name].axes if not axis.divided]
        return _joined(states, made)


def zipped(likeness: Tensor, num_members: int, discount: float = 0.3, budget: float = 0.125) -> Tensor:
    """Unmerge of equation (3), (M d, d): which of d units each of the M d is part of."""
    pairs = _Pairs(likeness, num_members, discount, budget)
    total = len(likeness)
    units = torch.eye(total, dtype=likeness.dtype)
    for _ in range(total - total // num_members):
        row, column = pairs.most_alike()
        units[row] += units[column]
        units[column] = 0
        pairs.merge(row, column)
    return units[units.sum(1) > 0].mT.contiguous()


class _Pairs:
    """How alike all pairs of units are, and which pairs may be merged."""

    def __init__(self, likeness: Tensor, num_members: int, discount: float, budget: float) -> None:
        total = len(likeness)
        size = total // num_members
        place, self.member = torch.arange(total) % size, torch.arange(total) // size
        self.likes, self.discount, self.full = likeness.clone(), discount, num_members
        self.held = torch.ones(total)  # how many units each one holds
        self.within = self.member[:, None] == self.member
        self.likes[(place[:, None] == place) & ~self.within] += SAME_PLACE
        self.live = ~torch.eye(total, dtype=torch.bool)
        self.allowed = self.live.clone()
        self.left = [int((total - size) / num_members * budget + 1e-4)] * num_members
        for index in range(num_members):
            self._close(index)

    def _close(self, member: int) -> None:
        """No more merges inside a member whose budget is spent."""
        if self.left[member] <= 0:
            self.allowed[self.within & (self.member == member)] = False

    def most_alike(self) -> tuple[int, int]:
        """The pair to be merged; where none is allowed any more, any pair."""
        open_pairs = self.allowed if bool(self.allowed.any()) else self.live
        row, column = sorted(divmod(int(self.likes.masked_fill(~open_pairs, -torch.inf).argmax()), len(self.likes)))
        return row, column

    def merge(self, row: int, column: int) -> None:
        """The second goes into the first."""
        self.held[row] += self.held[column]
        merged = torch.minimum(self.likes[row], self.likes[column])  # (2)
        if self.held[row] >= self.full:
            merged = merged * self.discount if self.discount else torch.full_like(merged, LAST)
        self.likes[row] = self.likes[:, row] = merged
        both = self.allowed[row] & self.allowed[column]
        self.allowed[row] = self.allowed[:, row] = both
        for pairs in (self.allowed, self.live):
            pairs[column] = pairs[:, column] = False
        if self.member[row] == self.member[column]:
            self.left[int(self.member[row])] -= 1
            self._close(int(self.member[row]))


def _joined(states: Sequence[State], made: Sequence[Axis]) -> State:
    """The sum of what Merge weighted, the mean of the rest, also where both lie along one axis of a tensor."""
    found = mean_of(states)
    along: dict[str, int] = {}  # a tensor that is merged along two axes is a sum once
    for axis in made:
        if axis.name in found and along.setdefault(axis.name, axis.axis) == axis.axis:
            units = axis.units_first(found[axis.name])
            found[axis.name] = axis.with_units(found[axis.name], len(states) * units)
    return found
