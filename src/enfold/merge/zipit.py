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

import numpy as np
import torch
from torch import Tensor

from enfold.data import Data
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError
from enfold.merge.common.activations import Watched
from enfold.merge.common.base import Merge
from enfold.merge.common.split import by_weights_first
from enfold.merge.common.states import mean_of, states_of, units_of
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

    def merged(self, members: Ensemble, data: Data, checkpoint: Path | None) -> State:
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
    merged_into = np.arange(total)
    for _ in range(total - total // num_members):
        row, column = pairs.most_alike()
        merged_into[merged_into == column] = row
        pairs.merge(row, column)
    units = torch.as_tensor(np.unique(merged_into, return_inverse=True)[1])
    return torch.eye(total // num_members, dtype=likeness.dtype)[units]


class _Pairs:
    """How alike all pairs of units are, and which pairs may be merged.

    The most alike partner of each unit is kept, so that a merge costs O(M d) and not O((M d)²). A merge that takes a
    unit's partner away leaves its likeness as an upper bound; its next partner is searched once the bound is on top.
    """

    def __init__(self, likeness: Tensor, num_members: int, discount: float, budget: float) -> None:
        total = len(likeness)
        size = total // num_members
        place, self.member = np.arange(total) % size, np.arange(total) // size
        self.likes, self.discount, self.full = likeness.numpy(force=True).copy(), discount, num_members
        self.held = np.ones(total, dtype=int)  # how many units each one holds; 0 once it is merged into another
        within = self.member[:, None] == self.member
        self.likes[(place[:, None] == place) & ~within] += SAME_PLACE
        self.open = ~np.eye(total, dtype=bool)  # pairs that may be merged
        self.left = [int((total - size) / num_members * budget + 1e-4)] * num_members
        self.best, self.partner = np.full(total, np.inf), np.zeros(total, dtype=int)
        self.outdated = np.ones(total, dtype=bool)  # units whose likeness to their partner is an upper bound only
        for index in range(num_members):
            self._close(index)

    def _close(self, member: int) -> None:
        """No more merges inside a member whose budget is spent."""
        if self.left[member] <= 0:
            own = self.member == member
            self.open[np.ix_(own, own)] = False
            self.outdated |= own & own[self.partner]

    def most_alike(self) -> tuple[int, int]:
        """The pair to be merged; where none may be merged any more, any pair."""
        row = self._top()
        if self.best[row] == -np.inf:
            live = self.held > 0
            self.open = live[:, None] & live
            np.fill_diagonal(self.open, False)
            self.best[live], self.outdated[:] = np.inf, True
            self.left = [len(self.held)] * len(self.left)
            row = self._top()
        one, other = sorted((row, int(self.partner[row])))
        return one, other

    def _top(self) -> int:
        """The first unit whose likeness to its partner is largest."""
        row = int(self.best.argmax())
        while self.outdated[row]:
            self._search(row)
            row = int(self.best.argmax())
        return row

    def _search(self, row: int) -> None:
        """The most alike partner of a unit, from all its pairs."""
        likes = np.where(self.open[row], self.likes[row], -np.inf)
        self.partner[row] = likes.argmax()
        self.best[row], self.outdated[row] = likes[self.partner[row]], False

    def merge(self, row: int, column: int) -> None:
        """The second goes into the first."""
        self.held[row] += self.held[column]
        self.held[column] = 0
        merged = np.minimum(self.likes[row], self.likes[column])  # (2)
        if self.held[row] >= self.full:
            merged = merged * self.discount if self.discount else np.full_like(merged, LAST)
        both = self.open[row] & self.open[column]
        self.likes[row] = self.likes[:, row] = merged
        self.open[row] = self.open[:, row] = both
        self.open[column] = self.open[:, column] = False
        self.outdated |= (self.partner == row) | (self.partner == column)
        nearer = both & (merged > self.best)  # a discount raises what is below 0
        first = both & (merged == self.best) & ~self.outdated & (row < self.partner)
        self.best[nearer], self.outdated[nearer] = merged[nearer], False
        self.partner[nearer | first] = row
        self.best[column], self.outdated[column] = -np.inf, False
        if self.member[row] == self.member[column]:
            self.left[int(self.member[row])] -= 1
            self._close(int(self.member[row]))
        self._search(row)


def _joined(states: Sequence[State], made: Sequence[Axis]) -> State:
    """The sum of what Merge weighted, the mean of the rest, also where both lie along one axis of a tensor."""
    found = mean_of(states)
    along: dict[str, int] = {}  # a tensor that is merged along two axes is a sum once
    for axis in made:
        if axis.name in found and along.setdefault(axis.name, axis.axis) == axis.axis:
            units = axis.units_first(found[axis.name])
            found[axis.name] = axis.with_units(found[axis.name], len(states) * units)
    return found
