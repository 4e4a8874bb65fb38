"""ZipIt!: the M d units of all members are merged in pairs, also within one member, until d are left.

    C = correlations of all M d units of a group; the pair with the largest is merged, again and again               (1)
    likeness of a merged unit to another = a · min of the two's, with a from the M-th on                             (2)
    Merge (d, M d): the mean of what is in a unit;   Unmerge (M d, d): 1 where a unit came from                      (3)
    W* = Merge_l · blockdiag(W_1 .. W_M) · Unmerge_{l-1},   (1/M) Σ where nothing is merged (the logits)             (4)

Members that were trained on different tasks retain features that no other member has, because similar units of one
member are merged.

G. Stoica, D. Bolya, J. Bjorner, P. Ramesh, T. Hearn, J. Hoffman: ZipIt! Merging Models from Different Tasks without
Training, ICLR 2024, arXiv:2305.03053.

Differs from the paper: all layers are merged, so that the result is one network of the members' class; constant units
of equal value have likeness 1; among equal pairs, those at the same index come first; where budgets leave no pair, any
is merged; a unit is discounted (2) once it contains M, which for two members is as in the paper, so that one unit of
each member can be merged; groups of units are found for any network; heads, and groups that no layer shows, or none on
the same samples in all members, are matched by weights; a budget below one merge allows none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.data.convert import Examples
from enfold.data.unpack import Unpack
from enfold.engines.skeleton import State
from enfold.merge.common.activations import Side
from enfold.merge.common.inputs import Models, prepare_inputs
from enfold.merge.common.merging import build_network, observe_members
from enfold.merge.common.states import mean_of
from enfold.merge.repair import RepairKind
from enfold.symmetry import Axis, soft

SAME_INDEX = 1e-9  # added to the likeness of two members' units of one index
LAST = -1e3  # the likeness of units that are merged only where nothing else is left


@checked
def zipit(
    models: Models,
    train: Examples,
    *,
    discount: Annotated[float, Field(ge=0, le=1)] = 0.3,
    budget: Annotated[float, Field(ge=0, le=1)] = 0.125,
    watch: Side = "inputs",
    examples: Annotated[int, Field(ge=1)] = 4096,
    repair: RepairKind = "reset",
    seed: int = 0,
    unpack: Unpack | None = None,
) -> nn.Module:
    """Return one network of the most similar units of all members, merged within and across members.

    Args:
        models: An ensemble, or networks of one architecture; they are not modified.
        train: Training examples on which units are compared.
        discount: Factor a on the likeness of a merged unit; below 1, chains of merges are rare.
        budget: Fraction b of the d (M-1)/M units that a member loses which may be merged within that member.
        watch: Where units are observed: as "inputs" of the next layers, or as "outputs" of their own.
        examples: Maximum number of training examples.
        repair: Statistics of the merged network: "reset" measures batch norms again, "none" averages them, "repair",
            "rescale" and "closed_form" also correct hidden units as `enfold.merge.repair` does.
        seed: Seed of the order of the examples and of matching.
        unpack: Function that splits a batch into (inputs, target); None for the usual structures of batches.

    Returns:
        A network of the members' class in eval mode; a single member is returned unchanged.

    Raises:
        EnfoldError: If the networks cannot be matched, or examples are needed and missing.
    """
    inputs = prepare_inputs("zipit", models, train, needs_train=True, unpack=unpack)
    if inputs.ensemble.num_members == 1:
        return inputs.ensemble.member(0).eval()
    symmetry, states, moments = observe_members(inputs, 0, watch, seed, examples)
    summed: list[Axis] = []  # axes along which members are combined by Merge, and not by the mean
    for name, one in moments.items():
        unmerge = zip_units(one.correlation(), len(states), discount, budget)  # (M d, d)
        merge = (unmerge / unmerge.sum(0)).mT  # (3)
        for index, state in enumerate(states):
            rows = slice(index * one.size, (index + 1) * one.size)
            states[index] = soft(state, symmetry[name], merge[:, rows], unmerge[rows])
        summed += [axis for axis in symmetry[name].axes if not axis.divided]
    return build_network(inputs, _join(states, summed), repair, seed)  # (4)


def zip_units(likeness: Tensor, num_members: int, discount: float = 0.3, budget: float = 0.125) -> Tensor:
    """Return Unmerge of equation (3), (M d, d): which of d units each of the M d is merged into.

    Args:
        likeness: The similarity of all units, (M d, M d).
        num_members: The number of members.
        discount: The factor on the similarity of units that are merged already.
        budget: The fraction of the units that a member loses which may be merged within that member.
    """
    pairs = _Pairs(likeness, num_members, discount, budget)
    total = len(likeness)
    merged_into = np.arange(total)
    for _ in range(total - total // num_members):
        row, column = pairs.most_similar()
        merged_into[merged_into == column] = row
        pairs.merge(row, column)
    units = torch.as_tensor(np.unique(merged_into, return_inverse=True)[1])
    return torch.eye(total // num_members, dtype=likeness.dtype)[units]


class _Pairs:
    """The likeness of all pairs of units, and which pairs may be merged.

    The most similar partner of each unit is stored, so that a merge costs O(M d) and not O((M d)²). A merge that
    removes a unit's partner leaves its likeness as an upper bound; its next partner is searched once the bound is the
    largest.
    """

    def __init__(self, likeness: Tensor, num_members: int, discount: float, budget: float) -> None:
        total = len(likeness)
        size = total // num_members
        index, self.member = np.arange(total) % size, np.arange(total) // size
        self.likes, self.discount, self.full = likeness.numpy(force=True).copy(), discount, num_members
        self.counts = np.ones(total, dtype=int)  # the number of units in each one; 0 once it is merged into another
        within = self.member[:, None] == self.member
        self.likes[(index[:, None] == index) & ~within] += SAME_INDEX
        self.open = ~np.eye(total, dtype=bool)  # pairs that may be merged
        self.left = [int((total - size) / num_members * budget + 1e-4)] * num_members
        self.best, self.partner = np.full(total, np.inf), np.zeros(total, dtype=int)
        self.outdated = np.ones(total, dtype=bool)  # units whose likeness to their partner is only an upper bound
        for member in range(num_members):
            self._close(member)

    def _close(self, member: int) -> None:
        """Allow no more merges within a member whose budget is spent."""
        if self.left[member] <= 0:
            own = self.member == member
            self.open[np.ix_(own, own)] = False
            self.outdated |= own & own[self.partner]

    def most_similar(self) -> tuple[int, int]:
        """Return the pair to merge next; any pair if the budgets leave none."""
        row = self._top()
        if self.best[row] == -np.inf:
            live = self.counts > 0
            self.open = live[:, None] & live
            np.fill_diagonal(self.open, False)
            self.best[live], self.outdated[:] = np.inf, True
            self.left = [len(self.counts)] * len(self.left)
            row = self._top()
        one, other = sorted((row, int(self.partner[row])))
        return one, other

    def _top(self) -> int:
        """Return the first unit whose likeness to its partner is largest."""
        row = int(self.best.argmax())
        while self.outdated[row]:
            self._search(row)
            row = int(self.best.argmax())
        return row

    def _search(self, row: int) -> None:
        """Find the most similar partner of a unit among all its pairs."""
        likes = np.where(self.open[row], self.likes[row], -np.inf)
        self.partner[row] = likes.argmax()
        self.best[row], self.outdated[row] = likes[self.partner[row]], False

    def merge(self, row: int, column: int) -> None:
        """Merge the second unit into the first."""
        self.counts[row] += self.counts[column]
        self.counts[column] = 0
        merged = np.minimum(self.likes[row], self.likes[column])  # (2)
        if self.counts[row] >= self.full:
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


def _join(states: Sequence[State], summed: Sequence[Axis]) -> State:
    """Return the sum where Merge has weighted units and the mean elsewhere, also within one axis of a tensor."""
    found = mean_of(states)
    along: dict[str, int] = {}  # a tensor that is merged along two axes is a sum once
    for axis in summed:
        if axis.name in found and along.setdefault(axis.name, axis.axis) == axis.axis:
            units = axis.units_first(found[axis.name])
            found[axis.name] = axis.with_units(found[axis.name], len(states) * units)
    return found
