"""C²M³: all members are permuted into one common universe at once, so that matches agree around every cycle.

    max over P  Σ_{a<b} <P_a(θ_a), P_b(θ_b)>     P_a: doubly stochastic matrices of all groups of member a         (1)
    S = argmax over permutations <∇_P (1), S>,   P ← (1 - t) P + t S,   t = argmax on [0, 1] of (1)                (2)
    P ← the nearest permutations;   θ̄ = (1/M) Σ_a P_a(θ_a)                                                        (3)

The match of member a to member b is P_aᵀ P_b, so that going a → b → c → a changes nothing, whoever was first; matching
pair by pair has no such guarantee.

D. Crisostomi, M. Fumero, D. Baieri, F. Bernard, E. Rodolà: C²M³: Cycle-Consistent Multi-Model Merging, NeurIPS 2024,
arXiv:2405.17897.

Differs from the paper: it may start from members matched to the first one, and does by default, since from the members'
own orders (init="identity") all members move at once and copies in other orders are not always found; permutations
that end below the start in (1) are not taken; the universe is written in member 0's order, which changes nothing but
names; t is exact, not searched for; a gain counts as a part of (1), not in its own units; groups are found for any
network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.polynomial import Chebyshev
from torch import Tensor

from enfold.data import Data
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.merge.common.assign import best_order
from enfold.merge.common.base import Alignment
from enfold.merge.common.sinkhorn import sinkhorn
from enfold.merge.common.split import overlap
from enfold.seeds import generator
from enfold.symmetry import Group, Symmetry, matched_to, permute, soft
from enfold.symmetry.matching import real

Init = Literal["matched", "identity", "uniform"]
Matrices = list[dict[str, Tensor]]  # by member and group
Orders = list[dict[str, Tensor]]


@dataclass(frozen=True)
class C2M3(Alignment):
    """The mean of the members after all of them were permuted into one universe."""

    init: Init = "matched"  # matched to the first by weights, in their own orders (identity), or all mixed (uniform)
    iterations: int = 200  # of Frank and Wolfe's method, at most
    patience: int = 5  # stop after so many iterations that gain little
    gain: float = 1e-6  # what is little, as a part of the objective

    purpose: ClassVar[str] = "C2M3"
    least: ClassVar[dict[str, float]] = {"iterations": 0, "patience": 1, "gain": 0}

    def ordered(
        self,
        states: Sequence[State],
        symmetry: Symmetry,
        members: Ensemble,
        data: Data,
        checkpoint: Path | None,
    ) -> list[State]:
        """All members in the universe, in member 0's order."""
        learned = set(members.skeleton.parameters)
        found = list(states)
        if self.init == "matched":
            found[1:] = [matched_to(found[0], state, symmetry, seed=self.seed, learned=learned) for state in found[1:]]
        universe = _Universe(found, symmetry, learned)
        matrices = self._solved(universe, universe.mixed(self.seed) if self.init == "uniform" else universe.identity())
        rounded = universe.in_order_of_first(universe.rounded(matrices))
        if universe.value(universe.hard(rounded)) > universe.value(universe.identity()):  # (3)
            found = [permute(state, symmetry, orders) for state, orders in zip(found, rounded, strict=True)]
        return found

    def _solved(self, universe: _Universe, matrices: Matrices) -> Matrices:
        """Equation (2)."""
        value, stalls = universe.value(matrices), 0
        for _ in range(self.iterations):
            towards = universe.hard(universe.rounded(universe.gradient(matrices)))
            step = universe.best_step(matrices, towards)
            moved = _between(matrices, towards, step)
            reached = universe.value(moved)
            stalls = stalls + 1 if reached - value <= self.gain * abs(value) else 0
            if reached <= value or stalls >= self.patience:
                break
            matrices, value = moved, reached
        return matrices


class _Universe:
    """The objective (1) and its slope, over the tensors that may be permuted."""

    def __init__(self, states: Sequence[State], symmetry: Symmetry, learned: set[str]) -> None:
        names = {axis.name for group in symmetry.groups for axis in group.axes if not axis.tied_to} & learned
        self.groups = [_counted(group, names) for group in symmetry.groups]
        self.groups = [group for group in self.groups if group.axes]
        self.states = [{name: real(state[name].detach().cpu()).double() for name in sorted(names)} for state in states]
        self.degree = 2 * max(self._factors().values(), default=0)  # of (1) as a polynomial along a line

    def _factors(self) -> dict[str, int]:
        """By tensor: how many matrices one weight is multiplied by, at most; those of its other parts do not count."""
        counts = {name: torch.zeros(tensor.shape, dtype=torch.uint8) for name, tensor in self.states[0].items()}
        for axis in (axis for group in self.groups for axis in group.axes):
            axis.units_first(counts[axis.name]).add_(1)
        return {name: int(count.max()) for name, count in counts.items()}

    def identity(self) -> Matrices:
        """P = I."""
        return [{g.name: torch.eye(g.size, dtype=torch.float64) for g in self.groups} for _ in self.states]

    def mixed(self, seed: int) -> Matrices:
        """P near to the uniform matrix; at it, all slopes are the same, and nothing would move."""
        source = generator(seed, "universe")
        scores = [
            {g.name: torch.rand(g.size, g.size, generator=source, dtype=torch.float64) for g in self.groups}
            for _ in self.states
        ]
        return [{name: sinkhorn(one)[0] for name, one in each.items()} for each in scores]

    def value(self, matrices: Matrices) -> float:
        """Equation (1)."""
        with torch.no_grad():
            return float(self._objective(matrices))

    def best_step(self, here: Matrices, there: Matrices) -> float:
        """The t with the largest value between two points; along a line, (1) is a polynomial, so it is exact."""
        at = (1 - np.cos(np.pi * (2 * np.arange(self.degree + 1) + 1) / (2 * self.degree + 2))) / 2
        values = [self.value(_between(here, there, float(t))) for t in at]
        curve = Chebyshev.fit(at, values, self.degree, domain=[0, 1])
        flat = [complex(t) for t in curve.deriv().roots()] if self.degree else []
        inside = [t.real for t in flat if abs(t.imag) < 1e-9 and 0 < t.real < 1]
        return max((0.0, *inside, 1.0), key=lambda t: float(curve(t)))

    def gradient(self, matrices: Matrices) -> Matrices:
        """The slope of (1) in each matrix."""
        leaves = [{name: matrix.detach().requires_grad_() for name, matrix in one.items()} for one in matrices]
        flat = [matrix for one in leaves for matrix in one.values()]
        with torch.enable_grad():
            slopes = iter(torch.autograd.grad(self._objective(leaves), flat))
        return [{name: next(slopes) for name in one} for one in leaves]

    def _objective(self, matrices: Matrices) -> Tensor:
        """Σ_{a<b} <x_a, x_b> = ½ (||Σ_a x_a||² - Σ_a ||x_a||²)."""
        there = [self._moved(state, one) for state, one in zip(self.states, matrices, strict=True)]
        found = torch.zeros((), dtype=torch.float64)
        for name in self.states[0]:
            stacked = torch.stack([state[name] for state in there])
            found = found + (stacked.sum(0).square().sum() - stacked.square().sum()) / 2
        return found

    def _moved(self, state: State, matrices: dict[str, Tensor]) -> State:
        for group in self.groups:
            state = soft(state, group, matrices[group.name], matrices[group.name].mT)
        return state

    def rounded(self, matrices: Matrices) -> Orders:
        """The permutations with the largest inner products."""
        return [{name: best_order(matrix) for name, matrix in one.items()} for one in matrices]

    def in_order_of_first(self, orders: Orders) -> Orders:
        """The same matches, with member 0 as it is; blocks and what is inside them keep their places."""
        alone = [group for group in self.groups if not any(overlap(group, other) for other in self.groups)]
        back = {group.name: orders[0][group.name].argsort() for group in alone}
        return [{name: order[back[name]] if name in back else order for name, order in one.items()} for one in orders]

    @staticmethod
    def hard(orders: Orders) -> Matrices:
        """Orders as matrices with P[k, order[k]] = 1."""
        return [{name: torch.eye(len(o), dtype=torch.float64)[o] for name, o in one.items()} for one in orders]


def _counted(group: Group, names: set[str]) -> Group:
    """The group with its axes of these tensors; with P^-1 = Pᵀ, a tensor may both produce and consume its units."""
    counted = [axis for axis in group.axes if axis.name in names]
    axes = (replace(axis, role="produces") if axis.role == "both" else axis for axis in counted)
    return Group(group.name, group.size, tuple(axes))


def _between(here: Matrices, there: Matrices, t: float) -> Matrices:
    return [
        {name: (1 - t) * matrix + t * other[name] for name, matrix in one.items()}
        for one, other in zip(here, there, strict=True)
    ]
