"""Linear assignment problems of weight matching.

    G[i, j] = <θ_i, θ'_j>  +  Σ over kinds of inner groups  ( max over P <θ_i, P(θ'_j)>  -  <θ_i, θ'_j> )          (1)
    order = argmax over permutations  Σ_i G[i, order(i)]                                                           (2)

G[i, j] is the contribution of unit j of one network at index i of the other to the inner product of their weights.
Units inside a unit (those of a head: of its queries and keys, of its values) are put in the order P that is best for
the pair, so that (2) is the joint optimum of a group and of all groups inside its units. If several inner groups act on
the same weights (query heads with a common key head, and the units of both), P is found by coordinate ascent for each
pair.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from enfold.engines.skeleton import State
from enfold.symmetry.axes import Axis, Group, Symmetry
from enfold.symmetry.nested import GroupTree
from enfold.symmetry.permute import permute

Ascend = Callable[[State, State, Symmetry], dict[str, Tensor]]
"""Orders, for `permute`, that bring the second state near to the first."""

SMALL = 100  # units, below which the solver takes less time than an estimate of the prices

InnerOrders = tuple[float, list[Tensor]]
"""The gain of the best orders inside a unit, and these orders, one per kind."""


@dataclass(frozen=True)
class Step:
    """Solution of equation (2) for one group tree."""

    moves: list[tuple[Group, Tensor]]  # in this order: the units, then the units inside each
    gain: float  # over the current order
    noise: float  # a gain up to it is rounding


class GainMatrices:
    """The matrices <unit i of the goal, unit j of the current state> of all groups, updated incrementally.

    Products are computed once and then updated after every move: those of the moved tree by permuting columns, those of
    adjacent trees by the contribution of the units that moved.
    """

    def __init__(self, goal: State, held: State, group_trees: Sequence[GroupTree], ascend: Ascend) -> None:
        self.goal, self.group_trees, self.ascend = goal, group_trees, ascend
        lengths = {name: float(goal[name].norm()) * float(held[name].norm()) for name in goal}
        single = all(tensor.dtype == torch.float32 for state in (goal, held) for tensor in state.values())
        inside = 1e-20 < sum(lengths.values()) < 1e20  # far from the ends of float32's range
        self.dtype = torch.float32 if single and inside else torch.float64
        self.axes = [[axis for axis in tree.outer.axes if axis.name in goal] for tree in group_trees]
        self.names = [{axis.name for axis in axes} for axes in self.axes]
        self.beside = [
            {k for k, other in enumerate(self.names) if own & other and (k != index or _is_quadratic(self.axes[k]))}
            for index, own in enumerate(self.names)
        ]  # group_trees whose products change when one has moved; its own do if a tensor has it on two axes
        self.simple = [not tree.inside and k not in self.beside[k] for k, tree in enumerate(group_trees)]
        self.along: dict[
            str, list[tuple[int, Axis]]
        ] = {}  # group_trees and axes, of the tensors whose products are followed
        for index, axes in enumerate(self.axes):
            for axis in axes:
                self.along.setdefault(axis.name, []).append((index, axis))
        for name, along in list(self.along.items()):
            if not all(self.simple[index] and not axis.within for index, axis in along):
                del self.along[name]
        self.sums = [torch.zeros(tree.outer.size, tree.outer.size, dtype=self.dtype) for tree in group_trees]
        self.summed: list[set[Axis]] = [set() for _ in group_trees]  # whose products are in the sums
        eps = torch.finfo(self.dtype).eps  # relative to the terms of a sum, not to the sum itself
        self.rounding = [100 * eps * sum(lengths[axis.name] for axis in axes) for axes in self.axes]

    def best(self, held: State, index: int, names: Collection[str]) -> Step:
        """Return the best step of one tree, computed from these of its tensors.

        Args:
            held: The state that is permuted.
            index: The index of the tree.
            names: The names of the tensors.
        """
        chosen = [axis for axis in self.axes[index] if axis.name in names]
        followed = {axis for axis in chosen if axis.name in self.along}
        for axis in followed - self.summed[index]:
            self._add(self.sums[index], axis, self.goal[axis.name], held[axis.name])
        self.summed[index] |= followed
        pairs = self.sums[index].clone()
        for axis in chosen:
            if axis not in followed:
                self._add(pairs, axis, self.goal[axis.name], held[axis.name])
        tree, now, inside = self.group_trees[index], pairs.trace(), []
        if tree.inside:
            inside = self._match_jointly(held, tree, names) if tree.coupled else self._apart(held, tree, names)
            pairs = pairs + torch.tensor([[gain for gain, _ in row] for row in inside], dtype=self.dtype)  # (1)
        order = solve_assignment(pairs)  # (2)
        moves = [(tree.outer, order)]
        for i, row in enumerate(inside):
            moves += [(kind[i], best) for kind, best in zip(tree.inside, row[order[i]][1], strict=True)]
        gain = float(pairs.gather(1, order.unsqueeze(1)).sum() - now)
        return Step(moves, gain, torch.finfo(pairs.dtype).eps * len(order) * float(pairs.abs().max()))

    def move(self, held: State, index: int, order: Tensor) -> None:
        """Permute a simple tree in place, in the state and in all products.

        Args:
            held: The state that is permuted.
            index: The index of the tree.
            order: The new order of its units.
        """
        units = _moved_places(order)
        self.sums[index].index_copy_(1, units, self.sums[index].index_select(1, order[units]))
        for axis in self.axes[index]:
            there = axis.units_first(held[axis.name])
            new = there.index_select(0, order[units])
            change = new - there.index_select(0, units)
            there.index_copy_(0, units, new)
            ours = axis.units_first(self.goal[axis.name]).index_select(0, units)
            for other, beside in self.along.get(axis.name, ()):
                if beside.axis != axis.axis and beside in self.summed[other]:
                    number = beside.axis + (2 if beside.axis > axis.axis else 3)  # behind units, outer and inner
                    self._add(self.sums[other], replace(beside, axis=number), ours, change)

    def increase(self, held: State, index: int, order: Tensor) -> float:
        """Return the increase of the inner product for a new order of a simple tree, in float64.

        Args:
            held: The state that is permuted.
            index: The index of the tree.
            order: The new order of its units.
        """
        units, total = _moved_places(order), 0.0
        for axis in self.axes[index]:
            ours, there = (axis.units_first(state[axis.name]) for state in (self.goal, held))
            change = there.index_select(0, order[units]).double() - there.index_select(0, units)
            total += float((change * ours.index_select(0, units)).sum())
        return total

    def _add(self, pairs: Tensor, axis: Axis, goal: Tensor, held: Tensor) -> None:
        pairs.addmm_(axis.by_unit(goal).to(self.dtype), axis.by_unit(held).mT.to(self.dtype))

    def _apart(self, held: State, tree: GroupTree, names: Collection[str]) -> list[list[InnerOrders]]:
        """Return, for each pair of units, the best inner orders, one kind at a time."""
        ours, theirs = (
            [[self._units(state, kind[i], names) for kind in tree.inside] for i in range(tree.outer.size)]
            for state in (self.goal, held)
        )
        return [[_best(one, other) for other in theirs] for one in ours]

    def _match_jointly(self, held: State, tree: GroupTree, names: Collection[str]) -> list[list[InnerOrders]]:
        """Return, for each pair of units, the best inner orders, all kinds jointly."""
        ours, theirs = ([tree.unit(state, i, names) for i in range(tree.outer.size)] for state in (self.goal, held))
        known = [replace(group, axes=tuple(axis for axis in group.axes if axis.name in ours[0])) for group in tree.each]
        each = Symmetry(tuple(group for group in known if group.axes), ())

        def ascend(one: State, other: State) -> InnerOrders:
            orders = self.ascend(one, other, each)
            gain = increase(one, other, permute(other, each, orders))
            return gain, [orders.get(group.name, torch.arange(group.size)) for group in tree.each]

        return [[ascend(one, other) for other in theirs] for one in ours]

    def _units(self, state: State, group: Group, names: Collection[str]) -> Tensor:
        """Return (units, remaining entries) over all axes."""
        along = [axis.by_unit(state[axis.name]).to(self.dtype) for axis in group.axes if axis.name in names]
        return torch.cat([torch.zeros(group.size, 0, dtype=self.dtype), *along], dim=1)


def _best(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> InnerOrders:
    """Return the best order of each kind independently."""
    gain, orders = 0.0, []
    for one, other in zip(ours, theirs, strict=True):
        products = one @ other.mT
        orders.append(solve_assignment(products))
        gain += float((products.gather(1, orders[-1].unsqueeze(1)).squeeze(1) - products.diagonal()).sum())
    return gain, orders


def increase(goal: State, held: State, moved: State) -> float:
    """Return the increase of the inner product with the goal after a move, in float64."""
    names = [name for name in goal if moved[name] is not held[name]]
    return sum(float(((moved[name].double() - held[name]) * goal[name]).sum()) for name in names)


def _moved_places(order: Tensor) -> Tensor:
    """Return the indices to which an order assigns another unit."""
    return (order != torch.arange(len(order))).nonzero().squeeze(1)


def _is_quadratic(axes: Sequence[Axis]) -> bool:
    return len({axis.name for axis in axes}) < len({(axis.name, axis.axis) for axis in axes})


def solve_assignment(gains: Tensor) -> Tensor:
    """Return the order that maximises the sum of gains[k, order[k]].

    A number subtracted from a column does not change the solution. The solver starts without such numbers and finds
    them row by row; with a first estimate from the two largest entries of every row it takes about half the time.
    """
    from scipy.optimize import linear_sum_assignment

    if len(gains) < SMALL:
        return torch.as_tensor(linear_sum_assignment(gains.numpy(), maximize=True)[1])
    prices = (gains - gains.topk(2, dim=1).values[:, 1:]).amax(0)
    return torch.as_tensor(linear_sum_assignment((prices.double() - gains).numpy())[1])
