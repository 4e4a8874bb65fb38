"""Activation matching: members' hidden units are put in the order in which they fire like one member's, then averaged.

    P_m = argmax over permutations  Σ_i C[i, P(i)],   C = correlations of the reference's units with the member's  (1a)
                                                      or their second moments E[x_r x_mᵀ]                          (1b)
    θ̄  = (1/M) Σ_m P_m(θ_m),   P_r = identity                                                                     (2)

Each group of units is one linear assignment problem, solved exactly and by itself.

S. K. Ainsworth, J. Hayase, S. Srinivasa: Git Re-Basin: Merging Models modulo Permutation Symmetries, ICLR 2023,
arXiv:2209.04836 (1b); K. Jordan et al.: REPAIR, ICLR 2023, arXiv:2211.08403 (1a).

Differs from the papers: groups are found for any network; more than two members are all matched to the reference;
units that are seen at several layers (residual streams) are matched at all of them together; blocks (heads) and groups
that no layer shows, or none on the same samples in all members, are matched by weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from enfold.data import Data
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.merge.common.activations import Watched
from enfold.merge.common.assign import best_order
from enfold.merge.common.base import Alignment
from enfold.merge.common.split import by_weights_first
from enfold.merge.common.states import require_reference
from enfold.symmetry import Symmetry, permute

Likeness = Literal["correlation", "second_moment"]


@dataclass(frozen=True)
class ActivationMatching(Alignment):
    """The mean of the members after their units were matched to one member's by what they do on training data."""

    reference: int = 0  # the member whose order the others are put in
    likeness: Likeness = "correlation"  # of two units: correlation, or second_moment (not centred)
    watch: Watched = "inputs"  # units as inputs of the next layers, or as outputs of their own
    examples: int = 4096  # of the training part, at most

    purpose: ClassVar[str] = "activation matching"
    least: ClassVar[dict[str, float]] = {"reference": 0, "examples": 1}

    def ordered(
        self,
        states: Sequence[State],
        symmetry: Symmetry,
        members: Ensemble,
        data: Data,
        checkpoint: Path | None,
    ) -> list[State]:
        """Each member in the order of equation (1)."""
        reference = require_reference(self.reference, len(states))
        states, seen = by_weights_first(
            states, symmetry, members, data, reference, self.watch, self.seed, examples=self.examples
        )
        found = []
        for index, state in enumerate(states):
            orders = {}
            for name, one in seen.items() if index != reference else ():
                likeness = one.correlation() if self.likeness == "correlation" else one.second()
                orders[name] = best_order(one.block(likeness, reference, index))  # (1)
            found.append(permute(state, symmetry, orders))
        return found
