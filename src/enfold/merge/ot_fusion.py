"""OT-Fusion: layer by layer from the input on, members' units are transported to one member's at the least cost.

    D[i, j] = ||x_i - y_j||²    x_i, y_j: incoming weights of units, behind layers that are aligned already        (1a)
                                or what they do on training data                                                   (1b)
    T = argmin over transport plans <T, D>  - ε H(T),   rows and columns of T sum to 1/d                           (2)
    W̃_l = (d T_l) W_l (d T_{l-1})ᵀ,   θ̄ = (1/M) Σ_m θ̃_m                                                           (3)

With ε = 0 and as many units in all members, d T is a permutation, and (2) is a linear assignment problem.

S. P. Singh, M. Jaggi: Model Fusion via Optimal Transport, NeurIPS 2020, arXiv:1910.05653.

Differs from the paper: groups of units are found for any network; where several layers make one group (residual
streams), those whose inputs are aligned already count, together; members of other widths are refused; blocks of units
(heads) are matched by weights before, and so is what no layer shows, or none on the same samples in all members; ε is
relative to the mean cost, which is squared, where the authors' commands take the distance itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from enfold.data import Data
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError
from enfold.merge.common.activations import Moments, Watched
from enfold.merge.common.assign import best_order
from enfold.merge.common.base import Merge
from enfold.merge.common.split import by_weights_first
from enfold.merge.common.states import mean_of, require_reference, states_of, units_of
from enfold.symmetry import Axis, Group, soft
from enfold.symmetry.matching import real

Cost = Literal["weights", "activations"]
ROUNDS = 1000


@dataclass(frozen=True)
class OTFusion(Merge):
    """The mean of the members after their units were transported to one member's, layer by layer."""

    reference: int = 0  # the member to whose units the others' are transported
    cost: Cost = "activations"  # distances of units by incoming weights, or by what they do on training data
    regularisation: float = 0.0  # ε: 0 is exact; above, units are transported to several, softly
    watch: Watched = "outputs"  # activations: units as outputs of their layers, or as inputs of the next
    examples: int = 4096  # activations: of the training part, at most

    purpose: ClassVar[str] = "OT-Fusion"
    least: ClassVar[dict[str, float]] = {"reference": 0, "examples": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.regularisation < math.inf:
            raise EnfoldError(f"the regularisation must be 0 or more, got {self.regularisation}: 0 is exact transport")

    def merged(self, members: Ensemble, data: Data, checkpoint: Path | None) -> State:
        """Equation (3)."""
        states = states_of(members)
        reference = require_reference(self.reference, len(states))
        symmetry = units_of(members.network(states[reference]), data, self.seed)
        states, seen = by_weights_first(
            states, symmetry, members, data, reference, self.watch, self.seed, examples=self.examples, mixed=True
        )
        learned, rest = set(members.skeleton.parameters), [symmetry[name] for name in seen]
        while rest:
            group = max(rest, key=lambda one: _readiness(one, rest, learned, states[reference]))
            ready, making = _incoming(group, rest, learned)
            rest.remove(group)
            for index in set(range(len(states))) - {reference}:
                if self.cost == "weights":
                    costs = _weight_costs(states[reference], states[index], ready or making)  # (1a)
                else:
                    costs = _activation_costs(seen[group.name], reference, index)  # (1b)
                plan = transport(costs, self.regularisation)
                states[index] = soft(states[index], group, plan, plan.mT)  # (3)
        return mean_of(states)


def transport(costs: Tensor, regularisation: float = 0.0) -> Tensor:
    """d T of equation (2), (d, d): rows and columns sum to 1."""
    if not bool(costs.isfinite().all()):
        raise EnfoldError("units are transported at finite costs, got some that are not: leave out members with NaN")
    if not regularisation:
        return torch.eye(len(costs), dtype=costs.dtype)[best_order(costs.max() - costs)]
    strength = regularisation * float(costs.mean())
    logits = -costs / (strength or 1.0)
    for _ in range(ROUNDS):
        logits = logits - logits.logsumexp(0, keepdim=True)
        rows = logits.logsumexp(1, keepdim=True)
        logits = logits - rows
        if float(rows.abs().max()) < 1e-9:
            break
    if not bool(logits.exp().isfinite().all()):
        raise EnfoldError(f"a regularisation must leave costs finite, got {regularisation}: 0 is exact transport")
    return logits.exp()


def _incoming(group: Group, rest: Sequence[Group], learned: set[str]) -> tuple[list[Axis], list[Axis]]:
    """The axes that make the units: those of tensors in which all else is aligned, and all."""
    waiting = {axis.name for other in rest if other is not group for axis in other.axes}
    waiting |= {axis.name for axis in group.axes if axis.role == "consumes"}  # recurrent: made of the units themselves
    making = [axis for axis in group.axes if axis.role != "consumes" and axis.name in learned]
    return [axis for axis in making if axis.name not in waiting], making


def _readiness(group: Group, rest: Sequence[Group], learned: set[str], state: State) -> tuple[bool, int]:
    """From the input on: a group behind aligned ones alone is first; a residual stream, which waits for what waits for
    it, comes before what has no more than biases and scales ready."""
    ready, making = _incoming(group, rest, learned)
    return ready == making, sum(axis.units_first(state[axis.name])[0].numel() for axis in ready)


def _weight_costs(fixed: State, state: State, axes: Sequence[Axis]) -> Tensor:
    ours, theirs = (
        torch.cat([real(axis.by_unit(one[axis.name]).detach().cpu()).flatten(1).double() for axis in axes], dim=1)
        for one in (fixed, state)
    )
    return torch.cdist(ours, theirs).square()


def _activation_costs(seen: Moments, reference: int, index: int) -> Tensor:
    """E[(x - y)²] = E[x²] + E[y²] - 2 E[x y]."""
    second = seen.second()
    ours, theirs = (seen.block(second, one, one).diagonal() for one in (reference, index))
    return (ours[:, None] + theirs - 2 * seen.block(second, reference, index)).clamp_min(0)
