"""C²M³: all members are permuted into one common universe at the same time, so that matches agree around every cycle.

    max over P  Σ_{a<b} <P_a(θ_a), P_b(θ_b)>     P_a: doubly stochastic matrices of all groups of member a         (1)
    S = argmax over permutations <∇_P (1), S>,   P ← (1 - t) P + t S,   t = argmax on [0, 1] of (1)                (2)
    P ← the nearest permutations;   θ̄ = (1/M) Σ_a P_a(θ_a)                                                        (3)

The match of member a to member b is P_aᵀ P_b, so that a → b → c → a is the identity for any start; matching pair by
pair has no such guarantee.

D. Crisostomi, M. Fumero, D. Baieri, F. Bernard, E. Rodolà: C²M³: Cycle-Consistent Multi-Model Merging, NeurIPS 2024,
arXiv:2405.17897.

Differs from the paper: by default it starts from members matched to the first one, because from the members' own orders
(start="identity") all members move at once and permuted copies are not always found; permutations that end below the
start in (1) are rejected; the universe is written in the order of member 0, which only renames units; t is computed
exactly, not by a line search; the tolerance is relative to (1); groups are found for any network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.polynomial import Chebyshev
from pydantic import Field
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.data.convert import Examples
from enfold.data.unpack import Unpack
from enfold.engines.skeleton import State
from enfold.merge.common.alignment import Alignment
from enfold.merge.common.assign import best_order
from enfold.merge.common.inputs import Models, prepare_inputs
from enfold.merge.common.merging import merge_aligned
from enfold.merge.common.sinkhorn import sinkhorn
from enfold.merge.common.split import overlap
from enfold.merge.repair import RepairKind
from enfold.seeds import generator
from enfold.symmetry import Group, Symmetry, match_state, permute, soft
from enfold.symmetry.matching import as_real

Start = Literal["matched", "identity", "uniform"]
Matrices = list[dict[str, Tensor]]  # by member and group
Orders = list[dict[str, Tensor]]


@checked
def c2m3(
    models: Models,
    train: Examples | None = None,
    *,
    example: Any = None,
    start: Start = "matched",
    iterations: Annotated[int, Field(ge=0)] = 200,
    patience: Annotated[int, Field(ge=1)] = 5,
    gain: Annotated[float, Field(ge=0)] = 1e-6,
    repair: RepairKind = "reset",
    seed: int = 0,
    unpack: Unpack | None = None,
) -> nn.Module:
    """Return the mean of the members after permuting all of them into one universe.

    Args:
        models: An ensemble, or networks of one architecture; they are not modified.
        train: Training examples, needed to correct statistics: with batch norm, or `repair` other than "reset".
        example: One or two inputs, (B, ...), in the structure that the network takes, to find its symmetries with; not
            needed with `train`.
        start: What the search starts from: members "matched" to the first by weights, their own orders ("identity"),
            or nearly "uniform" matrices.
        iterations: Maximum number of iterations of Frank and Wolfe's method.
        patience: Number of iterations with little gain after which it stops.
        gain: Relative increase of the objective up to which a gain is little.
        repair: Statistics of the merged network: "reset" measures batch norms again, "none" averages them, "repair",
            "rescale" and "closed_form" also correct hidden units as `enfold.merge.repair` does.
        seed: Seed of matching and of the uniform start.
        unpack: Function that splits a batch into (inputs, target); None for the usual structures of batches.

    Returns:
        A network of the members' class in eval mode; a single member is returned unchanged.

    Raises:
        EnfoldError: If the networks cannot be matched, or examples are needed and missing.
    """
    inputs = prepare_inputs("c2m3", models, train, example=example, repair=repair, unpack=unpack)
    match = partial(match_members, start=start, iterations=iterations, patience=patience, gain=gain, seed=seed)
    return merge_aligned(inputs, match, repair, seed)


def match_members(
    alignment: Alignment, *, start: Start, iterations: int, patience: int, gain: float, seed: int
) -> list[State]:
    """Return all members in the universe, in the order of member 0.

    Args:
        alignment: The members and their groups of units.
        init: The initial permutations.
        iterations: The maximum number of iterations.
        patience: Consecutive iterations without a gain after which the search ends.
        gain: The relative increase of the objective up to which an iteration has no gain.
        seed: The seed.
    """
    symmetry, learned, found = alignment.symmetry, alignment.parameters, list(alignment.states)
    if start == "matched":
        found[1:] = [match_state(found[0], state, symmetry, seed=seed, learned=learned) for state in found[1:]]
    universe = _Universe(found, symmetry, learned)
    first = universe.random_start(seed) if start == "uniform" else universe.identity()
    matrices = _maximize(universe, first, iterations, patience, gain)
    orders = universe.in_order_of_first(universe.nearest_orders(matrices))
    if universe.value(universe.as_matrices(orders)) > universe.value(universe.identity()):  # (3)
        found = [permute(state, symmetry, own) for state, own in zip(found, orders, strict=True)]
    return found


def _maximize(universe: _Universe, matrices: Matrices, iterations: int, patience: int, gain: float) -> Matrices:
    """Iterate equation (2)."""
    value, stalls = universe.value(matrices), 0
    for _ in range(iterations):
        towards = universe.as_matrices(universe.nearest_orders(universe.gradient(matrices)))
        step = universe.best_step(matrices, towards)
        candidate = _interpolate(matrices, towards, step)
        reached = universe.value(candidate)
        stalls = stalls + 1 if reached - value <= gain * abs(value) else 0
        if reached <= value or stalls >= patience:
            break
        matrices, value = candidate, reached
    return matrices


class _Universe:
    """The objective (1) and its gradient, over the tensors that may be permuted."""

    def __init__(self, states: Sequence[State], symmetry: Symmetry, learned: set[str]) -> None:
        names = {axis.name for group in symmetry.groups for axis in group.axes if not axis.tied_to} & learned
        self.groups = [_restrict(group, names) for group in symmetry.groups]
        self.groups = [group for group in self.groups if group.axes]
        self.states = [
            {name: as_real(state[name].detach().cpu()).double() for name in sorted(names)} for state in states
        ]
        self.degree = 2 * max(self._factors().values(), default=0)  # of (1) as a polynomial along a line

    def _factors(self) -> dict[str, int]:
        """Return, by tensor, the maximum number of matrices that one weight is multiplied by."""
        counts = {name: torch.zeros(tensor.shape, dtype=torch.uint8) for name, tensor in self.states[0].items()}
        for axis in (axis for group in self.groups for axis in group.axes):
            axis.units_first(counts[axis.name]).add_(1)
        return {name: int(count.max()) for name, count in counts.items()}

    def identity(self) -> Matrices:
        """Return P = I."""
        return [{g.name: torch.eye(g.size, dtype=torch.float64) for g in self.groups} for _ in self.states]

    def random_start(self, seed: int) -> Matrices:
        """Return P near the uniform matrix, at which all gradients are equal and nothing would change."""
        source = generator(seed, "universe")
        scores = [
            {g.name: torch.rand(g.size, g.size, generator=source, dtype=torch.float64) for g in self.groups}
            for _ in self.states
        ]
        return [{name: sinkhorn(one)[0] for name, one in each.items()} for each in scores]

    def value(self, matrices: Matrices) -> float:
        """Return equation (1)."""
        with torch.no_grad():
            return float(self._objective(matrices))

    def best_step(self, here: Matrices, there: Matrices) -> float:
        """Return the exact t with the largest value between two points; along a line, (1) is a polynomial."""
        at = (1 - np.cos(np.pi * (2 * np.arange(self.degree + 1) + 1) / (2 * self.degree + 2))) / 2
        values = [self.value(_interpolate(here, there, float(t))) for t in at]
        curve = Chebyshev.fit(at, values, self.degree, domain=[0, 1])
        flat = [complex(t) for t in curve.deriv().roots()] if self.degree else []
        inside = [t.real for t in flat if abs(t.imag) < 1e-9 and 0 < t.real < 1]
        return max((0.0, *inside, 1.0), key=lambda t: float(curve(t)))

    def gradient(self, matrices: Matrices) -> Matrices:
        """Return the gradient of (1) with respect to each matrix."""
        leaves = [{name: matrix.detach().requires_grad_() for name, matrix in one.items()} for one in matrices]
        flat = [matrix for one in leaves for matrix in one.values()]
        with torch.enable_grad():
            slopes = iter(torch.autograd.grad(self._objective(leaves), flat))
        return [{name: next(slopes) for name in one} for one in leaves]

    def _objective(self, matrices: Matrices) -> Tensor:
        """Return Σ_{a<b} <x_a, x_b> = ½ (||Σ_a x_a||² - Σ_a ||x_a||²)."""
        there = [self._permute(state, one) for state, one in zip(self.states, matrices, strict=True)]
        found = torch.zeros((), dtype=torch.float64)
        for name in self.states[0]:
            stacked = torch.stack([state[name] for state in there])
            found = found + (stacked.sum(0).square().sum() - stacked.square().sum()) / 2
        return found

    def _permute(self, state: State, matrices: dict[str, Tensor]) -> State:
        for group in self.groups:
            state = soft(state, group, matrices[group.name], matrices[group.name].mT)
        return state

    def nearest_orders(self, matrices: Matrices) -> Orders:
        """Return the permutations with the largest inner products."""
        return [{name: best_order(matrix) for name, matrix in one.items()} for one in matrices]

    def in_order_of_first(self, orders: Orders) -> Orders:
        """Return the same matches with member 0 unchanged; blocks and the units inside them are left in place."""
        alone = [group for group in self.groups if not any(overlap(group, other) for other in self.groups)]
        back = {group.name: orders[0][group.name].argsort() for group in alone}
        return [{name: order[back[name]] if name in back else order for name, order in one.items()} for one in orders]

    @staticmethod
    def as_matrices(orders: Orders) -> Matrices:
        """Return orders as matrices with P[k, order[k]] = 1."""
        return [{name: torch.eye(len(o), dtype=torch.float64)[o] for name, o in one.items()} for one in orders]


def _restrict(group: Group, names: set[str]) -> Group:
    """Restrict a group to these tensors; as P^-1 = Pᵀ, a tensor may both produce and consume its units."""
    counted = [axis for axis in group.axes if axis.name in names]
    axes = (replace(axis, role="produces") if axis.role == "both" else axis for axis in counted)
    return Group(group.name, group.size, tuple(axes))


def _interpolate(here: Matrices, there: Matrices, t: float) -> Matrices:
    return [
        {name: (1 - t) * matrix + t * other[name] for name, matrix in one.items()}
        for one, other in zip(here, there, strict=True)
    ]
